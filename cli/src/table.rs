//! Columns and figures for people.

use std::fmt::Write;

/// How a column stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Lays `rows` out under `head`, two spaces between columns, no spaces at line ends.
///
/// A row may have fewer cells than the head.
pub(crate) fn layout(head: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|(name, _)| name.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let names = head.iter().map(|(name, _)| (*name).to_owned()).collect();
    for row in std::iter::once(&names).chain(rows) {
        let mut line = String::new();
        for ((cell, width), (_, align)) in row.iter().zip(&widths).zip(head) {
            // Writing to a String cannot fail.
            let _ = match align {
                Align::Left => write!(line, "{cell:<width$}  "),
                Align::Right => write!(line, "{cell:>width$}  "),
            };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// `bytes` with the largest binary unit that leaves at least 1, such as `64 KiB` or `1.5 MiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut divisor = 1_u64;
    while unit + 1 < units.len() && bytes / divisor >= 1024 {
        divisor *= 1024;
        unit += 1;
    }
    if bytes.is_multiple_of(divisor) {
        return format!("{} {}", bytes / divisor, units[unit]);
    }
    format!("{:.1} {}", bytes as f64 / divisor as f64, units[unit])
}

/// A round trip in microseconds; `-` for 0, which is none yet.
pub(crate) fn round_trip(ns: u64) -> String {
    if ns == 0 { "-".to_owned() } else { format!("{:.1} us", ns as f64 / 1e3) }
}

/// Time since something.
pub(crate) fn ago(ns: u64) -> String {
    match ns {
        ..1_000_000_000 => format!("{} ms", ns / 1_000_000),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let head = [("name", Align::Left), ("n", Align::Right)];
        let rows = [vec!["a".to_owned(), "100".to_owned()], vec!["longer".to_owned()]];
        assert_eq!(layout(&head, &rows), "name      n\na       100\nlonger\n");
    }

    #[test]
    fn bytes_have_a_fitting_unit() {
        for (n, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (65_536, "64 KiB"),
            (1_572_864, "1.5 MiB"),
            (1 << 40, "1 TiB"),
            (1 << 50, "1024 TiB"),
        ] {
            assert_eq!(bytes(n), text);
        }
    }
}
