//! `top`: a live view of locks and queues on the whole screen.
//!
//! `App` is what is shown and how keys change it, without a terminal; `run` brings the terminal and the
//! servers.

use std::collections::{BTreeMap, VecDeque};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table};
use tokio::sync::mpsc;

use crate::connect::{Connection, Settings};
use crate::failure::{Failure, Status};
use crate::output;
use crate::stats::{Answer, Holder, ServerClients};
use crate::time;

/// Round trips whose median is shown.
const TIMES_KEPT: usize = 60;
/// Size of the picture where there is no terminal.
const ONCE_SIZE: (u16, u16) = (100, 30);
/// Cells of the bar that shows how much of a lease is left.
const GAUGE_CELLS: usize = 6;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Look again after so long.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time::parse_some)]
    interval: Duration,
    /// Print one picture as text and end.
    #[arg(long)]
    once: bool,
    /// Show only keys and clients with this text in them.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
    #[command(flatten)]
    settings: Settings,
}

/// `top`.
pub(crate) async fn run(args: Args, outer: &Settings) -> Result<Status, Failure> {
    let connection = args.settings.or(outer).resolve()?;
    let mut clients = ServerClients::new(&connection);
    let mut app = App { filter: args.filter, ..App::default() };
    // The first answer decides whether there is anything to show.
    let answers = clients.stats(&connection).await;
    if answers.iter().all(|(_, stats)| stats.is_err())
        && let Some((_, Err(error))) = answers.first()
    {
        return Err(error.clone().into());
    }
    app.handle_answers(answers, Instant::now());
    if args.once {
        once(&mut app);
        return Ok(Status::Ok);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::usage("top needs a terminal; use --once for one picture"));
    }
    live(app, clients, &connection, args.interval).await
}

fn once(app: &mut App) {
    let (width, height) = ONCE_SIZE;
    let env = |name: &str, default| {
        std::env::var(name)
            .ok()
            .and_then(|it| it.parse().ok())
            .filter(|it| *it > 0)
            .unwrap_or(default)
    };
    let backend = TestBackend::new(env("COLUMNS", width), env("LINES", height));
    let mut terminal = ratatui::Terminal::new(backend).expect("memory does not fail");
    terminal.draw(|frame| app.draw(frame)).expect("memory does not fail");
    let buffer = terminal.backend().buffer();
    for row in buffer.content().chunks(usize::from(buffer.area().width)) {
        let text: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        output::line(text.trim_end());
    }
}

async fn live(
    mut app: App,
    mut clients: ServerClients,
    connection: &Connection,
    interval: Duration,
) -> Result<Status, Failure> {
    let explain = |error| Failure::new(Status::No, format!("the terminal fails: {error}"));
    // Restores the terminal if this process panics; `Screen` does it in all other cases.
    let screen = Screen(ratatui::try_init().map_err(explain)?);
    let outcome = drive(screen, &mut app, &mut clients, connection, interval).await;
    outcome.map(|()| Status::Ok).map_err(explain)
}

/// The terminal while it is ours.
struct Screen(ratatui::DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn drive(
    mut screen: Screen,
    app: &mut App,
    clients: &mut ServerClients,
    connection: &Connection,
    interval: Duration,
) -> std::io::Result<()> {
    let mut keys = keys();
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let mut hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        screen.0.draw(|frame| app.draw(frame))?;
        tokio::select! {
            event = keys.recv() => {
                if app.handle_event(event) {
                    return Ok(());
                }
            }
            _ = ticks.tick() => tokio::select! {
                answers = clients.stats(connection) => app.handle_answers(answers, Instant::now()),
                // A server that does not answer must not keep anybody from leaving.
                event = keys.recv() => {
                    if app.handle_event(event) {
                        return Ok(());
                    }
                }
            },
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
    }
}

/// Events of the terminal, read by a thread.
fn keys() -> mpsc::UnboundedReceiver<Event> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

/// By what the held locks are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Oldest,
    Waiters,
    Key,
    EndsSoon,
}

impl Order {
    fn next(self) -> Self {
        match self {
            Self::Oldest => Self::Waiters,
            Self::Waiters => Self::Key,
            Self::Key => Self::EndsSoon,
            Self::EndsSoon => Self::Oldest,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Oldest => "oldest first",
            Self::Waiters => "longest queue first",
            Self::Key => "by key",
            Self::EndsSoon => "next to end first",
        }
    }
}

/// The numbers that change.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    held: u64,
    waiting: u64,
    connections: u64,
    keys: u64,
    highest_fence: u64,
}

/// A held lock in the table.
#[derive(Clone, Debug)]
struct Hold {
    key: String,
    kind: &'static str,
    holder: Holder,
    waiters: u64,
    lease_left: f64,
}

/// A queue in the table.
#[derive(Clone, Debug)]
struct Queue {
    key: String,
    waiters: u64,
    first_waits_s: f64,
}

/// What is shown.
#[derive(Default)]
struct App {
    servers_up: usize,
    trouble: Vec<String>,
    totals: Totals,
    rates: [f64; 4],
    /// Holds that were not there at the last look, per second: at least so many grants were made.
    new_holds_rate: f64,
    answered_at: Option<Instant>,
    times: VecDeque<Duration>,
    holds: Vec<Hold>,
    queues: Vec<Queue>,
    /// The longest rest of a lease seen of a hold; its whole lease is not told.
    leases: BTreeMap<(String, String), f64>,
    order: Order,
    filter: String,
    /// While a filter is typed.
    typing: bool,
    scroll: usize,
}

impl App {
    /// Takes in what the servers said.
    fn handle_answers(&mut self, answers: Vec<Answer>, now: Instant) {
        self.trouble.clear();
        self.servers_up = 0;
        let mut totals = Totals::default();
        let (mut holds, mut queues) = (Vec::new(), Vec::new());
        let before = std::mem::take(&mut self.leases);
        let mut new_holds = 0_u32;
        for (server, stats) in answers {
            let stats = match stats {
                Ok(stats) => stats,
                Err(error) => {
                    self.trouble.push(format!("{server}: {error}"));
                    continue;
                }
            };
            self.servers_up += 1;
            self.times.push_back(stats.took);
            totals.held += stats.held;
            totals.waiting += stats.waiting;
            totals.connections += stats.connections;
            totals.keys += stats.keys as u64;
            for lock in stats.locks {
                if lock.waiters > 0 {
                    let (key, waiters) = (lock.key.clone(), lock.waiters);
                    queues.push(Queue { key, waiters, first_waits_s: lock.longest_wait_s });
                }
                for holder in lock.holders {
                    let id = (lock.key.clone(), holder.fence.clone());
                    let fence = holder.fence.parse().unwrap_or(0);
                    totals.highest_fence = totals.highest_fence.max(fence);
                    let seen = before.get(&id).copied();
                    new_holds += u32::from(seen.is_none());
                    let longest = seen.unwrap_or(0.0).max(holder.expires_in_s);
                    let lease_left =
                        if longest > 0.0 { holder.expires_in_s / longest } else { 0.0 };
                    self.leases.insert(id, longest);
                    let (key, kind, waiters) = (lock.key.clone(), lock.kind, lock.waiters);
                    holds.push(Hold { key, kind, holder, waiters, lease_left });
                }
            }
        }
        while self.times.len() > TIMES_KEPT {
            self.times.pop_front();
        }
        if let Some(answered_at) = self.answered_at {
            let seconds = now.duration_since(answered_at).as_secs_f64().max(0.001);
            let rate = |new: u64, old: u64| (new as f64 - old as f64) / seconds;
            self.rates = [
                rate(totals.held, self.totals.held),
                rate(totals.waiting, self.totals.waiting),
                rate(totals.connections, self.totals.connections),
                rate(totals.keys, self.totals.keys),
            ];
            self.new_holds_rate = f64::from(new_holds) / seconds;
        }
        queues.sort_by(|a, b| b.waiters.cmp(&a.waiters).then_with(|| a.key.cmp(&b.key)));
        (self.totals, self.holds, self.queues) = (totals, holds, queues);
        self.answered_at = Some(now);
    }

    /// True if it is time to leave. None means that the terminal is gone; a new size is just drawn.
    fn handle_event(&mut self, event: Option<Event>) -> bool {
        match event {
            Some(Event::Key(key)) => self.handle_key(key),
            Some(_) => false,
            None => true,
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "most keys mean nothing here")]
    fn handle_key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return true;
        }
        if self.typing {
            self.type_filter(key.code);
            return false;
        }
        match key.code {
            KeyCode::Char('q') => return true,
            KeyCode::Esc if self.filter.is_empty() => return true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => {
                self.filter.clear();
                self.typing = true;
            }
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Down | KeyCode::Char('j') => self.scroll = self.scroll.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(10),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = usize::MAX,
            _ => {}
        }
        false
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "most keys mean nothing here")]
    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.filter.clear();
                self.typing = false;
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(c) => self.filter.push(c),
            _ => {}
        }
        self.scroll = 0;
    }

    /// The holds to show, in order.
    fn shown(&self) -> Vec<&Hold> {
        let fits = |hold: &&Hold| {
            hold.key.contains(&self.filter) || hold.holder.client.contains(&self.filter)
        };
        let mut shown: Vec<&Hold> = self.holds.iter().filter(fits).collect();
        shown.sort_by(|a, b| {
            let first = match self.order {
                Order::Oldest => b.holder.held_s.total_cmp(&a.holder.held_s),
                Order::Waiters => b.waiters.cmp(&a.waiters),
                Order::Key => std::cmp::Ordering::Equal,
                Order::EndsSoon => a.holder.expires_in_s.total_cmp(&b.holder.expires_in_s),
            };
            first.then_with(|| a.key.cmp(&b.key)).then_with(|| a.holder.fence.cmp(&b.holder.fence))
        });
        shown
    }

    fn median(&self) -> Option<Duration> {
        let mut times: Vec<Duration> = self.times.iter().copied().collect();
        times.sort();
        times.get(times.len() / 2).copied()
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([
            Constraint::Length(3),
            Constraint::Min(6),
            Constraint::Length(9),
            Constraint::Length(1),
        ]);
        let [head, holds, bottom, foot] = areas.areas(frame.area());
        self.draw_head(frame, head);
        self.draw_holds(frame, holds);
        let halves = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]);
        let [queues, oldest] = halves.areas(bottom);
        self.draw_queues(frame, queues);
        self.draw_oldest(frame, oldest);
        self.draw_foot(frame, foot);
    }

    fn draw_head(&self, frame: &mut Frame<'_>, area: Rect) {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let dim = Style::new().add_modifier(Modifier::DIM);
        let numbers = [
            ("held", self.totals.held),
            ("waiting", self.totals.waiting),
            ("connections", self.totals.connections),
            ("keys", self.totals.keys),
        ];
        let mut spans = Vec::new();
        for ((name, number), rate) in numbers.into_iter().zip(self.rates) {
            spans.push(Span::raw(format!("{name} ")));
            spans.push(Span::styled(number.to_string(), bold));
            spans.push(Span::styled(format!(" ({rate:+.1}/s)   "), dim));
        }
        let servers = self.servers_up + self.trouble.len();
        let median = self.median().map_or(0.0, |it| it.as_secs_f64() * 1000.0);
        let second = Line::from(vec![
            Span::raw("servers up "),
            Span::styled(format!("{}/{servers}", self.servers_up), bold),
            Span::raw("   new holds "),
            Span::styled(format!("{:.1}/s", self.new_holds_rate), bold),
            Span::raw("   highest fence "),
            Span::styled(self.totals.highest_fence.to_string(), bold),
            Span::raw("   ping p50 "),
            Span::styled(format!("{median:.2} ms"), bold),
        ]);
        let trouble = Line::styled(self.trouble.join("; "), Style::new().fg(Color::Red));
        frame.render_widget(Paragraph::new(vec![Line::from(spans), second, trouble]), area);
    }

    fn draw_holds(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let lines = usize::from(area.height.saturating_sub(3)).max(1);
        let count = self.shown().len();
        self.scroll = self.scroll.min(count.saturating_sub(lines));
        let first = self.scroll;
        let rows: Vec<Row<'_>> =
            self.shown().into_iter().skip(first).take(lines).map(hold_row).collect();
        let last = first + rows.len();
        let from = if count == 0 { 0 } else { first + 1 };
        let title = format!(" held locks {from}-{last} of {count}, {} ", self.order.name());
        let widths = [
            Constraint::Fill(1),
            Constraint::Length(9),
            Constraint::Fill(1),
            Constraint::Length(7),
            Constraint::Length(20),
            Constraint::Length(7),
            Constraint::Length(13),
        ];
        let heading = ["KEY", "KIND", "CLIENT", "AGE", "FENCE", "WAITERS", "LEASE LEFT"];
        let heading = Row::new(heading).style(Style::new().add_modifier(Modifier::BOLD));
        let table = Table::new(rows, widths).header(heading).block(Block::bordered().title(title));
        frame.render_widget(table, area);
    }

    fn draw_queues(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = self.queues.iter().map(|queue| {
            let waits = time::short(queue.first_waits_s);
            Row::new([queue.key.clone(), queue.waiters.to_string(), waits])
        });
        let widths = [Constraint::Fill(1), Constraint::Length(8), Constraint::Length(8)];
        let heading =
            Row::new(["KEY", "WAITERS", "FIRST"]).style(Style::new().add_modifier(Modifier::BOLD));
        let block = Block::bordered().title(" longest queues ");
        frame.render_widget(Table::new(rows, widths).header(heading).block(block), area);
    }

    fn draw_oldest(&self, frame: &mut Frame<'_>, area: Rect) {
        let mut oldest: Vec<&Hold> = self.holds.iter().collect();
        oldest.sort_by(|a, b| b.holder.held_s.total_cmp(&a.holder.held_s));
        oldest.truncate(usize::from(area.height));
        let rows = oldest.into_iter().map(|hold| {
            let age = time::short(hold.holder.held_s);
            Row::new([hold.holder.client.clone(), hold.key.clone(), age])
        });
        let widths = [Constraint::Fill(1), Constraint::Fill(1), Constraint::Length(8)];
        let heading =
            Row::new(["CLIENT", "KEY", "AGE"]).style(Style::new().add_modifier(Modifier::BOLD));
        let block = Block::bordered().title(" oldest holders ");
        frame.render_widget(Table::new(rows, widths).header(heading).block(block), area);
    }

    fn draw_foot(&self, frame: &mut Frame<'_>, area: Rect) {
        let text = if self.typing {
            format!("filter: {}_", self.filter)
        } else if self.filter.is_empty() {
            "q quit   / filter   s sort   arrows scroll".to_owned()
        } else {
            format!("q quit   / filter ({})   Esc all   s sort   arrows scroll", self.filter)
        };
        let style = Style::new().add_modifier(Modifier::DIM);
        frame.render_widget(Paragraph::new(Line::styled(text, style)), area);
    }
}

fn hold_row(hold: &Hold) -> Row<'static> {
    let colour = match hold.lease_left {
        left if left < 0.25 => Color::Red,
        left if left < 0.5 => Color::Yellow,
        _ => Color::Green,
    };
    let gauge = format!(
        "{} {}",
        gauge(hold.lease_left, GAUGE_CELLS),
        time::short(hold.holder.expires_in_s)
    );
    let role = if hold.holder.role.is_empty() { hold.kind } else { hold.holder.role };
    Row::new([
        Cell::new(hold.key.clone()),
        Cell::new(role),
        Cell::new(hold.holder.client.clone()),
        Cell::new(time::short(hold.holder.held_s)),
        Cell::new(hold.holder.fence.clone()),
        Cell::new(hold.waiters.to_string()),
        Cell::new(gauge).style(Style::new().fg(colour)),
    ])
}

/// A bar of so many cells.
fn gauge(share: f64, cells: usize) -> String {
    let filled = (0..cells).filter(|cell| (*cell as f64 + 0.5) / (cells as f64) <= share).count();
    let empty = cells - filled;
    format!("{}{}", "█".repeat(filled), "░".repeat(empty))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Lock, ServerStats};

    fn stats(ages: &[(&str, f64, u64)]) -> ServerStats {
        let locks = ages.iter().enumerate().map(|(position, (key, held_s, waiters))| Lock {
            key: (*key).to_owned(),
            kind: "mutex",
            holders: vec![Holder {
                conn: 1,
                client: format!("client-{position}"),
                fence: (position + 1).to_string(),
                held_s: *held_s,
                expires_in_s: 5.0,
                role: "",
            }],
            holders_total: 1,
            waiters: *waiters,
            longest_wait_s: 1.0,
        });
        let locks: Vec<Lock> = locks.collect();
        let (held, waiting) = (locks.len() as u64, locks.iter().map(|it| it.waiters).sum());
        ServerStats {
            connections: 3,
            keys: locks.len(),
            held,
            waiting,
            locks,
            took: Duration::ZERO,
        }
    }

    fn app() -> App {
        let mut app = App::default();
        let stats = stats(&[("b", 10.0, 0), ("a", 20.0, 1), ("c", 30.0, 5)]);
        app.handle_answers(vec![("s".to_owned(), Ok(stats))], Instant::now());
        app
    }

    fn press(app: &mut App, code: KeyCode) -> bool {
        app.handle_key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn keys_shown(app: &App) -> String {
        app.shown().iter().map(|hold| hold.key.as_str()).collect()
    }

    #[test]
    fn orders_and_filters() {
        let mut app = app();
        assert_eq!(keys_shown(&app), "cab");
        press(&mut app, KeyCode::Char('s'));
        assert_eq!(keys_shown(&app), "cab");
        press(&mut app, KeyCode::Char('s'));
        assert_eq!(keys_shown(&app), "abc");
        for c in "/client-0".chars() {
            assert!(!press(&mut app, KeyCode::Char(c)));
        }
        assert_eq!(keys_shown(&app), "b");
        press(&mut app, KeyCode::Enter);
        assert!(!press(&mut app, KeyCode::Esc));
        assert_eq!(keys_shown(&app), "abc");
        assert!(press(&mut app, KeyCode::Char('q')));
    }

    #[test]
    fn rates_are_changes_per_second() {
        let mut app = app();
        let later = app.answered_at.unwrap() + Duration::from_secs(2);
        app.handle_answers(vec![("s".to_owned(), Ok(stats(&[("d", 1.0, 0)])))], later);
        assert_eq!(app.rates, [-1.0, -3.0, 0.0, -1.0]);
        assert!((app.new_holds_rate - 0.5).abs() < 0.001);
    }

    #[test]
    fn scrolling_stops_at_the_end() {
        let mut app = app();
        press(&mut app, KeyCode::End);
        let mut terminal = ratatui::Terminal::new(TestBackend::new(100, 18)).unwrap();
        terminal.draw(|frame| app.draw(frame)).unwrap();
        assert!(app.scroll < 3, "{}", app.scroll);
        // Too small for anything, but no reason to panic.
        let mut terminal = ratatui::Terminal::new(TestBackend::new(3, 2)).unwrap();
        terminal.draw(|frame| app.draw(frame)).unwrap();
    }

    #[test]
    fn gauges() {
        let check = |share: f64, expected: &str| assert_eq!(gauge(share, 4), expected);
        check(0.0, "░░░░");
        check(0.5, "██░░");
        check(1.0, "████");
        check(7.0, "████");
    }
}
