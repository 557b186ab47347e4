//! Reads the sources of the workspace and refuses what docs/style.md refuses.
//!
//! Every check is a function from a path and a text to what is wrong, and has a test that feeds it
//! a text it must refuse, so that a check that sees nothing any more is noticed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// One thing that is wrong, as `path:line: what`.
type Wrong = String;

/// A source file: its text, and its text without comments and the insides of literals.
struct Source {
    /// From the root of the workspace, with `/`.
    path: String,
    text: String,
    /// As long as `text` and with the same lines; what is no code is blank.
    code: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned(), code: blank(text) }
    }

    /// Lines of code with their numbers, from 1.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.code.lines().enumerate().map(|(i, line)| (i + 1, line))
    }

    fn wrong(&self, line: usize, what: &str) -> Wrong {
        format!("{}:{line}: {what}", self.path)
    }

    fn in_any(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.path == *place || self.path.starts_with(&dir(place)))
    }
}

fn dir(place: &str) -> String {
    format!("{}/", place.trim_end_matches('/'))
}

// ---------------------------------------------------------------------------------------------
// The checks
// ---------------------------------------------------------------------------------------------

#[test]
fn the_rooms_keep_their_direction() {
    expect_clean(direction);
}

#[test]
fn no_files_name_one_another_in_a_circle() {
    let wrong = in_circles(&sources());
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn a_node_gets_no_more_methods() {
    let what = "what touches one field of the node alone belongs to the field's type";
    for (of, max) in METHODS_MAX {
        let count: usize = sources().iter().map(|source| node_methods(source, of)).sum();
        assert!(count > 0 && count <= max, "{count} methods of {of}, {max} allowed: {what}");
    }
}

#[test]
fn packet_types_and_devices_have_no_catch_all() {
    expect_clean(catch_alls);
}

#[test]
fn an_index_of_an_object_has_a_type() {
    expect_clean(bare_indices);
}

#[test]
fn commands_that_mend_have_options_that_there_are() {
    expect_clean(setup_options);
}

#[test]
fn protocols_know_no_clock_no_io_no_thread_and_no_lock() {
    expect_clean(sans_io);
}

#[test]
fn unsafe_stays_where_its_arguments_are() {
    expect_clean(unsafe_places);
}

#[test]
fn the_dataplane_forbids_unsafe() {
    let lib = fs::read_to_string(root().join("dataplane/src/lib.rs")).unwrap();
    assert!(lib.lines().any(|line| line == "#![forbid(unsafe_code)]"));
}

#[test]
fn no_line_is_wider_than_100() {
    expect_clean(width);
}

#[test]
fn nothing_is_left_to_do() {
    expect_clean(left_over);
}

#[test]
fn a_long_function_is_meant() {
    expect_clean(creeping_functions);
}

#[test]
fn no_test_is_ignored() {
    expect_clean(ignored);
}

#[test]
fn a_skip_is_printed_so_that_it_is_counted() {
    expect_clean(skips);
}

#[test]
fn no_path_of_somebodys_machine_is_written_down() {
    let mut wrong = Vec::new();
    for file in files(&root(), &|_| true) {
        // What is not text has no path that a reader could see.
        let Ok(text) = fs::read_to_string(root().join(&file)) else { continue };
        if file != "tests/tidy.rs" {
            wrong.extend(workplace(&file, &text));
        }
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

/// Which crates of ours a room may name.
const ROOMS: &[(&str, &[&str])] = &[
    ("driver", &[]),
    ("dataplane", &["barewire_driver"]),
    ("api", &["barewire_driver", "barewire_dataplane"]),
    ("provider", &["barewire"]),
    ("xtask", &[]),
];

/// The modules inside dataplane, lowest first: one may name those before it.
const FLOORS: &[&str] = &["wire", "seal", "rel", "proto", "node", "poll"];

fn direction(source: &Source) -> Vec<Wrong> {
    let ours = ["barewire", "barewire_driver", "barewire_dataplane", "barewire_cli"];
    let mut wrong = Vec::new();
    let room = ROOMS.iter().find(|(room, _)| source.path.starts_with(&format!("{room}/src/")));
    for (number, line) in source.lines() {
        if let Some((room, allowed)) = room {
            for krate in ours.iter().filter(|krate| !allowed.contains(krate)) {
                if names_path(line, krate) {
                    wrong.push(source.wrong(number, &format!("{room} must not name {krate}")));
                }
            }
        }
        if let Some(floor) = floor(&source.path) {
            for upper in &FLOORS[floor + 1..] {
                if names_path(line, &format!("crate::{upper}")) || names_path(line, upper) {
                    let what = format!("{} must not name {upper}", FLOORS[floor]);
                    wrong.push(source.wrong(number, &what));
                }
            }
        }
    }
    wrong
}

/// Which floor of dataplane a file lies on.
fn floor(path: &str) -> Option<usize> {
    let inside = path.strip_prefix("dataplane/src/")?;
    let name = inside.split('/').next()?.trim_end_matches(".rs");
    FLOORS.iter().position(|floor| *floor == name)
}

/// Whether `line` holds `path` as whole words, followed by `::` or `;` or as the last word of a
/// `use`.
fn names_path(line: &str, path: &str) -> bool {
    words(line, path).any(|at| {
        let before = line[..at].trim_end();
        let after = line[at + path.len()..].trim_start();
        let starts_path = !before.ends_with("::") || path.contains("::");
        let used = line.trim_start().starts_with("use ") || line.contains(" use ");
        starts_path && (after.starts_with("::") || (used && after.starts_with([';', ' ', ','])))
            // `use crate::{node, wire};` names the module after a brace.
            || (before.contains("use crate::{") && !before.ends_with("::"))
    })
}

/// Rooms in which no files name one another in a circle.
const WITHOUT_CIRCLES: [&str; 4] = ["driver", "dataplane", "api", "cli"];

fn in_circles(sources: &[Source]) -> Vec<Wrong> {
    let of = |room: &str| {
        let circles = circles(sources, room).into_iter();
        let wrong = circles.map(|files| format!("{room}/src: in a circle: {}", files.join(", ")));
        wrong.collect::<Vec<_>>()
    };
    WITHOUT_CIRCLES.into_iter().flat_map(of).collect()
}

/// The name of a module, from the root of its crate.
type Module = Vec<String>;

/// Files of `room` of which each names something of another, and that in the end something of the
/// first, by `use` or by a path. A name that a file re-exports leads to that file and to the one
/// that defines it. A file may name what those have that it lies in: it is a part of them. Methods
/// are not seen.
fn circles(sources: &[Source], room: &str) -> Vec<Vec<String>> {
    let code: BTreeMap<Module, Paths> =
        sources.iter().filter_map(|source| Some((module(source, room)?, paths(source)))).collect();
    let edges: BTreeMap<&Module, BTreeSet<Module>> =
        code.keys().map(|file| (file, names(&code, file))).collect();
    let reached = |from: &Module| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(at) = next.pop() {
            next.extend(edges[&at].iter().filter(|to| seen.insert((*to).clone())).cloned());
        }
        seen
    };
    let all: BTreeMap<&Module, BTreeSet<Module>> =
        edges.keys().map(|file| (*file, reached(file))).collect();
    let (mut circles, mut done) = (Vec::new(), BTreeSet::new());
    for (file, to) in all.iter().filter(|(file, to)| to.contains(**file)) {
        if !done.contains(*file) {
            let same = to.iter().filter(|other| all[other].contains(*file));
            let circle: Vec<Module> = same.cloned().collect();
            circles.push(circle.iter().map(|module| module.join("/")).collect());
            done.extend(circle);
        }
    }
    circles
}

/// The module that a file of `room` is, unless it is a test.
fn module(source: &Source, room: &str) -> Option<Module> {
    let inside = source.path.strip_prefix(&format!("{room}/src/"))?.strip_suffix(".rs")?;
    let mut names: Module = inside.split('/').map(str::to_owned).collect();
    if names.iter().any(|name| name == "tests") {
        return None;
    }
    if matches!(names.last().unwrap().as_str(), "mod" | "lib") {
        names.pop();
    }
    Some(names)
}

/// Paths that a file names, and those that it re-exports.
#[derive(Default)]
struct Paths {
    named: Vec<Module>,
    exported: Vec<Module>,
}

fn paths(source: &Source) -> Paths {
    let mut code = source.code.as_str();
    if let Some(tests) = code.find("#[cfg(test)]\nmod ").filter(|at| {
        let end = code[*at + 17..].find([';', '{']).unwrap();
        code[*at + 17 + end..].starts_with('{')
    }) {
        code = &code[..tests];
    }
    let tokens = tokens(code);
    let (mut found, mut at) = (Paths::default(), 0);
    while at < tokens.len() {
        if tokens[at] == "use" {
            let is_export = at > 0 && matches!(tokens[at - 1], "pub" | ")");
            let list = if is_export { &mut found.exported } else { &mut found.named };
            at += 1;
            use_tree(&tokens, &mut at, Vec::new(), list);
        } else if tokens.get(at + 1) == Some(&"::") && (at == 0 || tokens[at - 1] != "::") {
            let mut path = vec![tokens[at].to_owned()];
            while tokens.get(at + 1) == Some(&"::") && tokens.get(at + 2).is_some() {
                at += 2;
                path.push(tokens[at].to_owned());
            }
            found.named.push(path);
        } else {
            at += 1;
        }
    }
    found
}

/// Words, `::`, and every other character by itself.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let part = |c: char| c.is_alphanumeric() || c == '_';
        let len = match first {
            ':' if rest.starts_with("::") => 2,
            c if part(c) => rest.find(|c| !part(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        tokens.push(&rest[..len]);
        rest = rest[len..].trim_start();
    }
    tokens
}

/// The paths of one tree of a `use`, from `at` on.
fn use_tree(tokens: &[&str], at: &mut usize, mut path: Module, list: &mut Vec<Module>) {
    while let Some(token) = tokens.get(*at) {
        *at += 1;
        if *token == "{" {
            while tokens.get(*at).is_some_and(|token| *token != "}") {
                use_tree(tokens, at, path.clone(), list);
                *at += usize::from(tokens.get(*at) == Some(&","));
            }
            *at += 1;
            return;
        }
        path.push((*token).to_owned());
        if tokens.get(*at) != Some(&"::") {
            break;
        }
        *at += 1;
    }
    if tokens.get(*at) == Some(&"as") {
        *at += 2;
    }
    list.push(path);
}

/// The files that `file` names something of, or re-exports something of.
fn names(code: &BTreeMap<Module, Paths>, file: &Module) -> BTreeSet<Module> {
    let paths = code[file].named.iter().chain(&code[file].exported);
    let paths = paths.filter_map(|path| absolute(code, file, path));
    let files = paths.flat_map(|path| route(code, &path, 8));
    files.filter(|to| !file.starts_with(to)).collect()
}

/// A path as it is from the root of the crate, if it is one of ours.
fn absolute(code: &BTreeMap<Module, Paths>, file: &Module, path: &[String]) -> Option<Module> {
    let child =
        |name: &String| code.contains_key(&[&file[..], std::slice::from_ref(name)].concat());
    let (ups, from) = match path[0].as_str() {
        "crate" => (file.len(), 1),
        "self" => (0, 1),
        "super" => {
            let ups = path.iter().take_while(|name| *name == "super").count();
            (ups.min(file.len()), ups)
        }
        _ if child(&path[0]) => (0, 0),
        _ => return None,
    };
    let rest = path[from..].iter().filter(|name| *name != "self");
    Some(file[..file.len() - ups].iter().chain(rest).cloned().collect())
}

/// The files that the name at a path leads through: those that re-export it, and the one that
/// defines it.
fn route(code: &BTreeMap<Module, Paths>, path: &Module, depth: u32) -> Vec<Module> {
    let len = (0..=path.len()).rev().find(|len| code.contains_key(&path[..*len])).unwrap_or(0);
    let mut files = vec![path[..len].to_vec()];
    let Some(name) = path.get(len).filter(|_| depth > 0) else { return files };
    let exported = code.get(&files[0]).map_or(&[][..], |paths| &paths.exported);
    let found = exported.iter().find(|path| path.last() == Some(name));
    if let Some(export) = found.and_then(|export| absolute(code, &files[0], export)) {
        files.extend(route(code, &[export, path[len + 1..].to_vec()].concat(), depth - 1));
    }
    files
}

/// Methods of a node and of its views, all files together: to be lowered, not raised.
const METHODS_MAX: [(&str, usize); 13] = [
    ("Node", 118),
    ("Objects<'_>", 120),
    ("Control<'_>", 120),
    ("Operations<'_>", 120),
    ("Responder<'_>", 120),
    ("Sending<'_>", 120),
    ("Transmitter<'_>", 120),
    ("Sessions<'_>", 120),
    ("Receiving<'_>", 120),
    ("Posting<'_>", 120),
    ("Collectives<'_>", 120),
    ("Statistics<'_>", 120),
    ("MulticastGroups<'_>", 120),
];

/// Methods of this type in a file of the node that is no test.
fn node_methods(source: &Source, of: &str) -> usize {
    if !source.path.starts_with("dataplane/src/node/") || source.path.contains("/tests") {
        return 0;
    }
    let (mut inside, head) = (false, format!("impl {of} {{"));
    let is_method = |(_, line): &(usize, &str)| {
        inside = line.starts_with(&head) || inside && *line != "}";
        let item = line.strip_prefix("    ").filter(|item| inside && !item.starts_with(' '));
        item.is_some_and(|item| words(item, "fn").next().is_some())
    };
    source.lines().filter(is_method).count()
}

/// Types of which a `match` names all variants, and where: a packet type or a device that is added
/// is then missing wherever it has to be thought of, and does not compile.
const CLOSED: &[(&str, &str)] = &[
    ("dataplane/src", "Ty"),
    ("dataplane/src", "RmaTy"),
    ("dataplane/src", "RequestTy"),
    ("dataplane/src", "ResponseTy"),
    ("dataplane/src", "SegmentTy"),
    ("dataplane/src/wire", "Op"),
    ("driver/src/backend/vfio", "Kind"),
    ("driver/src/backend", "AnyPort"),
];

fn catch_alls(source: &Source) -> Vec<Wrong> {
    let here = |closed: &&(&str, &str)| source.in_any(&[closed.0]);
    let closed: Vec<&str> = CLOSED.iter().filter(here).map(|closed| closed.1).collect();
    if closed.is_empty() || source.path.contains("/tests") {
        return Vec::new();
    }
    let own = impls_of(&source.code, &closed);
    let mut wrong = Vec::new();
    for at in words(&source.code, "match") {
        let Some(open) = source.code[at..].find('{').map(|open| at + open) else { continue };
        let is_own = own.iter().any(|range| range.contains(&at));
        let names = |pattern: &str| {
            let of = |name: &&&str| {
                words(pattern, name)
                    .any(|i| pattern[i + name.len()..].trim_start().starts_with("::"))
            };
            closed.iter().any(|name| of(&name)) || is_own && of(&&"Self")
        };
        let arms = arms(&source.code, open);
        for (arm, pattern) in &arms {
            if arms.iter().any(|(_, pattern)| names(pattern)) && is_any(pattern) {
                let line = source.code[..*arm].matches('\n').count() + 1;
                let what = format!("\"{pattern} =>\" over packet types or devices: name them");
                wrong.push(source.wrong(line, &what));
            }
        }
    }
    wrong
}

/// What indices of a node's objects are called: each has a type in `dataplane/src/idx.rs`.
const INDICES: [&str; 31] = [
    "p",
    "peer",
    "e",
    "ep",
    "s",
    "srx",
    "sep",
    "cq",
    "rx_cq",
    "tx_cq",
    "cntr",
    "rx_cntr",
    "tx_cntr",
    "av",
    "mr",
    "w",
    "wr",
    "pull",
    "response",
    "recv",
    "m",
    "msg",
    "reassembly",
    "r",
    "rma",
    "g",
    "group",
    "o",
    "buf",
    "ring",
    "idx",
];

/// Where an index is a number still: in a table of any type, and on the wire.
const NUMBERED: [&str; 5] = [
    "dataplane/src/idx.rs",
    "dataplane/src/index.rs",
    "dataplane/src/slab.rs",
    "dataplane/src/table.rs",
    "dataplane/src/wire",
];

/// Indices without a type: parameters, by themselves or in a tuple, and fields.
fn bare_indices(source: &Source) -> Vec<Wrong> {
    if !source.in_any(&["dataplane/src"]) || source.in_any(&NUMBERED) {
        return Vec::new();
    }
    let mut wrong = Vec::new();
    for (at, _) in source.code.match_indices(": ") {
        for (name, ty) in names_with_types(&source.code[..at], &source.code[at + 2..]) {
            if INDICES.contains(&name) && is_number(ty) {
                let line = source.code[..at].matches('\n').count() + 1;
                let what = format!("\"{name}: u32\": indices of objects have types, see idx.rs");
                wrong.push(source.wrong(line, &what));
            }
        }
    }
    wrong
}

/// The names that end before a colon, and the types that begin behind it: several of a tuple.
fn names_with_types<'a>(before: &'a str, behind: &'a str) -> Vec<(&'a str, &'a str)> {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let name_of = |text: &'a str| &text[text.trim_end_matches(part).len()..];
    if !before.ends_with(')') || !behind.starts_with('(') {
        return vec![(name_of(before), behind)];
    }
    let nests = |c: char| i32::from("([<".contains(c)) - i32::from(")]>".contains(c));
    let end_of = |depth: &mut i32, c| {
        *depth += nests(c);
        *depth == 0
    };
    let (mut up, mut down) = (0, 0);
    let open = before.rfind(|c| end_of(&mut up, c)).map_or(0, |open| open + 1);
    let close = behind.find(|c| end_of(&mut down, c)).unwrap_or(behind.len());
    let members = |text: &'a str| {
        let mut depth = 0;
        text.split(move |c| end_of(&mut depth, c) && c == ',')
    };
    let types = members(&behind[1..close]).map(str::trim_start);
    members(&before[open..before.len() - 1]).map(name_of).zip(types).collect()
}

/// Whether a type is a number, by itself, by reference or optional.
fn is_number(ty: &str) -> bool {
    let inner = ["&", "mut ", "Option<"];
    let ty = inner.iter().fold(ty, |ty, prefix| ty.strip_prefix(prefix).unwrap_or(ty));
    let rest = ty.strip_prefix("u32");
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || "_:".contains(c)))
}

/// Whether a pattern takes whatever comes: `_`, a name, or one of these in `Some` or `Ok`.
fn is_any(pattern: &str) -> bool {
    let inside = pattern.strip_prefix("Some(").or_else(|| pattern.strip_prefix("Ok("));
    let inside = inside.and_then(|inside| inside.strip_suffix(')')).unwrap_or(pattern);
    inside.starts_with(|c: char| c.is_lowercase() || c == '_')
        && inside.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// Where the bodies of `impl`s of these types lie.
fn impls_of(code: &str, types: &[&str]) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    for at in words(code, "impl") {
        let Some(open) = code[at..].find('{') else { continue };
        let head = &code[at..at + open];
        if types.iter().any(|name| words(head, name).next().is_some()) {
            let end = body_end(&code[at..]).unwrap_or(open);
            found.push(at..at + end);
        }
    }
    found
}

/// Place and pattern, without its condition, of each arm of the `match` whose body opens at `open`.
fn arms(code: &str, open: usize) -> Vec<(usize, String)> {
    let mut arms = Vec::new();
    let (mut depth, mut start, mut is_pattern) = (0_usize, open + 1, true);
    let mut at = open + 1;
    while let Some(c) = code[at..].chars().next() {
        match c {
            '(' | '[' | '{' => depth += 1,
            '}' if depth == 0 => break,
            ')' | ']' | '}' => {
                depth -= 1;
                // A block as an arm's value needs no comma.
                if depth == 0 && c == '}' && !is_pattern && !is_value(&code[at + 1..]) {
                    (start, is_pattern) = (at + 1, true);
                }
            }
            ',' if depth == 0 && !is_pattern => (start, is_pattern) = (at + 1, true),
            '=' if depth == 0 && is_pattern && code[at..].starts_with("=>") => {
                let text = code[start..at].trim();
                let space = code[start..at].len() - code[start..at].trim_start().len();
                let pattern = text.split(" if ").next().unwrap().trim();
                // With a condition it does not take everything.
                if !text.contains(" if ") || !is_any(pattern) {
                    arms.push((start + space, pattern.to_owned()));
                }
                is_pattern = false;
            }
            _ => {}
        }
        at += c.len_utf8();
    }
    arms
}

/// Whether a value goes on behind a block: a method, an operator, or the comma that ends it.
fn is_value(rest: &str) -> bool {
    rest.trim_start().starts_with(['.', ',', '?', '+', '-', ')'])
}

fn sans_io(source: &Source) -> Vec<Wrong> {
    // poll.rs is the one file that holds a port and reads the clock.
    if !source.path.starts_with("dataplane/src/") || source.path == "dataplane/src/poll.rs" {
        return Vec::new();
    }
    let refused = [
        "std::time::Instant",
        "std::time::SystemTime",
        "std::thread",
        "std::sync::Mutex",
        "std::sync::RwLock",
        "std::sync::Condvar",
        "std::io",
        "std::net",
        "std::fs",
        "std::env",
        "std::process",
        "clock::now_ns",
        "barewire_driver::clock",
        "println!",
        "eprintln!",
    ];
    let mut wrong = Vec::new();
    for (number, line) in until_tests(source) {
        for name in refused {
            if words(line, name).next().is_some() {
                wrong.push(source.wrong(number, &format!("{name} in a sans-IO room")));
            }
        }
    }
    wrong
}

/// The lines before the tests of a file, which stand last.
fn until_tests(source: &Source) -> impl Iterator<Item = (usize, &str)> {
    source.lines().take_while(|(_, line)| line.trim() != "#[cfg(test)]")
}

/// Options of `hugepage-setup.sh` that a message or comment names and the script does not know.
fn setup_options(source: &Source) -> Vec<Wrong> {
    let script = fs::read_to_string(root().join(SETUP)).unwrap();
    let option = |word: &str| {
        let end = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
        let word = word.trim_start_matches(['[', '`', '"']).split(end).next().unwrap();
        word.starts_with("--").then(|| word.to_owned())
    };
    let known: Vec<String> = script.split_whitespace().filter_map(option).collect();
    let named = |(i, line): (usize, &str)| {
        let called = [SETUP, SETUP_CALLED].into_iter().find_map(|name| line.split_once(name));
        let after = called.map_or("", |(_, after)| after);
        // What follows on the line is the command, up to the next one.
        let words = after.split([',', ';', '|']).next().unwrap().split_whitespace();
        let strange = words.filter_map(option).find(|option| !known.contains(option));
        strange.map(|option| source.wrong(i + 1, &format!("{SETUP} has no option {option}")))
    };
    source.text.lines().enumerate().filter_map(named).collect()
}

/// The script that prepares a machine.
const SETUP: &str = "hugepage-setup.sh";

/// How a message names it that asks for the name that it has here.
const SETUP_CALLED: &str = "sudo {setup}";

/// Where `unsafe` may stand. Each place argues for its blocks at the block.
const UNSAFE: &[&str] = &[
    "driver/src/mem",
    "driver/src/backend",
    "driver/src/frame.rs",
    "driver/src/clock.rs",
    "driver/dpdk-sys/src",
    "api/src/buf.rs",
    "api/src/deferred.rs",
    "api/src/lock.rs",
    "api/src/raw.rs",
    "api/src/rcvthread.rs",
    "api/src/work.rs",
    "api/src/stats/file.rs",
    "provider",
    // Evidence: allocators that count, and memory handed to the raw API.
    "tests",
    "benches",
    "driver/tests",
    "driver/examples",
    "api/tests",
    "fuzz/src/memory.rs",
];

fn unsafe_places(source: &Source) -> Vec<Wrong> {
    if source.in_any(UNSAFE) {
        return Vec::new();
    }
    let found = source.lines().filter(|(_, line)| words(line, "unsafe").next().is_some());
    found.map(|(number, _)| source.wrong(number, "unsafe outside the places for it")).collect()
}

fn width(source: &Source) -> Vec<Wrong> {
    let lines = source.text.lines().enumerate();
    let wide = lines.filter(|(_, line)| line.chars().count() > 100);
    wide.map(|(i, _)| source.wrong(i + 1, "wider than 100 characters")).collect()
}

fn left_over(source: &Source) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    for (number, line) in source.lines() {
        for name in ["todo!", "unimplemented!", "dbg!"] {
            if words(line, name).next().is_some() {
                wrong.push(source.wrong(number, name));
            }
        }
    }
    // Spelled in two halves, because this file is read as well.
    for word in [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")] {
        for (i, line) in source.text.lines().enumerate() {
            if words(line, word).next().is_some() {
                wrong.push(source.wrong(i + 1, word));
            }
        }
    }
    wrong
}

fn ignored(source: &Source) -> Vec<Wrong> {
    let found = source.lines().filter(|(_, line)| line.contains("#[ignore"));
    found.map(|(number, _)| source.wrong(number, "an ignored test")).collect()
}

/// A skip is found by xtask at the start of a line that a test prints, so the word must open the
/// literal of a print.
fn skips(source: &Source) -> Vec<Wrong> {
    // xtask reads the word and the style guide explains it.
    if source.in_any(&["xtask", "tests/tidy.rs"]) {
        return Vec::new();
    }
    let mut wrong = Vec::new();
    let mut before = String::new();
    for ((number, code), text) in source.lines().zip(source.text.lines()) {
        let comment = text.trim_start().starts_with("//");
        if text.contains("SKIPPED") && !comment {
            let printed = code.contains("println!(") || before.contains("println!(");
            if !(printed && text.contains("\"SKIPPED: ")) {
                wrong.push(source.wrong(number, "print a skip as println!(\"SKIPPED: why\")"));
            }
        }
        before = code.to_owned();
    }
    wrong
}

/// A function that nobody meant to be long is stopped at 71 lines; one that is longer than 80 was
/// meant.
fn creeping_functions(source: &Source) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    for (name, first, last) in functions(source) {
        let lines = last - first + 1;
        if (71..=80).contains(&lines) {
            let what = format!("fn {name} has {lines} lines: at most 70, or mean it");
            wrong.push(source.wrong(first, &what));
        }
    }
    wrong
}

/// Name, first and last line of every function with a body.
fn functions(source: &Source) -> Vec<(String, usize, usize)> {
    let code = &source.code;
    let line_of = |at: usize| code[..at].matches('\n').count() + 1;
    let mut found = Vec::new();
    for at in words(code, "fn") {
        let rest = &code[at + 2..];
        let name: String =
            rest.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if name.is_empty() {
            continue; // a function pointer type
        }
        if let Some(end) = body_end(rest) {
            found.push((name, line_of(at), line_of(at + 2 + end)));
        }
    }
    found
}

/// Where the body that follows a signature ends, or `None` if a `;` comes first.
fn body_end(rest: &str) -> Option<usize> {
    let mut braces = 0_usize;
    let mut brackets = 0_usize;
    for (i, c) in rest.char_indices() {
        match c {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets = brackets.saturating_sub(1),
            ';' if braces == 0 && brackets == 0 => return None,
            '{' => braces += 1,
            '}' => {
                braces = braces.saturating_sub(1);
                // A const argument in braces would end the signature early; we write none.
                if braces == 0 {
                    return Some(i);
                }
            }
            _ => {}
        }
    }
    None
}

/// Absolute and relative paths that exist on the author's machine only.
fn workplace(path: &str, text: &str) -> Vec<Wrong> {
    let refused = [
        concat!("../sha", "red"),
        concat!("/wo", "rk/"),
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
    ];
    let mut wrong = Vec::new();
    for (i, line) in text.lines().enumerate() {
        for name in refused {
            if line.contains(name) {
                wrong.push(format!("{path}:{}: {name}", i + 1));
            }
        }
    }
    wrong
}

// ---------------------------------------------------------------------------------------------
// The tests of the checks
// ---------------------------------------------------------------------------------------------

/// Asserts that `check` finds something in `bad` and nothing in `good`, both at `path`.
fn expect(check: fn(&Source) -> Vec<Wrong>, path: &str, bad: &str, good: &str) {
    assert!(!check(&Source::new(path, bad)).is_empty(), "passed in {path}:\n{bad}");
    assert_eq!(check(&Source::new(path, good)), Vec::<Wrong>::new(), "refused in {path}:\n{good}");
}

#[test]
fn direction_sees_a_use_upwards() {
    let cases = [
        ("driver/src/port.rs", "use barewire_dataplane::node::Node;", "use crate::frame::RxFrame;"),
        ("dataplane/src/node/cq.rs", "use barewire::Cq;", "use barewire_driver::mem::IoBuf;"),
        ("dataplane/src/wire/hdr.rs", "use crate::rel::Psn;", "use crate::types::EpId;"),
        ("dataplane/src/wire.rs", "use crate::{node, types};", "use crate::{error, types};"),
        ("dataplane/src/rel/mod.rs", "let x = crate::node::X;", "let x = crate::wire::X;"),
        ("dataplane/src/proto/msg.rs", "use crate::node;", "use crate::rel; // use crate::node"),
        ("dataplane/src/node/ep.rs", "use crate::poll::Engine;", "use crate::proto::Msg;"),
        ("api/src/ep.rs", "use barewire_cli::x;", "use barewire_dataplane::node;"),
        ("provider/src/lib.rs", "use barewire_driver::port;", "use barewire::Domain;"),
        ("xtask/src/main.rs", "use barewire::Domain;", "let barewire = \"barewire::Domain\";"),
    ];
    for (path, bad, good) in cases {
        expect(direction, path, bad, good);
    }
}

#[test]
fn circles_sees_one_by_a_use_a_path_and_a_re_export() {
    let file = |path: &str, text: &str| Source::new(path, text);
    let up = file("driver/src/a/mod.rs", "pub use x::X;\nmod x;\nmod y;\nfn f() { y::g() }");
    let x = file("driver/src/a/x.rs", "use super::Y;\npub struct X;");
    let good = [up, x, file("driver/src/a/y.rs", "use crate::a::X as Z;\npub fn g() {}")];
    assert_eq!(circles(&good, "driver"), Vec::<Vec<String>>::new());
    for back in ["use super::y::g;", "fn f() { crate::a::y::g() }", "use crate::{a::{self, y::g}};"]
    {
        let bad = [&good[0], &good[2]].map(|f| file(&f.path, &f.text));
        let bad: Vec<Source> = bad.into_iter().chain([file("driver/src/a/x.rs", back)]).collect();
        assert_eq!(circles(&bad, "driver"), [["a/x", "a/y"]], "{back}");
        assert_eq!(in_circles(&bad).len(), 1, "{back}");
    }
    // `b` names what `a` re-exports, and `a` names `b`.
    for text in ["use crate::a::X;", "pub use crate::a::X;", "fn f() { crate::a::X::new() }"] {
        let up = file("driver/src/a/mod.rs", "pub use x::X;\nmod x;\nuse crate::b::g;");
        let x = file("driver/src/a/x.rs", "pub struct X;");
        let bad = [up, x, file("driver/src/b.rs", text)];
        assert_eq!(circles(&bad, "driver"), [["a", "b"]], "{text}");
        let good = file("driver/src/b.rs", &text.replace("a::X", "a::x::X"));
        let [up, x, _] = bad;
        assert_eq!(circles(&[up, x, good], "driver"), Vec::<Vec<String>>::new(), "{text}");
    }
    let hidden =
        "#[cfg(test)]\nmod tests;\nuse super::y::g;\n#[cfg(test)]\nmod t { use super::y; }";
    let bad = [file("driver/src/a/x.rs", hidden), file("driver/src/a/y.rs", "use super::x::X;")];
    assert_eq!(circles(&bad, "driver").len(), 1);
}

#[test]
fn node_methods_counts_those_of_a_node() {
    let code = "impl Node {\n    fn a() {\n        fn b() {}\n    }\n    pub(super) fn c() {}\n}\n";
    let source = |path| Source::new(path, &format!("{code}impl X {{\n    fn d() {{}}\n}}\n"));
    let count = |path, of| node_methods(&source(path), of);
    assert_eq!(count("dataplane/src/node/a.rs", "Node"), 2);
    assert_eq!(count("dataplane/src/node/a.rs", "X"), 1);
    assert_eq!(count("dataplane/src/node/tests/a.rs", "Node"), 0);
}

#[test]
fn catch_alls_sees_one_over_packet_types() {
    let path = "dataplane/src/node/input.rs";
    let good = "match ty { Ty::Ack if x => {} Ty::Ack => match n { 1 => f(), _ => {} }, }\n\
        match x { Some(Ty::Ack) => 1, None => 2 } match n { A => 1, _ => 2 }";
    for bad in [
        "match ty { Ty::Ack => f(), _ => Ok(Verdict::Accept), }",
        "match ty { Ty::Ack => { f() } other => g(other) }",
        "match x { Some(Ty::Ack) => [1, 2], Some(_) => [3, 4], None => [5, 6] }",
        "match x { Ok(Ty::Ack) => match y { _ => {} }, Ok(ty) => {} Err(e) => {} }",
    ] {
        expect(catch_alls, path, bad, good);
    }
    let own = "impl Port for AnyPort { fn f(&self) { match self { Self::Shm(p) => {} _ => {} } } }";
    let other = "impl X { fn f(&self) { match self { Self::Shm(p) => {} _ => {} } } }";
    expect(catch_alls, "driver/src/backend/any_port.rs", own, other);
    let nic = "match Kind::of(id) { Some(Kind::VirtioNet) => v(), Some(_) => e(), None => n() }";
    expect(catch_alls, "driver/src/backend/vfio/mod.rs", nic, other);
}

#[test]
fn bare_indices_sees_one() {
    let good =
        "fn f(p: PeerIdx, (g, n): (GroupIdx, u32), units: u32, tx_wr_count: u32) { p: u32::MAX }";
    for bad in [
        "fn f(&self, p: u32) {}",
        "fn f(&self, recv: Option<u32>) {}",
        "fn f(&self, (now, g): (Instant, u32)) {}",
        "fn f((ep, mut p, n): (EpIdx, u32, Vec<(u32, u32)>)) {}",
        "struct S { tx_cq: u32 }",
        "|wr: u32| wr",
    ] {
        for path in ["node/input.rs", "node/coll/drive.rs", "proto/matching.rs", "av.rs"] {
            expect(bare_indices, &format!("dataplane/src/{path}"), bad, good);
        }
    }
    let table = Source::new("dataplane/src/slab.rs", "fn f(idx: u32) {}");
    assert_eq!(bare_indices(&table), Vec::<Wrong>::new());
}

#[test]
fn sans_io_sees_a_clock_a_lock_and_a_print() {
    let good = "use std::time::Duration;\n#[cfg(test)]\nmod tests { fn f() { println!(); } }";
    for bad in [
        "use std::time::Instant;",
        "std::thread::spawn(f);",
        "use std::sync::Mutex;",
        "use std::io::Read;",
        "use std::net::UdpSocket;",
        "std::fs::read(p)",
        "println!(\"x\")",
        "let t = clock::now_ns();",
    ] {
        expect(sans_io, "dataplane/src/rel/rto.rs", bad, good);
    }
    assert!(sans_io(&Source::new("dataplane/src/poll.rs", "use std::time::Instant;")).is_empty());
}

#[test]
fn setup_options_sees_one_that_is_not_there() {
    let good = format!("run: sudo ./{SETUP} --2m 64 --bind PCI, or else --what");
    assert_eq!(setup_options(&Source::new("a.rs", &good)), [""; 0]);
    let bad = format!("\"sudo ./{SETUP} --pages 512\"");
    assert_eq!(setup_options(&Source::new("a.rs", &bad)).len(), 1);
}

#[test]
fn unsafe_places_sees_a_block_in_the_wrong_room() {
    let good = "// unsafe\nlet s = \"unsafe\"; let not_unsafe = 1;";
    expect(unsafe_places, "api/src/ep.rs", "unsafe { f() }", good);
    expect(unsafe_places, "cli/src/main.rs", "pub unsafe fn f() {}", good);
    for path in ["driver/src/mem/span.rs", "driver/src/backend/shm.rs", "api/src/buf.rs"] {
        assert!(unsafe_places(&Source::new(path, "unsafe { f() }")).is_empty(), "{path}");
    }
}

#[test]
fn width_sees_the_hundred_and_first_character() {
    expect(width, "cli/src/main.rs", &"x".repeat(101), &"ü".repeat(100));
}

#[test]
fn left_over_sees_every_kind() {
    for bad in ["todo!()", "unimplemented!(\"x\")", "dbg!(x)", concat!("// FIX", "ME later")] {
        expect(left_over, "api/src/cq.rs", bad, "// todo! is refused\nlet s = \"dbg!\";");
    }
}

#[test]
fn ignored_sees_an_attribute() {
    expect(ignored, "tests/sim/main.rs", "#[ignore = \"slow\"]\nfn f() {}", "// #[ignore]");
}

#[test]
fn skips_sees_one_that_is_not_counted() {
    let good = "println!(\"SKIPPED: no tshark: {why}\");\nprintln!(\n    \"SKIPPED: x\"\n);";
    let path = "tests/e2e/main.rs";
    expect(skips, path, "println!(\"test SKIPPED\");", good);
    expect(skips, path, "print(\"SKIPPED: x\");", good);
}

#[test]
fn creeping_functions_sees_71_to_80_lines() {
    let function = |lines: usize| {
        let body = "    let x = \"}\"; // {\n".repeat(lines - 2);
        format!("trait T {{ fn g(&self) -> [u8; 2]; }}\nfn f<const N: usize>() {{\n{body}}}\n")
    };
    for lines in [71, 75, 80] {
        expect(creeping_functions, "api/src/ep.rs", &function(lines), &function(70));
    }
    expect(creeping_functions, "api/src/ep.rs", &function(71), &function(81));
}

#[test]
fn workplace_sees_a_path() {
    let bad = format!("see {}/docs", concat!("../sha", "red"));
    assert_eq!(workplace("README.md", &bad).len(), 1);
    assert!(workplace("README.md", "see docs/style.md, /tmp and /dev/shm").is_empty());
}

#[test]
fn blank_keeps_code_and_lines_only() {
    let text =
        "a /* { /* nested */ \n } */ b // {\nc \"{\\\"{\" d r#\"{\"{\"# e '{' f '\\'' g 'a: loop";
    let code = blank(text);
    assert_eq!(code.len(), text.len());
    assert_eq!(code.lines().count(), text.lines().count());
    assert!(!code.contains('{') && !code.contains('}'), "{code}");
    for word in ["a", "b", "c", "d", "e", "f", "g", "'a: loop"] {
        assert!(words(&code, word).next().is_some(), "{word} in {code}");
    }
}

#[test]
fn the_sources_are_found() {
    let sources = sources();
    for path in ["driver/src/port.rs", "dataplane/src/lib.rs", "tests/tidy.rs", "xtask/src/main.rs"]
    {
        assert!(sources.iter().any(|source| source.path == path), "{path}");
    }
}

// ---------------------------------------------------------------------------------------------
// Reading
// ---------------------------------------------------------------------------------------------

fn expect_clean(check: fn(&Source) -> Vec<Wrong>) {
    let wrong: Vec<Wrong> = sources().iter().flat_map(check).collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn sources() -> Vec<Source> {
    let paths = files(&root(), &|path| path.ends_with(".rs"));
    let read = |path: &String| fs::read_to_string(root().join(path)).unwrap();
    paths.iter().map(|path| Source::new(path, &read(path))).collect()
}

/// Every file under `root` that `wanted` says yes to, without what git and cargo keep there.
fn files(root: &Path, wanted: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            let name = entry.file_name();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                if name != ".git" && name != "target" {
                    dirs.push(path);
                }
            } else if kind.is_file() && name != ".git" {
                let path = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                if wanted(&path) {
                    found.push(path);
                }
            }
        }
    }
    found.sort();
    found
}

/// Where `word` stands in `text` with no letter, digit or underscore beside it.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        let ends_open = word.ends_with(part) && after.is_some_and(part);
        let starts_open = word.starts_with(part) && before.is_some_and(part);
        !ends_open && !starts_open
    })
}

/// `text` with comments and the insides of string and character literals blanked, byte for byte.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = not_code(bytes, at);
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = if end > at { end } else { at + 1 };
    }
    String::from_utf8(out).unwrap()
}

/// The end of the comment or literal that starts at `at`, or `at` if none does.
fn not_code(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let find = |from: usize, what: &[u8]| {
        let found = rest[from..].windows(what.len()).position(|window| window == what);
        found.map_or(bytes.len(), |i| at + from + i)
    };
    let word_before = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    match rest {
        [b'/', b'/', ..] => find(0, b"\n"),
        [b'/', b'*', ..] => comment_end(bytes, at),
        [b'"', ..] => string_end(bytes, at + 1),
        [b'r', b'"' | b'#', ..] if !word_before => {
            let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
            if rest.get(1 + hashes) != Some(&b'"') {
                return at; // r#name
            }
            let close: Vec<u8> = [&b"\""[..], &vec![b'#'; hashes]].concat();
            find(2 + hashes, &close) + close.len()
        }
        [b'\'', b'\\', ..] => find(3, b"'") + 1,
        [b'\'', ..] => {
            // A character ends with a quote after one code point; a lifetime does not.
            let len = std::str::from_utf8(&rest[1..]).ok().and_then(|s| s.chars().next());
            let len = len.map_or(1, char::len_utf8);
            if rest.get(1 + len) == Some(&b'\'') { at + 2 + len } else { at }
        }
        _ => at,
    }
}

fn comment_end(bytes: &[u8], at: usize) -> usize {
    let mut depth = 0;
    let mut i = at;
    while i < bytes.len() {
        match bytes[i..] {
            [b'/', b'*', ..] => {
                depth += 1;
                i += 2;
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                i += 2;
            }
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], from: usize) -> usize {
    let mut i = from;
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    bytes.len()
}
