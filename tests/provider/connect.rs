//! Connected endpoints by our own program in C, compiled against the headers that are installed.

#[test]
fn connections_are_made_refused_and_ended() {
    super::check("connect.c", "fi_cm.h", |_| {});
}

/// Goal: over `udp:` the same, with listeners that are known by host and service.
#[test]
fn connections_are_made_by_host_and_service_over_udp() {
    super::check_over(Some("udp:127.0.0.1"), "connect.c", "fi_cm.h", |_| {});
}

/// A server that is killed and started again under its name is reached by the first call, through
/// memory and by host and service.
#[test]
fn a_server_that_was_started_again_is_connected_to_at_once() {
    for port in [None, Some("udp:127.0.0.1")] {
        super::check_over(port, "reconnect.c", "fi_cm.h", |_| {});
    }
}

/// Goal: a station that asks and takes no answer keeps nobody else from hearing of a refusal.
#[test]
fn a_station_that_reads_no_answer_delays_no_other() {
    for port in [None, Some("udp:127.0.0.1,near=no")] {
        super::check_over(port, "flood.c", "fi_cm.h", |_| {});
    }
}
