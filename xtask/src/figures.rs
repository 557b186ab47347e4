//! `cargo xtask figures`: draws the plots in `docs/img` from the tables in the documents, so that a
//! plot and its table have the same values.

use std::path::PathBuf;
use std::process::ExitCode;

use svg::Document;
use svg::node::element::{Circle, Line, Polyline, Rectangle, Text};

use crate::root;

/// Size of a plot, pixels; the plane is inside the margins.
const WIDTH: f64 = 860.0;
const LEFT: f64 = 312.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 76.0;
const ROW: f64 = 20.0;
const LINES_HEIGHT: f64 = 300.0;

/// Colours that are distinguishable with red-green colour blindness (Okabe and Ito).
const COLOURS: [&str; 5] = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a5aa8"];
const OTHERS: &str = "#9a9a9a";
const INK: &str = "#202020";
const GRID: &str = "#d8d8d8";

/// A plot of one table.
struct Figure {
    /// File name in `docs/img`, without `.svg`.
    file: &'static str,
    title: &'static str,
    /// Label of the value axis, with its unit.
    axis: &'static str,
    /// Path of the document, from the root.
    page: &'static str,
    /// Start of the table's first line.
    table: &'static str,
    /// The command that measures the figures.
    measured_by: &'static str,
    kind: Kind,
}

enum Kind {
    /// One bar per row, blue where the row is bold: the value column, and the columns of the
    /// minimum and the maximum.
    Bars { column: usize, spread: Option<(usize, usize)>, spread_is: &'static str },
    /// One bar per row and column. Of a range, the minimum is solid and the rest is pale.
    Groups { columns: &'static [(usize, &'static str)] },
    /// One line per column.
    Lines(Lines),
}

/// Lines over a number at the end of the rows' names, both axes logarithmic.
struct Lines {
    /// Common start of the names of the drawn rows.
    rows: &'static str,
    /// Axis label of the number in the rest of their names.
    across: &'static str,
    columns: &'static [(usize, &'static str)],
}

/// A table: its rows, each with the text of its cells, the name first.
type Table = Vec<Vec<String>>;

const FIGURES: &[Figure] = &[
    Figure {
        file: "half-round-trip",
        title: "Half a round trip of 64 bytes between two network namespaces joined by a veth",
        axis: "half a round trip, ns",
        page: "docs/benchmarks.md",
        table: "| program | median, ns",
        measured_by: "sudo chrt -r 50 target/release/wires",
        kind: Kind::Bars { column: 1, spread: Some((2, 3)), spread_is: "least to 99th percentile" },
    },
    Figure {
        file: "instructions",
        title: "Instructions of one tagged message of 64 bytes, both ends together",
        axis: "instructions per message",
        page: "docs/benchmarks.md",
        table: "| case | instructions a message",
        measured_by: "cargo xtask bench instructions",
        kind: Kind::Bars { column: 1, spread: None, spread_is: "" },
    },
    Figure {
        file: "rates",
        title: "Tagged messages of 64 bytes one way between two processes, window 64",
        axis: "million messages per second",
        page: "docs/benchmarks.md",
        table: "| case | cache line 470 ns",
        measured_by: "sudo chrt -r 50 target/release/rate",
        kind: Kind::Groups {
            columns: &[(1, "processors apart (line 470 ns)"), (2, "processors near (line 120 ns)")],
        },
    },
    Figure {
        file: "allreduce",
        title: "MPI_Allreduce between two ranks of one node",
        axis: "time per call, us",
        page: "docs/collectives.md",
        table: "| | library | MPICH over barewire",
        measured_by: "mpiexec -n 2 ... ./colls bench",
        kind: Kind::Lines(Lines { rows: "allreduce ", across: LENGTH, columns: MPI_COLUMNS }),
    },
    Figure {
        file: "broadcast",
        title: "MPI_Bcast between two ranks of one node",
        axis: "time per call, us",
        page: "docs/collectives.md",
        table: "| | library | MPICH over barewire",
        measured_by: "mpiexec -n 2 ... ./colls bench",
        kind: Kind::Lines(Lines { rows: "broadcast ", across: LENGTH, columns: MPI_COLUMNS }),
    },
    Figure {
        file: "members",
        title: "Collectives in the model: 2.5 us one way, 100 Gbit/s",
        axis: "time per call, us",
        page: "docs/collectives.md",
        table: "| N | barrier",
        measured_by: "target/release/collectives --only sim",
        kind: Kind::Lines(Lines {
            rows: "",
            across: "members (logarithmic)",
            columns: &[
                (1, "barrier"),
                (2, "allreduce 8 B"),
                (3, "allreduce 1 MiB"),
                (4, "allgather 8 B"),
                (5, "alltoall 8 B"),
            ],
        }),
    },
];

const LENGTH: &str = "bytes of a block (logarithmic)";
const MPI_COLUMNS: &[(usize, &str)] = &[
    (5, "barewire's collectives"),
    (2, "MPICH 5 over barewire"),
    (4, "MPICH 5, its own"),
    (6, "Open MPI 5 over barewire"),
    (8, "Open MPI 5, its own"),
];

/// Draws all figures anew.
///
/// # Errors
/// A document has no such table, or a file cannot be written; figures before it are written.
pub(crate) fn run() -> Result<ExitCode, String> {
    let dir = root().join("docs/img");
    std::fs::create_dir_all(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    for figure in FIGURES {
        let file = path(figure);
        std::fs::write(&file, draw(figure)?).map_err(|why| format!("{}: {why}", file.display()))?;
        println!("{}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn path(figure: &Figure) -> PathBuf {
    root().join("docs/img").join(figure.file).with_extension("svg")
}

fn draw(figure: &Figure) -> Result<String, String> {
    let page = root().join(figure.page);
    let page =
        std::fs::read_to_string(&page).map_err(|why| format!("{}: {why}", page.display()))?;
    let table = table(&page, figure.table);
    let table = table.ok_or_else(|| format!("{}: no table {}", figure.page, figure.table))?;
    let picture = match figure.kind {
        Kind::Bars { column, spread, spread_is } => bars(figure, &table, column, spread, spread_is),
        Kind::Groups { columns } => groups(figure, &table, columns),
        Kind::Lines(ref kind) => lines(figure, &table, kind),
    };
    picture.ok_or_else(|| format!("{}: a cell of {} is no figure", figure.page, figure.table))
}

/// The rows of the table whose first line starts with `head`.
fn table(page: &str, head: &str) -> Option<Table> {
    let lines = page.lines().skip_while(|line| !line.starts_with(head));
    let rows: Table = lines
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect())
        .collect();
    (!rows.is_empty()).then_some(rows)
}

/// The values at the start of a cell: one value, or the ends of a range (`6.9 to 9.6`).
fn range(cell: &str) -> Option<(f64, f64)> {
    let number = |text: &str| text.trim().replace(',', "").parse::<f64>().ok();
    let cell = cell.split('(').next()?.replace("**", "");
    match cell.split_once(" to ") {
        Some((least, most)) => Some((number(least)?, number(most)?)),
        None => number(&cell).map(|value| (value, value)),
    }
}

/// Label of a row: the case without its explanation.
fn name(cell: &str) -> String {
    let case = cell.split("`:").next().unwrap_or_default();
    case.replace("**", "").replace('`', "")
}

fn bars(
    figure: &Figure,
    table: &Table,
    column: usize,
    spread: Option<(usize, usize)>,
    spread_is: &str,
) -> Option<String> {
    let value = |row: &[String], column: usize| Some(range(row.get(column)?)?.1);
    let end = |row: &Vec<String>| value(row, spread.map_or(column, |(_, most)| most));
    let most = table.iter().map(end).collect::<Option<Vec<_>>>()?;
    let axis = Axis::linear(most.into_iter().fold(0.0, f64::max));
    let bottom = TOP + ROW * table.len() as f64;
    let mut picture = frame(figure, bottom);
    picture = axis.horizontal(picture, bottom, figure.axis);
    // Bold marks this project's rows only in a table that has other rows.
    let has_others = table.iter().any(|row| row[0].starts_with("**"));
    for (n, row) in table.iter().enumerate() {
        let (y, value_here) = (TOP + ROW * n as f64, value(row, column)?);
        let ours = !has_others || row[0].starts_with("**");
        let fill = if ours { COLOURS[0] } else { OTHERS };
        picture = picture.add(text(name(&row[0]), LEFT - 8.0, y + 14.0, "end")).add(bar(
            LEFT,
            y + 4.0,
            axis.at(value_here) - LEFT,
            fill,
        ));
        let mut end = value_here;
        if let Some((least, most)) = spread {
            end = value(row, most)?;
            let whisker = (axis.at(value(row, least)?), axis.at(end));
            picture = picture.add(line(whisker.0, y + 10.0, whisker.1, y + 10.0, INK));
        }
        picture = picture.add(text(plain(value_here), axis.at(end) + 6.0, y + 14.0, "start"));
    }
    let mut legend = vec![(COLOURS[0], "barewire")];
    if has_others {
        legend.push((OTHERS, "others"));
    }
    if spread.is_some() {
        legend.push((INK, spread_is));
    }
    Some(finish(legends(picture, &legend)))
}

fn groups(figure: &Figure, table: &Table, columns: &[(usize, &str)]) -> Option<String> {
    let value = |row: &Vec<String>, column: usize| range(row.get(column)?);
    let most = |row: &Vec<String>| columns.iter().map(|c| Some(value(row, c.0)?.1)).collect();
    let most: Vec<Vec<f64>> = table.iter().map(most).collect::<Option<_>>()?;
    let axis = Axis::linear(most.into_iter().flatten().fold(0.0, f64::max));
    let group = ROW * (columns.len() as f64 + 0.5);
    let bottom = TOP + group * table.len() as f64;
    let mut picture = frame(figure, bottom);
    picture = axis.horizontal(picture, bottom, figure.axis);
    for (n, row) in table.iter().enumerate() {
        let y = TOP + group * n as f64;
        let middle = y + group / 2.0 - ROW / 4.0;
        picture = picture.add(text(name(&row[0]), LEFT - 8.0, middle + 4.0, "end"));
        for (i, (column, _)) in columns.iter().enumerate() {
            let (y, (least, most)) = (y + ROW * i as f64 + 4.0, value(row, *column)?);
            let colour = COLOURS[i];
            let pale = bar(axis.at(least), y, axis.at(most) - axis.at(least), colour);
            let says = match least < most {
                true => format!("{} to {}", plain(least), plain(most)),
                false => plain(most),
            };
            picture = picture
                .add(bar(LEFT, y, axis.at(least) - LEFT, colour))
                .add(pale.set("fill-opacity", 0.4))
                .add(text(says, axis.at(most) + 6.0, y + 10.0, "start"));
        }
    }
    let mut legend: Vec<_> = columns.iter().zip(COLOURS).map(|(c, colour)| (colour, c.1)).collect();
    legend.push((GRID, "pale: range over runs"));
    Some(finish(legends(picture, &legend)))
}

fn lines(figure: &Figure, table: &Table, kind: &Lines) -> Option<String> {
    let rows: Vec<_> =
        table.iter().filter_map(|row| Some((row[0].strip_prefix(kind.rows)?, row))).collect();
    let across: Vec<f64> = rows.iter().map(|(name, _)| length(name)).collect::<Option<_>>()?;
    // Columns may have different lengths: the cells below the shorter ones are empty.
    let points = |column: usize| -> Option<Vec<(f64, f64)>> {
        let cells = rows.iter().zip(&across).map(|((_, row), at)| (*at, row.get(column)));
        let there = cells.filter(|(_, cell)| cell.is_some_and(|cell| !cell.is_empty()));
        there.map(|(at, cell)| Some((at, range(cell?)?.0))).collect()
    };
    let all: Vec<Vec<(f64, f64)>> =
        kind.columns.iter().map(|c| points(c.0)).collect::<Option<_>>()?;
    let values = || all.iter().flatten().map(|point| point.1);
    let plane = Plane {
        across: (*across.first()?, *across.last()?),
        up: (values().fold(f64::MAX, f64::min) * 0.8, values().fold(0.0, f64::max) * 1.25),
    };
    let bottom = TOP + LINES_HEIGHT;
    let mut picture = plane.grid(frame(figure, bottom));
    for ((name, _), at) in rows.iter().zip(&across) {
        picture = picture.add(text(*name, plane.x(*at), bottom + 18.0, "middle"));
    }
    let (middle, height) = ((PLANE.0 + PLANE.1) / 2.0, TOP + LINES_HEIGHT / 2.0);
    let turned = format!("rotate(-90 24 {height})");
    picture = picture
        .add(text(kind.across, middle, bottom + 38.0, "middle"))
        .add(text(figure.axis, 24.0, height, "middle").set("transform", turned));
    for (points, colour) in all.iter().zip(COLOURS) {
        let points: Vec<_> = points.iter().map(|(x, y)| (plane.x(*x), plane.y(*y))).collect();
        let joined: Vec<String> = points.iter().map(|(x, y)| format!("{x},{y}")).collect();
        let way = Polyline::new().set("points", joined.join(" ")).set("fill", "none");
        picture = picture.add(way.set("stroke", colour).set("stroke-width", 2));
        for (x, y) in points {
            let dot = Circle::new().set("cx", x).set("cy", y).set("r", 3);
            picture = picture.add(dot.set("fill", colour));
        }
    }
    let legend: Vec<_> = kind.columns.iter().zip(COLOURS).map(|(c, fill)| (fill, c.1)).collect();
    Some(finish(legends(picture, &legend)))
}

/// Left and right edge of a plane, pixels.
const PLANE: (f64, f64) = (80.0, WIDTH - 30.0);

/// Two logarithmic axes, each from the least to the largest value.
struct Plane {
    across: (f64, f64),
    up: (f64, f64),
}

impl Plane {
    fn x(&self, value: f64) -> f64 {
        let part = (value / self.across.0).ln() / (self.across.1 / self.across.0).ln();
        round(PLANE.0 + 20.0 + part * (PLANE.1 - PLANE.0 - 50.0))
    }

    fn y(&self, value: f64) -> f64 {
        let part = (value / self.up.0).ln() / (self.up.1 / self.up.0).ln();
        round(TOP + LINES_HEIGHT * (1.0 - part))
    }

    fn grid(&self, mut picture: Document) -> Document {
        for tick in decades().filter(|tick| (self.up.0..=self.up.1).contains(tick)) {
            let y = self.y(tick);
            picture = picture.add(line(PLANE.0, y, PLANE.1, y, GRID)).add(text(
                plain(tick),
                PLANE.0 - 6.0,
                y + 4.0,
                "end",
            ));
        }
        picture
    }
}

/// Bytes of `256 B` or `16 KiB`, or the number alone.
fn length(text: &str) -> Option<f64> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let unit = match unit {
        "" | "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1_048_576.0,
        _ => return None,
    };
    Some(number.replace(',', "").parse::<f64>().ok()? * unit)
}

/// Values along the width, from 0.
struct Axis {
    most: f64,
    step: f64,
}

impl Axis {
    /// Steps of 1, 2 or 5 times a power of ten, at most eight.
    fn linear(most: f64) -> Self {
        let step = decades().find(|step| most / step <= 8.0).unwrap_or(most);
        Self { most, step }
    }

    fn at(&self, value: f64) -> f64 {
        LEFT + value / self.most * (WIDTH - LEFT - RIGHT)
    }

    fn horizontal(&self, mut picture: Document, bottom: f64, title: &str) -> Document {
        let mut tick = 0.0;
        while tick <= self.most {
            let x = self.at(tick);
            picture = picture.add(line(x, TOP, x, bottom, GRID)).add(text(
                plain(tick),
                x,
                bottom + 18.0,
                "middle",
            ));
            tick += self.step;
        }
        picture.add(text(title, (LEFT + WIDTH - RIGHT) / 2.0, bottom + 38.0, "middle"))
    }
}

/// 1, 2 and 5 times the powers of ten, from 0.01.
fn decades() -> impl Iterator<Item = f64> {
    (-2..9).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)))
}

/// A plot's frame: a white background, which dark pages show as well, the title and the source of
/// the values.
fn frame(figure: &Figure, bottom: f64) -> Document {
    let height = bottom + 66.0;
    let paper = Rectangle::new().set("width", WIDTH).set("height", height).set("fill", "#ffffff");
    let source = format!(
        "Table in {}; measured by `{}`; drawn by `cargo xtask figures`.",
        figure.page, figure.measured_by
    );
    Document::new()
        .set("font-family", "sans-serif")
        .set("font-size", 12)
        .set("viewBox", (0, 0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .add(paper.set("rx", 6))
        .add(
            text(figure.title, 16.0, 26.0, "start").set("font-size", 15).set("font-weight", "bold"),
        )
        .add(text(source, 16.0, bottom + 58.0, "start").set("font-size", 10).set("fill", "#606060"))
}

fn legends(mut picture: Document, entries: &[(&str, &str)]) -> Document {
    let mut x = 16.0;
    for (colour, what) in entries {
        let mark = Rectangle::new().set("x", x).set("y", 41).set("width", 12).set("height", 12);
        picture = picture.add(mark.set("fill", *colour)).add(text(*what, x + 17.0, 51.0, "start"));
        x += 36.0 + 6.2 * what.len() as f64;
    }
    picture
}

fn finish(picture: Document) -> String {
    picture.to_string() + "\n"
}

fn bar(x: f64, y: f64, width: f64, fill: &str) -> Rectangle {
    let bar = Rectangle::new().set("x", round(x)).set("y", round(y)).set("width", round(width));
    bar.set("height", ROW - 8.0).set("fill", fill)
}

fn line(x1: f64, y1: f64, x2: f64, y2: f64, stroke: &str) -> Line {
    let line = Line::new().set("x1", round(x1)).set("y1", round(y1)).set("stroke", stroke);
    line.set("x2", round(x2)).set("y2", round(y2))
}

fn text(content: impl Into<String>, x: f64, y: f64, anchor: &str) -> Text {
    let text = Text::new(content.into()).set("x", round(x)).set("y", round(y));
    text.set("text-anchor", anchor).set("fill", INK)
}

/// Rounds to a tenth of a pixel, so that every machine draws the same file.
fn round(pixels: f64) -> f64 {
    (pixels * 10.0).round() / 10.0
}

/// A value with thousands separators.
fn plain(value: f64) -> String {
    if value < 1000.0 {
        return format!("{}", (value * 100.0).round() / 100.0);
    }
    let digits = format!("{value:.0}");
    let mut out = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the plots show what the tables say. A changed table fails here until
    /// `cargo xtask figures` has drawn it.
    #[test]
    fn the_plots_are_those_of_the_tables() {
        for figure in FIGURES {
            let drawn = draw(figure).unwrap();
            let kept = std::fs::read_to_string(path(figure)).unwrap_or_default();
            assert!(drawn == kept, "{}: run `cargo xtask figures`", path(figure).display());
            assert!(drawn.contains(figure.axis) && drawn.contains(figure.title));
        }
    }

    #[test]
    fn a_cell_is_a_figure_or_a_range() {
        assert_eq!(range("**1,980**"), Some((1980.0, 1980.0)));
        assert_eq!(range("6.9 to 9.6"), Some((6.9, 9.6)));
        assert_eq!(range("5.0 (while processors moved)"), Some((5.0, 5.0)));
        assert_eq!(range("one"), None);
        assert_eq!(
            (length("16 KiB"), length("8 B"), length("1,024")),
            (Some(16384.0), Some(8.0), Some(1024.0))
        );
        assert_eq!(
            (plain(12_345.0), plain(0.5), plain(800.0)),
            ("12,345".into(), "0.5".into(), "800".into())
        );
    }
}
