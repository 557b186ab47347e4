//! What a segment of Ethernet brings to a port that speaks IP itself: ARP, neighbour discovery, and
//! headers of datagrams.

/// See `barewire_driver::backend::ip`: whatever the bytes say, the port lends frames alone that are
/// from where they say, answers no more than it was asked, and takes what is good afterwards.
pub fn ip_port(data: &[u8]) {
    barewire_driver::backend::ip::fuzz_segment(data);
}
