//! Plots of benchmark results: a bar per case, a panel per unit.

use serde_json::{Map, Value};
use svg::Document;
use svg::node::element::{Line, Rectangle, Text};

/// Width of a plot, pixels. Labels are left of the bars, values right of them.
const WIDTH: f64 = 840.0;
const LABEL: f64 = 250.0;
const FIGURE: f64 = 150.0;
const ROW: f64 = 22.0;
const BAR: f64 = 14.0;

/// One bar of a plot.
struct Bar {
    case: String,
    value: f64,
    unit: String,
    /// Minimum and 99th percentile of the measurements, if the benchmark reports them.
    spread: Option<(f64, f64)>,
}

/// Draws the lines that a benchmark printed under `--json`, which were checked.
pub(crate) fn svg(lines: &str) -> String {
    let bars: Vec<Bar> = lines.lines().filter_map(bar).collect();
    let mut units: Vec<&str> = Vec::new();
    for bar in &bars {
        if !units.contains(&bar.unit.as_str()) {
            units.push(&bar.unit);
        }
    }
    let mut picture = Document::new().set("font-family", "sans-serif").set("font-size", 12);
    let mut y = ROW;
    for unit in units {
        picture = picture.add(text(unit, LABEL, y, "start").set("font-weight", "bold"));
        y += 8.0;
        let panel: Vec<&Bar> = bars.iter().filter(|bar| bar.unit == unit).collect();
        let max = panel.iter().map(|bar| bar.max()).fold(f64::MIN_POSITIVE, f64::max);
        let scale = (WIDTH - LABEL - FIGURE) / max;
        for bar in panel {
            picture = draw(picture, bar, y, scale);
            y += ROW;
        }
        y += 1.5 * ROW;
    }
    picture.set("viewBox", (0, 0, WIDTH, y)).set("width", WIDTH).set("height", y).to_string() + "\n"
}

impl Bar {
    fn max(&self) -> f64 {
        self.spread.map_or(self.value, |(_, p99)| p99.max(self.value))
    }
}

fn bar(line: &str) -> Option<Bar> {
    let object: Map<String, Value> = serde_json::from_str(line).ok()?;
    let text = |key: &str| Some(object.get(key)?.as_str()?.to_owned());
    let number = |key: &str| object.get(key)?.as_f64();
    let spread = number("min").zip(number("p99"));
    Some(Bar { case: text("case")?, value: number("value")?, unit: text("unit")?, spread })
}

/// Adds a bar whose row begins at `y`.
fn draw(mut picture: Document, bar: &Bar, y: f64, scale: f64) -> Document {
    let middle = y + BAR / 2.0;
    picture = picture.add(text(&bar.case, LABEL - 8.0, middle + 4.0, "end"));
    let width = (bar.value * scale).max(1.0);
    let body = Rectangle::new().set("x", LABEL).set("y", y).set("width", width);
    picture = picture.add(body.set("height", BAR).set("fill", "#4878a8"));
    if let Some((min, p99)) = bar.spread {
        let whisker = Line::new().set("x1", LABEL + min * scale).set("x2", LABEL + p99 * scale);
        let whisker = whisker.set("y1", middle).set("y2", middle).set("stroke", "#202020");
        picture = picture.add(whisker);
    }
    let end = LABEL + bar.max() * scale + 8.0;
    picture.add(text(&format!("{} {}", figure(bar.value), bar.unit), end, middle + 4.0, "start"))
}

fn text(content: &str, x: f64, y: f64, anchor: &str) -> Text {
    Text::new(content).set("x", x).set("y", y).set("text-anchor", anchor)
}

/// A value with three significant digits.
fn figure(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each case is there with its figure, escaped as a name may need, in the panel of its
    /// unit, and no bar leaves the picture.
    #[test]
    fn every_case_has_a_bar() {
        let lines = r#"{"bench":"b","case":"a <1>","value":250.0,"unit":"ns","min":200,"p99":900}
{"bench":"b","case":"twice","value":125.5,"unit":"ns"}
{"bench":"b","case":"rate","value":1.25,"unit":"M/s"}"#;
        let picture = svg(lines).replace('\n', "");
        assert_eq!(picture.matches("<rect").count(), 3);
        assert_eq!(picture.matches("<line").count(), 1, "one has a spread");
        for there in ["a &lt;1&gt;", "250 ns", "126 ns", "1.25 M/s", ">ns<", ">M/s<"] {
            assert!(picture.contains(there), "{there} is missing: {picture}");
        }
        let attribute = |line: &str, name: &str| -> Option<f64> {
            line.split(&format!(" {name}=\"")).nth(1)?.split('"').next()?.parse().ok()
        };
        let ends = picture.split('<').filter(|node| node.starts_with("rect")).map(|node| {
            attribute(node, "x").expect("x") + attribute(node, "width").expect("width")
        });
        assert!(ends.into_iter().all(|end| end <= WIDTH - FIGURE + 1.0));
    }
}
