//! Our own program in C whose scalable endpoints send to each other's contexts.

use super::check;

#[test]
fn contexts_send_and_receive() {
    check("scalable.c", "fi_endpoint.h", |_| {});
}
