//! Our own programs in C whose scalable endpoints send to each other's contexts, in one process and
//! in two.

use super::check;

#[test]
fn contexts_send_and_receive() {
    check("scalable.c", "fi_endpoint.h", |_| {});
}

#[test]
fn contexts_of_two_processes() {
    check("contexts.c", "fi_endpoint.h", |_| {});
}
