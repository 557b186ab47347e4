//! Data-parallel training in small: each of N processes has gradients of its own, and all of them
//! need the sum. Start them together, `cargo run --example gradients RANK N` with RANK from 0.
use barewire::flags::{BindFlags, Caps, InfoFlags};
use barewire::{coll::FI_UNIVERSE, *};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args: Vec<u8> = std::env::args().skip(1).flat_map(|a| a.parse()).collect();
    let [rank, n] = args[..] else { return Err("usage: gradients RANK N".into()) };
    // Everybody knows everybody's address beforehand: a MAC with the rank in it, endpoint 0.
    let mac = |rank: u8| format!("02:67:72:61:64:{rank:02x}");
    let segment = std::env::var("SEGMENT").unwrap_or_else(|_| "gradients".to_owned());
    let mut hints = Info { caps: Caps::COLLECTIVE, ..Info::default() };
    hints.domain_attr.name = Some(format!("shm:{segment},mac={}", mac(rank)));
    let info = getinfo(API_VERSION, None, None, InfoFlags::empty(), Some(&hints))?.remove(0);
    let (fabric, wait_obj) = (fabric(&info.fabric_attr)?, WaitObj::Unspec);
    // A MAC alone does not say which life of its owner is meant, so everybody is let in.
    let settings = Settings { by_name: true, ..Settings::from_env()? };
    let domain = fabric.domain_with(&info, settings)?;
    let (av, ep) = (domain.av_open(AvAttr::default())?, domain.endpoint(&info)?);
    let cq = domain.cq_open(CqAttr { wait_obj, ..CqAttr::default() })?;
    let eq = fabric.eq_open(EqAttr { wait_obj, ..EqAttr::default() })?;
    ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)?;
    ep.bind_av(&av).and_then(|()| ep.bind_eq(&eq)).and_then(|()| ep.enable())?;
    (0..n).try_for_each(|r| av.insertsvc(&mac(r), "0").map(drop))?;
    let set = av.av_set(&AvSetAttr { flags: FI_UNIVERSE, ..AvSetAttr::default() })?;
    let group = ep.join_collective(set.addr(), &set, 0, 0)?;
    eq.sread(&mut [0; 8], -1)?;
    // A step of training would compute these.
    let gradients = (0..1000_u16).map(|i| f32::from(rank) + f32::from(i));
    let bytes: Vec<u8> = gradients.flat_map(f32::to_le_bytes).collect();
    let in_place = (Buf::default(), Buf::from(bytes));
    ep.allreduce(in_place, group.addr(), (AtomicOp::Sum, Datatype::Float), 1)?;
    let mut done = [Completion::default()];
    while let Err(Error::Again) = cq.sread(&mut done, 0, -1) {}
    let bufs = std::mem::take(&mut done[0].bufs).into_many().ok_or("the sum failed")?;
    let sums: Vec<_> = bufs[1].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    println!("rank {rank} of {n}: {} ... {}", sums[0], sums[999]);
    Ok(())
}
