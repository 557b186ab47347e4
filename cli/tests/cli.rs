//! The command as a user meets it: help, exit codes, error texts.

use std::process::{Command, Output};

fn barewire(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_barewire"))
        .args(args)
        .env_remove("BAREWIRE_PORT")
        .env_remove("BAREWIRE_LOG")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Every command that `barewire --help` lists.
fn commands() -> Vec<String> {
    let help = text(&barewire(&["--help"]).stdout);
    let list = help.split_once("Commands:\n").unwrap().1;
    let lines = list.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
}

#[test]
fn every_command_explains_itself_with_examples_and_exit_codes() {
    let commands = commands();
    assert!(commands.contains(&"doctor".to_owned()), "{commands:?}");
    for command in commands.iter().filter(|name| *name != "help") {
        let help = barewire(&[command, "--help"]);
        assert!(help.status.success());
        let help = text(&help.stdout);
        for part in ["Examples:", "Exit codes:", "--json"] {
            let exempt = ["capture", "top"].contains(&&**command) && part == "--json";
            assert!(exempt || help.contains(part), "{command} --help has no {part}\n{help}");
        }
        assert!(help.contains(&format!("  barewire {command}")), "{command}: no example\n{help}");
        let wide = help.lines().find(|line| line.chars().count() > 100);
        assert_eq!(wide, None, "{command} --help");
    }
}

#[test]
fn a_wrong_call_is_exit_code_2() {
    for args in [&[][..], &["dance"], &["doctor", "--dance"]] {
        let output = barewire(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!output.stderr.is_empty());
    }
}

/// Goal: a number that is too large or too small is told in a line, and no panic, no lack of memory
/// and no endless wait. Method: of options, and of settings.
#[test]
fn a_number_out_of_range_is_told() {
    let port = format!("shm:numbers-{}", std::process::id());
    let seconds = ["capture", "--port", &port, "-o", "/dev/null", "--seconds"];
    let output = barewire(&[&seconds[..], &["18446744073709551615"]].concat());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let large = ["capture", "--port", &port, "-o", "/dev/null", "--count", "0"];
    assert_eq!(barewire(&large).status.code(), Some(2));
    let spawn = ["pingpong", "--spawn", "--size", "8", "--iterations", "1", "--port", &port];
    for (name, value, code, says) in [
        ("BAREWIRE_TX_MAX", "1099511627776", 2, "1 to 16777216"),
        ("BAREWIRE_RX_MAX", "1099511627776", 2, "1 to 16777216"),
        ("BAREWIRE_RX_MAX", "1", 1, "set a larger BAREWIRE_RX_MAX"),
        ("BAREWIRE_PEER_MAX", "1099511627776", 2, "1 to 1048576"),
        ("BAREWIRE_UNEXPECTED_BYTES", "1099511627776", 2, "16384 to 549755813888"),
        ("BAREWIRE_UNEXPECTED_BYTES", "0", 2, "16384 to 549755813888"),
        ("BAREWIRE_EAGER_MAX", "1099511627776", 2, "at most 1048576"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_barewire"));
        let output = command.args(spawn).env(name, value).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{name}={value}: {said}");
        assert!(said.contains(says) && said.lines().count() == 1, "{name}={value}: {said}");
    }
}

#[test]
fn a_wrong_filter_of_the_log_is_exit_code_2() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_barewire"));
    let output = command.arg("info").env("BAREWIRE_LOG", "barewire=loud").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.lines().count() == 1 && said.contains("BAREWIRE_LOG"), "{said}");
}

/// What `barewire ARGS --json` says where the shell has obeyed `limits` first.
fn objects_within(limits: &str, args: &[&str]) -> Vec<serde_json::Value> {
    let script = format!("{limits}; exec \"$0\" \"$@\" --json");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_barewire")]).args(args);
    let output = shell.env_remove("BAREWIRE_PORT").output().unwrap();
    let lines = text(&output.stdout);
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Goal: `doctor` and `info` say whether a memif can be made here, and why not if not. Method: with
/// everything; without a descriptor for its socket; without room for its memory.
#[test]
fn doctor_and_info_say_why_a_memif_cannot_be_made() {
    let no_memory = "ulimit -f 0";
    let cases = [
        ("true", None),
        ("ulimit -n 4", Some("Too many open files")),
        (no_memory, Some("File too large")),
    ];
    for (limits, lack) in cases {
        let checks = objects_within(limits, &["doctor"]);
        let check = checks.iter().find(|check| check["check"] == "memif").expect(limits);
        let said = check["found"].as_str().unwrap();
        assert_eq!(check["needed_for"], "memif");
        assert_eq!(check["status"], if lack.is_some() { "missing" } else { "ok" }, "{check}");
        let ports = objects_within(limits, &["info"]);
        let port = ports.iter().find(|port| port["port"] == "memif").expect(limits);
        let why_not = port["why_not"].as_str().unwrap();
        assert_eq!(port["works"], false, "{port}");
        if let Some(lack) = lack {
            assert!(said.contains(lack) && why_not.contains(lack), "{check} {port}");
            assert!(check["mend"].as_str().unwrap().contains("ulimit -n"), "{check}");
            assert!(!why_not.contains("name a socket"), "{port}");
        } else {
            assert!(why_not.contains("memif:@job7,role=server"), "{port}");
        }
    }
}

#[test]
fn doctor_prints_one_object_a_line() {
    let output = barewire(&["doctor", "--json"]);
    let lines = text(&output.stdout);
    assert!(lines.lines().count() >= 12, "{lines}");
    let mut shm_is_missing = false;
    for line in lines.lines() {
        let check: serde_json::Value = serde_json::from_str(line).unwrap();
        let status = check["status"].as_str().unwrap();
        assert!(["ok", "warn", "missing"].contains(&status), "{line}");
        assert_eq!(check["mend"].is_string(), status != "ok", "{line}");
        assert!(check["found"].as_str().is_some_and(|found| !found.is_empty()), "{line}");
        shm_is_missing |= status == "missing" && check["needed_for"] == "shm";
    }
    assert_eq!(output.status.code(), Some(i32::from(shm_is_missing)));
}

/// Goal: the man page of ports has each option of the tables of the documentation.
#[test]
fn every_option_of_a_port_is_in_the_man_page() {
    let man = include_str!("../../docs/man/barewire_ports.7");
    let pages = [
        include_str!("../../docs/wires.md"),
        include_str!("../../docs/vfio.md"),
        include_str!("../../docs/memif.md"),
        include_str!("../../docs/dpdk.md"),
    ];
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    let mut count = 0;
    for row in pages.iter().flat_map(|page| page.lines()).filter(|line| line.starts_with("| `")) {
        let cell = row.split('|').nth(1).unwrap();
        let written = cell.split('`').skip(1).step_by(2);
        for option in written.filter_map(|text| Some(text.split_once('=')?.0)) {
            if !option.is_empty() && option.chars().all(is_name) {
                let words = man.split(|c: char| !is_name(c) && c != '=');
                let mut named = words.filter_map(|word| word.split_once('='));
                assert!(named.any(|(name, _)| name == option), "no {option}=, as in {row}");
                count += 1;
            }
        }
    }
    assert!(count > 40, "{count} options were found");
}

/// Goal: the pages of settings have each variable that is read, once, with its default.
#[test]
fn every_setting_is_in_its_pages() {
    let page = include_str!("../../docs/settings.md");
    let man = include_str!("../../docs/man/fi_barewire.7");
    let row = |name: &str| {
        let start = format!("| `{name}` |");
        let mut rows = page.lines().filter(|line| line.starts_with(&start));
        let row = rows.next().unwrap_or_else(|| panic!("docs/settings.md has no row of {name}"));
        assert!(rows.next().is_none(), "docs/settings.md has {name} twice");
        row.replace("\\|", "/")
    };
    for &(name, _, default) in barewire::settings::VARIABLES {
        let row = row(name);
        assert_eq!(row.split('|').nth(3).map(str::trim), Some(default), "{row}");
        let has = |line: &str| line.split([' ', '"', ',']).any(|word| word == format!("FI_{name}"));
        let heads = man.lines().filter(|line| line.starts_with(".B") && has(line)).count();
        assert!(heads > 0, "docs/man/fi_barewire.7 has no FI_{name}");
    }
    row("BAREWIRE_LOG");
    // No row of what is not read.
    let is_known = |name: &str| barewire::settings::VARIABLES.iter().any(|known| known.0 == name);
    for line in page.lines().filter(|line| line.starts_with("| `BAREWIRE_")) {
        let name = line.split('`').nth(1).unwrap();
        assert!(is_known(name) || name == "BAREWIRE_LOG", "nobody reads {name}");
    }
}
