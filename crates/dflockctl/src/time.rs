//! Lengths of time as people write and read them.

use std::time::Duration;

/// Reads `500ms`, `30s`, `1.5m`, `2h`, `1d`, or a plain number of seconds.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let explain = || format!("not a length of time: {text:?}; write 500ms, 30s, 2m or 1h");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(explain()),
    };
    let number: f64 = number.parse().map_err(|_| explain())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| explain())
}

/// Reads a length of time of at least a millisecond.
pub(crate) fn parse_some(text: &str) -> Result<Duration, String> {
    let duration = parse(text)?;
    if duration < Duration::from_millis(1) {
        return Err("it must be at least 1ms".to_owned());
    }
    Ok(duration)
}

/// An age or a rest in a few characters: `340ms`, `4.2s`, `3m12s`, `2h05m`, `3d04h`.
pub(crate) fn short(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX).as_secs();
    match whole {
        0 => format!("{:.0}ms", seconds.max(0.0) * 1000.0),
        1..10 => format!("{seconds:.1}s"),
        10..60 => format!("{whole}s"),
        60..3600 => format!("{}m{:02}s", whole / 60, whole % 60),
        3600..86_400 => format!("{}h{:02}m", whole / 3600, whole / 60 % 60),
        _ => format!("{}d{:02}h", whole / 86_400, whole / 3600 % 24),
    }
}

pub(crate) fn short_duration(duration: Duration) -> String {
    short(duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read() {
        let check = |text: &str, expected: Option<u64>| {
            let got = parse(text).ok().map(|it| u64::try_from(it.as_millis()).unwrap());
            assert_eq!(got, expected, "{text}");
        };
        check("500ms", Some(500));
        check("30s", Some(30_000));
        check("30", Some(30_000));
        check("0.25", Some(250));
        check("1.5m", Some(90_000));
        check("2h", Some(7_200_000));
        check("1d", Some(86_400_000));
        check("0", Some(0));
        for text in ["", "s", "-1s", "1 s", "1w", "1..2s", "1e3", "99999999999999999999999s"] {
            check(text, None);
        }
        assert!(parse_some("0s").is_err());
    }

    #[test]
    fn lengths_are_short() {
        let check = |seconds: f64, expected: &str| assert_eq!(short(seconds), expected);
        check(-1.0, "0ms");
        check(0.34, "340ms");
        check(4.21, "4.2s");
        check(42.9, "42s");
        check(192.0, "3m12s");
        check(7500.0, "2h05m");
        check(273_600.0, "3d04h");
    }
}
