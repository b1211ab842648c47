//! What goes to stdout: tables, colours on a terminal, JSON, and a quiet end if the reader goes away.

use std::io::{ErrorKind, IsTerminal, Write};

use serde_json::Value;

/// How the results are printed.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Output {
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Prints a line.
pub(crate) fn line(text: impl AsRef<[u8]>) {
    let mut out = std::io::stdout().lock();
    let bytes = [text.as_ref(), b"\n"].concat();
    if let Err(error) = out.write_all(&bytes).and_then(|()| out.flush()) {
        // `dflockctl watch '>' | head -1` is no failure; end as a process does that SIGPIPE ends.
        let code = if error.kind() == ErrorKind::BrokenPipe { 141 } else { 74 };
        std::process::exit(code);
    }
}

/// Prints a value as one line of JSON.
pub(crate) fn json(value: &Value) {
    line(value.to_string());
}

/// Whether colours are welcome on stdout.
pub(crate) fn colours() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    std::io::stdout().is_terminal() && !refused
}

/// How a cell is painted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paint {
    None,
    Bold,
    Dim,
    Red,
    Green,
    Yellow,
}

impl Paint {
    fn code(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Red => "31",
            Self::Green => "32",
            Self::Yellow => "33",
        }
    }
}

/// Text in a colour, if colours are welcome.
pub(crate) fn paint(text: &str, paint: Paint, colours: bool) -> String {
    if colours && paint != Paint::None {
        format!("\x1b[{}m{text}\x1b[0m", paint.code())
    } else {
        text.to_owned()
    }
}

/// A table; the first row is the heading.
pub(crate) struct Table {
    rows: Vec<Vec<(String, Paint)>>,
    colours: bool,
}

impl Table {
    pub(crate) fn new(heading: &[&str]) -> Self {
        let rows = vec![heading.iter().map(|it| ((*it).to_owned(), Paint::Bold)).collect()];
        Self { rows, colours: colours() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| (cell, Paint::None)).collect());
    }

    pub(crate) fn painted(&mut self, cells: impl IntoIterator<Item = (String, Paint)>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn print(&self) {
        for text in self.lines() {
            line(text);
        }
    }

    fn lines(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|(cell, _)| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let rows = self.rows.iter().map(|row| {
            let mut text = String::new();
            for (column, (cell, how)) in row.iter().enumerate() {
                text.push_str(&paint(cell, *how, self.colours));
                if column + 1 < row.len() {
                    let gap = widths[column].saturating_sub(cell.chars().count()) + 2;
                    text.extend(std::iter::repeat_n(' ', gap));
                }
            }
            text
        });
        rows.collect()
    }
}

/// Bytes of a key or value for people: control characters would move the cursor of their terminal.
pub(crate) fn printable(bytes: &[u8]) -> String {
    clean(&String::from_utf8_lossy(bytes))
}

/// Text for people: control characters would move the cursor of their terminal.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["KEY", "N"]);
        table.row(["long-key".to_owned(), "1".to_owned()]);
        assert_eq!(table.lines(), ["KEY       N", "long-key  1"]);
    }

    #[test]
    fn colours_only_if_welcome() {
        assert_eq!(paint("a", Paint::Red, false), "a");
        assert_eq!(paint("a", Paint::Red, true), "\x1b[31ma\x1b[0m");
        assert_eq!(printable(b"a\x1b[2Jb"), "a\u{fffd}[2Jb");
    }
}
