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
            let exempt = command == "capture" && part == "--json";
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
