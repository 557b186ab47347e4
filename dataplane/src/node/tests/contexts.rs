//! Scalable endpoints: whose their numbers are.

use super::*;

/// Goal: a number that a scalable endpoint keeps is nobody else's, whether its context is open or
/// not, and free when the endpoint is closed.
#[test]
fn the_numbers_of_contexts_are_taken() {
    let mut end = end(1, 1500, true);
    let sep = end.node.eps.sep_open(Some(20), 4).unwrap();
    let context = end.node.eps.sep_rx_open(sep, 1, EpAttr::default()).unwrap();
    let other = end.node.eps.open(EpAttr::default()).unwrap();
    for number in 20..24 {
        assert_eq!(end.node.eps.set_number(other, number), Err(Error::AddrInUse), "{number}");
        assert_eq!(
            end.node.eps.sep_open(Some(number), 1).err(),
            Some(Error::AddrInUse),
            "{number}"
        );
    }
    for number in [19, 24] {
        assert_eq!(end.node.eps.set_number(other, number), Ok(()), "{number}");
    }
    let moved = end.node.eps.set_number(context, 30);
    assert!(matches!(moved, Err(Error::Invalid(_))), "{moved:?}");
    assert_eq!(end.node.eps.sep_close(sep), Err(Error::Busy));
    end.node.ep_close(Instant(1), context).unwrap();
    assert_eq!(end.node.eps.sep_close(sep), Ok(()));
    assert_eq!(end.node.eps.set_number(other, 21), Ok(()));
}

/// Goal: a context of a scalable endpoint keeps what goes its way, and nothing that would stand for
/// the other way.
#[test]
fn a_context_keeps_what_goes_its_way() {
    let (sends, reads) = (Caps::MSG | Caps::SEND, Caps::RMA | Caps::READ);
    let (takes, serves) = (Caps::MSG | Caps::RECV, Caps::RMA | Caps::REMOTE_WRITE);
    let all = sends | reads | takes | serves | Caps::COLLECTIVE;
    assert_eq!(transmit_caps(all), sends | reads);
    assert_eq!(receive_caps(all), takes | serves);
    // Of one way alone, or of both, which a kind without a direction has.
    assert_eq!(transmit_caps(sends | serves), sends);
    assert_eq!(transmit_caps(takes | reads), reads);
    assert_eq!(receive_caps(sends | serves), serves);
    assert_eq!(receive_caps(takes | reads), takes);
    assert_eq!(transmit_caps(Caps::TAGGED), Caps::TAGGED | Caps::SEND);
    assert_eq!(receive_caps(Caps::TAGGED), Caps::TAGGED | Caps::RECV);
    let served = Caps::ATOMIC | Caps::REMOTE_READ | Caps::REMOTE_WRITE;
    assert_eq!(receive_caps(Caps::ATOMIC), served);
}
