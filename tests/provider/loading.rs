//! Who sees the provider, and what the library itself looks like.

use std::process::Command;

use super::{finish, has, succeed, text, with};

const FI_INFO: &[(&str, &str)] = &[("fi_info", "libfabric-bin")];
const FI_PINGPONG: &[(&str, &str)] = &[("fi_pingpong", "libfabric-bin")];

/// Row X4.
#[test]
fn fi_info_shows_the_provider_to_whoever_asks_by_name() {
    with(FI_INFO, |bench| {
        let said = succeed(bench.bare("fi_info").args(["-p", "barewire", "-v"]), 30);
        for line in [
            "prov_name: barewire",
            "type: FI_EP_RDM",
            "mode: [  ]",
            "mr_mode: [ FI_MR_PROV_KEY ]",
            "name: shm",
            "cq_data_size: 8",
        ] {
            assert!(said.contains(line), "no \"{line}\" in\n{said}");
        }
        let said = succeed(bench.bare("fi_info").env("FI_PROVIDER", "barewire"), 30);
        assert!(said.contains("provider: barewire"), "{said}");
        // One port, one answer, and nothing of libfabric's layered on it.
        assert_eq!(said.matches("provider: ").count(), 1, "{said}");
    });
}

#[test]
fn the_provider_is_not_selected_by_default() {
    with(FI_INFO, |bench| {
        for list in [None, Some("tcp,udp"), Some("^tcp"), Some("^barewire")] {
            let mut command = bench.bare("fi_info");
            if let Some(list) = list {
                command.env("FI_PROVIDER", list);
            }
            let said = text(&finish(&mut command, 30));
            assert!(!said.contains("barewire"), "FI_PROVIDER={list:?}:\n{said}");
        }
        let said = succeed(bench.bare("fi_info").env("FI_BAREWIRE_PORT", bench.port()), 30);
        assert!(said.contains("provider: barewire"), "a port that is set offers it:\n{said}");
    });
}

/// Row X9.
#[test]
fn fi_info_lists_what_can_be_set() {
    with(FI_INFO, |bench| {
        let said = succeed(bench.bare("fi_info").arg("-e"), 30);
        for name in ["FI_BAREWIRE_PORT", "FI_BAREWIRE_PROGRESS", "FI_BAREWIRE_T_DEAD_MS"] {
            assert!(said.contains(name), "no {name} in\n{said}");
        }
        // A value that means nothing takes the provider out and is told.
        let mut command = bench.program("fi_info");
        command.env("FI_BAREWIRE_PROGRESS", "maybe").env("FI_LOG_LEVEL", "warn");
        let output = finish(&mut command, 30);
        assert!(!output.status.success());
        let says = "FI_BAREWIRE_PROGRESS=\"maybe\": expected manual or auto";
        assert!(text(&output).contains(says), "{}", text(&output));
    });
}

/// Goal: a port that does not open is not offered, and the reason with its cure is seen at the
/// default log level, once, whatever libfabric asks how often.
#[test]
fn a_port_that_does_not_open_is_not_offered_and_says_why() {
    with(FI_INFO, |bench| {
        for (name, value, says) in [
            ("FI_BAREWIRE_PORT", "afpacket:nothing0", "no such interface; there are "),
            ("FI_BAREWIRE_PORT", "afpackt:va", "no such kind of port; write afpacket:INTERFACE, "),
            ("FI_BAREWIRE_PORT", "udp:192.0.2.1", "this host has "),
            ("FI_BAREWIRE_T_DEAD_MS", "5s", "expected milliseconds"),
        ] {
            for level in [None, Some("warn")] {
                let mut command = bench.program("fi_info");
                command.env(name, value);
                if let Some(level) = level {
                    command.env("FI_LOG_LEVEL", level);
                }
                let output = finish(&mut command, 30);
                let said = text(&output);
                assert!(!output.status.success() && !said.contains("provider: barewire"), "{said}");
                let lines = said.lines().filter(|line| line.contains(says)).count();
                assert!(lines == 1 || lines > 1 && level.is_some(), "{value} {level:?}: {said}");
            }
        }
        let said = succeed(&mut bench.program("fi_info"), 30);
        assert!(!said.contains("barewire: "), "nothing is wrong: {said}");
    });
}

#[test]
fn fi_pingpong_runs_over_a_segment() {
    with(FI_PINGPONG, |bench| {
        let control = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = control.local_addr().unwrap().port().to_string();
        drop(control);
        for extra in [&["-e", "rdm"][..], &["-e", "rdm", "-c", "-I", "20"]] {
            let args = [&["-p", "barewire", "-B", port.as_str()], extra].concat();
            let mut server = bench.program("fi_pingpong");
            server.args(&args);
            let waits = std::thread::spawn(move || succeed(&mut server, 120));
            let args = [&["-p", "barewire", "-P", port.as_str()], extra, &["127.0.0.1"]].concat();
            // The client gives up at once if the server does not listen yet.
            let start = std::time::Instant::now();
            let said = loop {
                let output = finish(bench.program("fi_pingpong").args(&args), 120);
                if output.status.success() || start.elapsed().as_secs() > 20 {
                    break text(&output);
                }
                std::thread::sleep(std::time::Duration::from_millis(100));
            };
            assert!(said.lines().any(|l| l.starts_with("1m ")), "{said}");
            waits.join().unwrap();
        }
    });
}

#[test]
fn the_library_exports_one_symbol_and_is_linked_with_no_libfabric() {
    with(&[("nm", "binutils"), ("readelf", "binutils")], |bench| {
        let file = bench.dir.join("libbarewire_fi.so");
        let said = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(&file), 30);
        let symbols: Vec<_> = said.lines().filter_map(|l| l.split(' ').next_back()).collect();
        assert_eq!(symbols, ["fi_prov_ini"]);
        let said = succeed(Command::new("readelf").arg("-d").arg(&file), 30);
        let needed: Vec<_> = said.lines().filter(|l| l.contains("NEEDED")).collect();
        assert!(!needed.is_empty() && !needed.iter().any(|l| l.contains("fabric")), "{needed:?}");
        assert!(said.contains("NODELETE"), "a thread may outlive dlclose:\n{said}");
    });
}

#[test]
fn a_node_that_does_not_exist_is_no_data() {
    with(FI_INFO, |bench| {
        assert!(has("fi_info"));
        let output = finish(bench.program("fi_info").args(["-n", "192.0.2.1", "-P", "7"]), 60);
        assert!(text(&output).contains("-61"), "{}", text(&output));
    });
}
