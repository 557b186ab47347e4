//! The screen.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::Text;
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::model::{Domain, Model, Peer, Switch};
use super::{InputMode, State};
use crate::table::ago;

/// Lines of switches at most.
const SWITCHES_MAX: usize = 3;

/// Lines that all of `model` takes.
pub(super) fn height(model: &Model) -> u16 {
    let lines = 5 + usize::from(switch_lines(model)) + model.domains.len();
    u16::try_from(lines + model.peers.len()).unwrap_or(u16::MAX).min(1000)
}

/// Lines of the switches, with their head if there are any.
fn switch_lines(model: &Model) -> u16 {
    match model.switches.len().min(SWITCHES_MAX) {
        0 => 0,
        count => count as u16 + 1,
    }
}

/// Draws `model` as `state` has it.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, state: &State) {
    let area = frame.area();
    let switches = switch_lines(model);
    // Where there is not room for all, processes get half of it at most.
    let rows = u16::try_from(model.domains.len().max(1) + 1).unwrap_or(u16::MAX);
    let domains = rows.min((area.height.saturating_sub(switches + 2) / 2).max(2));
    let parts = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(switches),
        Constraint::Length(domains),
        Constraint::Fill(1),
        Constraint::Length(1),
        Constraint::Length(1),
    ]);
    let [title, top, middle, rest, why, keys] = parts.areas(area);
    frame.render_widget(Paragraph::new(heading(model, state)).bold(), title);
    table(frame, top, &SWITCHES, &model.switches, 0, |s| stopped(s.idle_ns, Color::Red));
    table(frame, middle, &DOMAINS, &model.domains, state.first_domain(middle.height), |d| {
        let style =
            if d.idle_ns > IDLE_NS { Style::new().fg(Color::Yellow) } else { waits(d.waiting) };
        if state.selected.as_ref() == Some(&d.path) { style.reversed() } else { style }
    });
    let room = usize::from(rest.height.saturating_sub(1));
    let first = state.scrolled.min(model.peers.len().saturating_sub(room));
    table(frame, rest, &PEERS, &model.peers, first, |p| waits(p.row.waiting));
    frame.render_widget(Paragraph::new(reason(model)).fg(Color::Yellow), why);
    frame.render_widget(Paragraph::new(help(state)).add_modifier(Modifier::DIM), keys);
}

/// The lines of a screen as text.
pub(super) fn text(buffer: &Buffer) -> String {
    let Rect { width, height, .. } = buffer.area;
    let line = |y| -> String {
        let cells = (0..width).filter_map(|x| buffer.cell((x, y)));
        cells.map(|cell| cell.symbol()).collect()
    };
    let lines: Vec<String> = (0..height).map(line).collect();
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// A program that has not polled for so long keeps its peers waiting, ns.
const IDLE_NS: u64 = 1_000_000_000;

fn heading(model: &Model, state: &State) -> String {
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut text = format!(
        "barewire top - {}, {}",
        count(model.domains.len(), "domain"),
        count(model.peers.len(), "peer")
    );
    if state.selected.is_some() {
        text.push_str(" of one");
    }
    text.push_str(&format!(", by {}", state.wanted.sort.name()));
    if state.wanted.waiting {
        text.push_str(", waiting only");
    }
    if !state.wanted.filter.is_empty() {
        text.push_str(&format!(", with \"{}\"", state.wanted.filter));
    }
    text.push_str(if state.paused { ", paused" } else { "" });
    text
}

/// A column: its name, width, the least width of a screen that has it, and what a line has there.
struct Column<T> {
    name: &'static str,
    /// 0 for what others leave, [`FILL_MIN`] at least.
    width: u16,
    from: u16,
    is_number: bool,
    cell: fn(&T) -> String,
}

const fn number<T>(name: &'static str, width: u16, cell: fn(&T) -> String) -> Column<T> {
    Column { name, width, from: 0, is_number: true, cell }
}

const fn word<T>(name: &'static str, width: u16, cell: fn(&T) -> String) -> Column<T> {
    Column { name, width, from: 0, is_number: false, cell }
}

const fn if_wide<T>(column: Column<T>, from: u16) -> Column<T> {
    Column { from, ..column }
}

const fn filling<T>(name: &'static str, cell: fn(&T) -> String) -> Column<T> {
    Column { name, width: 0, from: 0, is_number: false, cell }
}

static SWITCHES: [Column<Switch>; 8] = [
    number("PID", 7, |s| s.pid.to_string()),
    filling("SWITCH", |s| s.port.clone()),
    number("OUT/S", 5, |s| si(s.to_nic)),
    number("IN/S", 5, |s| si(s.from_nic)),
    number("LOCAL/S", 7, |s| si(s.between)),
    number("DROPS/S", 7, |s| si(s.dropped)),
    number("B/S", 5, |s| si(s.bytes)),
    word("STATIONS", 16, |s| match s.idle_ns {
        ..=IDLE_NS => s.stations.to_string(),
        idle => format!("not turned {}", since(idle)),
    }),
];

static DOMAINS: [Column<Domain>; 10] = [
    number("PID", 7, |d| d.pid.to_string()),
    filling("PORT", |d| d.port.clone()),
    number("OPS/S", 5, |d| si(d.ops)),
    number("TX/S", 5, |d| si(d.tx)),
    number("RX/S", 5, |d| si(d.rx)),
    number("RESENT", 6, |d| si(d.resent)),
    if_wide(number("RTT P99", 7, |d| time(d.p99_ns)), 100),
    number("PEERS", 5, |d| d.peers.to_string()),
    number("WAITING", 7, |d| d.waiting.to_string()),
    word("FOR", 16, |d| match d.idle_ns {
        ..=IDLE_NS => d.wait.to_owned(),
        idle => format!("not polled {}", since(idle)),
    }),
];

static PEERS: [Column<Peer>; 15] = [
    number("PID", 7, |p| p.pid.to_string()),
    word("PEER", 23, |p| p.row.station.to_string()),
    word("PATH", 4, |p| p.path.to_owned()),
    if_wide(word("STATE", 8, |p| p.row.state.to_owned()), 100),
    number("TX/S", 5, |p| p.tx.map_or("-".to_owned(), si)),
    number("RX/S", 5, |p| p.rx.map_or("-".to_owned(), si)),
    number("RESENT", 6, |p| si(p.resent)),
    if_wide(number("RTT MIN", 7, |p| time(p.row.rtt_min_ns)), 120),
    number("RTT", 6, |p| time(p.row.srtt_ns)),
    if_wide(number("RTO", 6, |p| time(p.row.rto_ns)), 100),
    number("FLIGHT", 7, |p| format!("{}/{}", short(p.row.in_flight), short(p.row.window))),
    if_wide(number("CREDITS", 7, |p| p.row.credits.to_string()), 120),
    if_wide(number("FRAME", 6, |p| p.row.frame_max.to_string()), 120),
    if_wide(number("HEARD", 7, |p| since(p.row.silent_ns)), 100),
    filling("WAITS FOR", |p| match p.row.waiting {
        0 => String::new(),
        count => format!("{count} {}", p.row.wait),
    }),
];

fn table<T>(
    frame: &mut Frame<'_>,
    area: Rect,
    columns: &[Column<T>],
    rows: &[T],
    first: usize,
    style: impl Fn(&T) -> Style,
) {
    let columns = fitting(columns, area.width);
    let cell = |column: &Column<T>, text: String| {
        if !column.is_number {
            return Cell::from(text);
        }
        // Of a longer one the first digits would be cut off.
        let fits = text.len() <= usize::from(column.width);
        let text = if fits { text } else { "*".repeat(column.width.into()) };
        Cell::from(Text::from(text).alignment(Alignment::Right))
    };
    let head = Row::new(columns.iter().map(|(c, _)| cell(c, c.name.to_owned())));
    let line =
        |row: &T| Row::new(columns.iter().map(|(c, _)| cell(c, (c.cell)(row)))).style(style(row));
    let lines = rows.iter().skip(first).take(area.height.into()).map(line);
    let table = Table::new(lines, columns.iter().map(|&(_, width)| Constraint::Length(width)));
    frame.render_widget(table.header(head.style(Modifier::REVERSED)).column_spacing(1), area);
}

/// Least width of a column that gets what others leave, and of words that are cut short: a count
/// before them stays whole.
const FILL_MIN: u16 = 6;

/// The first columns, as many as `width` has room for, and the width of each. Words may be cut
/// short at their end, a number may not.
fn fitting<T>(columns: &[Column<T>], width: u16) -> Vec<(&Column<T>, u16)> {
    let mut fitting = Vec::new();
    let mut left = width;
    for column in columns.iter().filter(|column| column.from <= width) {
        let needed = if column.width == 0 { FILL_MIN } else { column.width };
        if needed > left && (column.is_number || left < FILL_MIN) {
            break;
        }
        fitting.push((column, needed.min(left)));
        // One space between two columns.
        left = left.saturating_sub(needed + 1);
    }
    let used = fitting.iter().map(|(_, width)| width + 1).sum::<u16>().saturating_sub(1);
    if let Some((_, filling)) = fitting.iter_mut().find(|(column, _)| column.width == 0) {
        *filling += width - used;
    }
    fitting
}

/// How something is shown that has not turned for `idle_ns`.
fn stopped(idle_ns: u64, color: Color) -> Style {
    if idle_ns > IDLE_NS { Style::new().fg(color) } else { Style::new() }
}

fn waits(waiting: u64) -> Style {
    if waiting > 0 { Style::new().bold() } else { Style::new() }
}

/// The worst cause that something waits for, and what it means.
fn reason(model: &Model) -> String {
    match model.worst() {
        Some((count, cause)) => format!("{count} wait, {cause}: {}", meaning(cause)),
        None => "nothing waits".to_owned(),
    }
}

fn meaning(cause: &str) -> &'static str {
    match cause {
        "open" => "the peer has not answered yet; try barewire ping PEER",
        "silent" => "nothing comes from the peer; try barewire ping PEER",
        "repeats" => "a packet is lost repeatedly; try barewire ping PEER",
        "port" => "the port is full: the link or the NIC is the limit",
        "window" => "the path or the peer is slower than this side sends",
        "credit" => "the peer lacks memory; it has posted no receives",
        "match" => "the peer has not posted the receive for them",
        "pull" => "data of long messages is in flight from the peer",
        "pull window" => "the limit of pulled data in flight is reached",
        "memory" => "no memory here for messages without a receive",
        "answer" => "acknowledgements are in flight, for one round trip",
        _ => "",
    }
}

fn help(state: &State) -> String {
    match state.typing {
        InputMode::Filter => {
            format!("filter: {}_   Enter keeps it, Esc drops it", state.wanted.filter)
        }
        InputMode::Nothing => "q quit  up/down process  Esc all  s sort  w waiting  / filter  \
                            space pause  PgDn"
            .to_owned(),
    }
}

/// A number in at most five characters: `0`, `999`, `1.23k`, `12.3M`.
fn si(value: f64) -> String {
    let units = ["", "k", "M", "G", "T", "P"];
    let (mut value, mut unit) = (value, 0);
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    match (unit, value) {
        (0, _) => format!("{value:.0}"),
        (_, ..9.995) => format!("{value:.2}{}", units[unit]),
        (_, ..99.95) => format!("{value:.1}{}", units[unit]),
        _ => format!("{value:.0}{}", units[unit]),
    }
}

/// A count in at most three characters, up to 99,999.
fn short(count: u64) -> String {
    if count < 1000 { count.to_string() } else { format!("{}k", count / 1000) }
}

/// Time since something in at most seven characters, up to 273 years.
fn since(ns: u64) -> String {
    const HOUR: u64 = 3600;
    match ns / 1_000_000_000 {
        ..999 => ago(ns),
        seconds @ ..60_000 => format!("{} min", seconds / 60),
        seconds if seconds < 1000 * HOUR => format!("{} h", seconds / HOUR),
        seconds => format!("{} d", seconds / (24 * HOUR)),
    }
}

/// A time of less than 1000 s in at most six characters; `-` if it was not measured. The bounds are
/// those from which it is rounded to the next unit.
fn time(ns: u64) -> String {
    match ns {
        0 => "-".to_owned(),
        1..99_950 => format!("{:.1}us", ns as f64 / 1e3),
        99_950..999_500 => format!("{:.0}us", ns as f64 / 1e3),
        999_500..9_995_000 => format!("{:.2}ms", ns as f64 / 1e6),
        9_995_000..999_500_000 => format!("{:.0}ms", ns as f64 / 1e6),
        _ => format!("{:.1}s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fit_their_columns() {
        for (value, text) in [
            (0.0, "0"),
            (0.4, "0"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (12_345.0, "12.3k"),
            (999_600.0, "1.00M"),
            (123.4e9, "123G"),
        ] {
            assert_eq!(si(value), text);
        }
        for (ns, text) in [
            (0, "-"),
            (600, "0.6us"),
            (805_400, "805us"),
            (1_440_600, "1.44ms"),
            (64_000_000, "64ms"),
        ] {
            assert_eq!(time(ns), text);
        }
        // Where the rounding goes on to the next unit.
        let edges = (0..10).flat_map(|digits| {
            [1, 94, 95, 99, 100, 949, 994, 995, 999].map(|n| n * 10_u64.pow(digits))
        });
        for ns in edges.flat_map(|ns| [ns - 1, ns, ns + 1]) {
            assert!(time(ns).len() <= 6, "{ns}: {}", time(ns));
            for ns in [ns, ns * 1000, ns * 1_000_000] {
                assert!(since(ns).len() <= 7, "{ns}: {}", since(ns));
            }
        }
        assert_eq!((time(9_996_000), time(99_960)), ("10ms".to_owned(), "100us".to_owned()));
        for (ns, text) in [
            (1_500_000_000, "1.5 s"),
            (998_940_000_000, "998.9 s"),
            (1_000_000_000_000, "16 min"),
            (86_400_000_000_000, "24 h"),
            (86_400_000_000_000 * 365, "365 d"),
        ] {
            assert_eq!(since(ns), text);
        }
        let longest = (0..19).map(|digits| si(9.99949 * 10_f64.powi(digits)).len()).max();
        assert!(longest <= Some(6));
    }

    #[test]
    fn every_cause_has_a_meaning_that_fits_a_line() {
        for wait in barewire_dataplane::node::Wait::ALL.iter().skip(1) {
            let line = format!("12345 wait, {}: {}", wait.name(), meaning(wait.name()));
            assert!(line.len() <= 80 && !meaning(wait.name()).is_empty(), "{line}");
        }
    }
}
