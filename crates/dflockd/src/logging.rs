//! Log lines on stderr, as text in the manner of Go's `slog` or as JSON.
//!
//! Every event is one line whatever its values hold: they come from clients, and a key with a line
//! break must not look like a second event. Lines go through a bounded queue (`queue.rs`) to a
//! thread of their own. When stderr blocks, lines are lost, because a lock server that waits for its
//! log is worse than a gap in it; only lines about what operators did are not.

mod queue;

use std::error::Error;
use std::fmt::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use self::queue::Queue;
use crate::config::LogFormat;

/// How long the end of the process waits for a slow stderr.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The largest integer that every JSON reader keeps exact; fences lie above it.
const JSON_INTEGER_MAX: u128 = (1 << 53) - 1;

/// Keeps the log running. Dropping it writes out what is queued, for about a second at most.
#[must_use = "without the guard the last lines are lost"]
pub struct Guard(Arc<Queue>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.close(LAST_LINES);
    }
}

/// The queue that the events of this process go through.
static QUEUE: OnceLock<Arc<Queue>> = OnceLock::new();

/// Whether there is room for lines about what operators do. If not, stderr is stuck, and operators have to wait:
/// nothing is to happen that nobody can read about.
pub(crate) fn audit_has_room() -> bool {
    QUEUE.get().is_none_or(|queue| queue.has_room())
}

/// How many lines were lost because stderr was too slow.
pub(crate) fn lines_lost() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.lost())
}

/// Sends the events of the whole process to stderr: level INFO and above, DEBUG too if `debug` is
/// set.
///
/// A second call in one process, as in tests, changes nothing.
pub fn init(format: LogFormat, debug: bool) -> Guard {
    let queue = Arc::new(Queue::default());
    let lines = queue::Lines(Arc::clone(&queue));
    // The error says only that somebody was first.
    if tracing::subscriber::set_global_default(subscriber(format, debug, lines)).is_ok() {
        let _ = QUEUE.set(Arc::clone(&queue));
    }
    let writer = Arc::clone(&queue);
    let tell_lost = |count| tracing::warn!(count, "log lines were lost: stderr is too slow");
    let started = std::thread::Builder::new()
        .name("log lines".into())
        .spawn(move || writer.run(std::io::stderr(), tell_lost));
    if let Err(error) = started {
        eprintln!("no log: {error}");
    }
    Guard(queue)
}

fn subscriber<W>(format: LogFormat, debug: bool, writer: W) -> impl Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let level = if debug { LevelFilter::DEBUG } else { LevelFilter::INFO };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .event_format(Lines { format, now: SystemTime::now })
        .with_writer(writer)
        .finish()
}

/// Formats events. Spans are left out: what a line must tell, its own fields tell.
struct Lines {
    format: LogFormat,
    now: fn() -> SystemTime,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let time = timestamp((self.now)());
        let level = event.metadata().level();
        let mut fields =
            Fields { format: self.format, message: String::new(), rest: String::new() };
        event.record(&mut fields);
        let Fields { format: _, message, rest } = fields;
        match self.format {
            LogFormat::Text => {
                let message = quote(&message);
                writeln!(writer, "time={time} level={level} msg={message}{rest}")
            }
            LogFormat::Json => {
                let message = json_string(&message);
                writeln!(writer, r#"{{"time":"{time}","level":"{level}","msg":{message}{rest}}}"#)
            }
        }
    }
}

/// The fields of one event as they come.
struct Fields {
    format: LogFormat,
    message: String,
    /// Each field with its separator before it.
    rest: String,
}

impl Fields {
    /// A field whose value is text.
    fn text(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
            return;
        }
        let value = match self.format {
            LogFormat::Text => quote_if_needed(value),
            LogFormat::Json => json_string(value),
        };
        self.plain(field, &value);
    }

    /// A field whose value needs no quotes in either form.
    fn plain(&mut self, field: &Field, value: &str) {
        let name = field.name().strip_prefix("r#").unwrap_or(field.name());
        match self.format {
            LogFormat::Text => {
                self.rest.push(' ');
                self.rest.push_str(&quote_if_needed(name));
                self.rest.push('=');
            }
            LogFormat::Json => {
                self.rest.push(',');
                self.rest.push_str(&json_string(name));
                self.rest.push(':');
            }
        }
        self.rest.push_str(value);
    }

    fn integer(&mut self, field: &Field, value: impl fmt::Display, magnitude: u128) {
        // As text, or a reader that thinks in floating point would round a fence.
        if magnitude > JSON_INTEGER_MAX {
            self.text(field, &value.to_string());
        } else {
            self.plain(field, &value.to_string());
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.text(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        let mut text = value.to_string();
        let mut cause = value.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        self.text(field, &text);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.plain(field, if value { "true" } else { "false" });
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.integer(field, value, value.unsigned_abs().into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.integer(field, value, value.into());
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.integer(field, value, value.unsigned_abs());
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.integer(field, value, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no word for infinity.
        if value.is_finite() {
            self.plain(field, &value.to_string());
        } else {
            self.text(field, &value.to_string());
        }
    }
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Quotes only what could be mistaken for something else, so that lines stay readable.
fn quote_if_needed(text: &str) -> String {
    let plain = |c: char| !matches!(c, ' ' | '=' | '"' | '\\') && is_printable(c);
    if !text.is_empty() && text.chars().all(plain) { text.to_owned() } else { quote(text) }
}

/// The text in quotes, with the escapes of Go.
fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            c if is_printable(c) => quoted.push(c),
            c => {
                let code = u32::from(c);
                let escaped = match code {
                    ..0x80 => write!(quoted, "\\x{code:02x}"),
                    0x80..0x1_0000 => write!(quoted, "\\u{code:04x}"),
                    0x1_0000.. => write!(quoted, "\\U{code:08x}"),
                };
                escaped.expect("writing to a string cannot fail");
            }
        }
    }
    quoted.push('"');
    quoted
}

/// Whether a terminal shows the character as itself: no controls, no invisible ones, none that
/// change the direction of what follows or combine with what stands before.
fn is_printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        // The standard library escapes what it does not hold for printable.
        c => c.escape_debug().len() == 1 && !c.is_whitespace(),
    }
}

/// The time in UTC with milliseconds, as in RFC 3339.
pub(crate) fn timestamp(time: SystemTime) -> String {
    // A clock before 1970 is not worth an error in a log line.
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since_epoch.as_secs() / 86_400, since_epoch.as_secs() % 86_400);
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let millis = since_epoch.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// The date of a day counted from 1970-01-01.
///
/// Howard Hinnant's algorithm: years that begin in March put the leap day last, so the length of
/// every month before it follows one formula. An era is the 400 years after which the calendar
/// repeats.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use tracing::{debug, error, info, trace, warn};

    use super::*;

    /// A writer that keeps what it gets.
    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines that `events` produces, without their time.
    fn lines(format: LogFormat, debug: bool, events: impl FnOnce()) -> Vec<String> {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let subscriber = subscriber(format, debug, move || writer.clone());
        tracing::subscriber::with_default(subscriber, events);
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'));
        text.lines()
            .map(|line| match format {
                LogFormat::Text => {
                    let (time, rest) = line.split_once(' ').unwrap();
                    assert!(time.starts_with("time=2") && time.ends_with('Z'), "{line}");
                    rest.to_owned()
                }
                LogFormat::Json => {
                    let (time, rest) = line.split_once(',').unwrap();
                    assert!(time.starts_with(r#"{"time":"2"#) && time.ends_with("Z\""), "{line}");
                    serde_json::from_str::<serde_json::Value>(line).unwrap();
                    rest.to_owned()
                }
            })
            .collect()
    }

    /// One event in both forms.
    #[track_caller]
    fn check(event: impl Fn(), text: &str, json: &str) {
        assert_eq!(lines(LogFormat::Text, true, &event), [text]);
        assert_eq!(lines(LogFormat::Json, true, &event), [json]);
    }

    #[test]
    fn whole_line() {
        let at = UNIX_EPOCH + Duration::from_millis(1_794_744_000_000);
        let buffer = Buffer::default();
        let writer = buffer.clone();
        for format in [LogFormat::Text, LogFormat::Json] {
            let now: fn() -> SystemTime = || UNIX_EPOCH + Duration::from_millis(1_794_744_000_000);
            assert_eq!(now(), at);
            let writer = writer.clone();
            let subscriber = tracing_subscriber::fmt()
                .event_format(Lines { format, now })
                .with_writer(move || writer.clone())
                .finish();
            tracing::subscriber::with_default(subscriber, || {
                info!(addr = "127.0.0.1:6388", "listening");
            });
        }
        assert_eq!(
            String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap(),
            "time=2026-11-15T12:00:00.000Z level=INFO msg=\"listening\" addr=127.0.0.1:6388\n\
             {\"time\":\"2026-11-15T12:00:00.000Z\",\"level\":\"INFO\",\"msg\":\"listening\",\
             \"addr\":\"127.0.0.1:6388\"}\n"
        );
    }

    #[test]
    fn kinds_of_values() {
        check(
            || info!(text = "a", yes = true, below = -5, above = 7_u64, part = 0.5, "all kinds"),
            r#"level=INFO msg="all kinds" text=a yes=true below=-5 above=7 part=0.5"#,
            r#""level":"INFO","msg":"all kinds","text":"a","yes":true,"below":-5,"above":7,"part":0.5}"#,
        );
        check(
            || warn!(none = ?None::<u8>, path = %"a b", nan = f64::NAN, "x {}", 1),
            r#"level=WARN msg="x 1" none=None path="a b" nan=NaN"#,
            r#""level":"WARN","msg":"x 1","none":"None","path":"a b","nan":"NaN"}"#,
        );
        check(
            || info!(exact = (1_u64 << 53) - 1, fence = 1_u64 << 53, least = i64::MIN),
            r#"level=INFO msg="" exact=9007199254740991 fence=9007199254740992 least=-9223372036854775808"#,
            r#""level":"INFO","msg":"","exact":9007199254740991,"fence":"9007199254740992","least":"-9223372036854775808"}"#,
        );
        check(
            || info!(r#type = "t", "a.b" = 1, "odd name" = 2, "m"),
            r#"level=INFO msg="m" type=t a.b=1 "odd name"=2"#,
            r#""level":"INFO","msg":"m","type":"t","a.b":1,"odd name":2}"#,
        );
    }

    #[test]
    fn errors_show_their_causes() {
        #[derive(Debug)]
        struct Outer(io::Error);
        impl fmt::Display for Outer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("outer")
            }
        }
        impl Error for Outer {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                Some(&self.0)
            }
        }
        let outer = Outer(io::Error::other("inner"));
        check(
            || error!(error = &outer as &(dyn Error + 'static), "failed"),
            r#"level=ERROR msg="failed" error="outer: inner""#,
            r#""level":"ERROR","msg":"failed","error":"outer: inner"}"#,
        );
    }

    #[test]
    fn nothing_breaks_out_of_its_value() {
        for (value, text) in [
            ("plain/key:1", "plain/key:1"),
            ("", r#""""#),
            ("a b", r#""a b""#),
            ("a=b", r#""a=b""#),
            ("\"", r#""\"""#),
            ("\\n", r#""\\n""#),
            ("x\ntime=0 level=ERROR", r#""x\ntime=0 level=ERROR""#),
            ("\r\t\0\x1b[31m\x7f", r#""\r\t\x00\x1b[31m\x7f""#),
            ("\u{85}\u{2028}\u{202e}\u{feff}", r#""\u0085\u2028\u202e\ufeff""#),
            ("\u{a0}\u{301}\u{e0001}", r#""\u00a0\u0301\U000e0001""#),
            ("Grüße-鍵-🔒", "Grüße-鍵-🔒"),
        ] {
            let expected = [format!("level=INFO msg={} key={text}", quote(value))];
            assert_eq!(lines(LogFormat::Text, false, || info!(key = value, "{value}")), expected);
            assert_eq!(lines(LogFormat::Text, false, || info!(key = %value, "{value}")), expected);

            let json = lines(LogFormat::Json, false, || info!(key = value, "{value}"));
            let [line] = &json[..] else { panic!("{json:?}") };
            let object: serde_json::Value = serde_json::from_str(&format!("{{{line}")).unwrap();
            assert_eq!((&object["key"], &object["msg"]), (&value.into(), &value.into()));
        }
    }

    #[test]
    fn levels() {
        let events = || {
            trace!("t");
            debug!("d");
            info!("i");
            warn!("w");
        };
        let quiet = [r#"level=INFO msg="i""#, r#"level=WARN msg="w""#];
        assert_eq!(lines(LogFormat::Text, false, events), quiet);
        let verbose = [r#"level=DEBUG msg="d""#, quiet[0], quiet[1]];
        assert_eq!(lines(LogFormat::Text, true, events), verbose);
    }

    #[test]
    fn dates() {
        for (days, date) in [
            (0, (1970, 1, 1)),
            (58, (1970, 2, 28)),
            (59, (1970, 3, 1)),
            (789, (1972, 2, 29)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_772, (2026, 11, 15)),
            (47_541, (2100, 3, 1)),
            (2_932_896, (9999, 12, 31)),
        ] {
            assert_eq!(civil_from_days(days), date);
        }
        // Every day follows the one before it.
        let mut last = civil_from_days(0);
        for days in 1..200_000 {
            let (year, month, day) = civil_from_days(days);
            let next_month = (last.0 + last.1 / 12, last.1 % 12 + 1);
            assert!(
                (year, month, day) == (last.0, last.1, last.2 + 1)
                    || ((year, month) == next_month && day == 1 && last.2 >= 28),
                "{last:?}"
            );
            last = (year, month, day);
        }
        assert_eq!(timestamp(UNIX_EPOCH), "1970-01-01T00:00:00.000Z");
        let last_moment = UNIX_EPOCH + Duration::from_millis(86_399_999);
        assert_eq!(timestamp(last_moment), "1970-01-01T23:59:59.999Z");
        assert_eq!(timestamp(UNIX_EPOCH - Duration::from_secs(9)), timestamp(UNIX_EPOCH));
    }

    #[test]
    fn second_init_does_no_harm() {
        let first = init(LogFormat::Json, false);
        let second = init(LogFormat::Text, true);
        drop((second, first));
    }
}
