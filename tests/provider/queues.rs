//! Completion queues by our own program in C.

/// Goal: a queue of the default size, or of one below what is posted, has room for all that its
/// endpoints may have outstanding: no call is `-FI_EAGAIN` for ever while it is read.
#[test]
fn a_queue_holds_what_its_endpoints_may_post() {
    super::check("queues.c", "fabric.h", |_| {});
}
