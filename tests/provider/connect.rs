//! Connected endpoints by our own program in C, compiled against the headers that are installed.

#[test]
fn connections_are_made_refused_and_ended() {
    super::check("connect.c", "fi_cm.h", |_| {});
}
