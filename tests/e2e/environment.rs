//! What an operator gets wrong: one clear line each, nothing lost.

use std::os::unix::fs::PermissionsExt;

use barewire::flags::{Caps, InfoFlags};
use barewire::*;

use crate::supervisor::Segment;
use crate::worker::settings;

/// The line and code of a domain that does not open.
fn refused(port: &str) -> (String, i32) {
    let mut info = Info { caps: Caps::MSG, ..Info::default() };
    info.domain_attr.name = Some(port.to_owned());
    let fabric = fabric(&FabricAttr::default()).unwrap();
    match fabric.domain_with(&info, settings()) {
        Ok(_) => panic!("{port} opened"),
        Err(e) => {
            let line = e.to_string();
            assert!(!line.contains('\n') && line.len() > 10, "{line:?}");
            (line, e.error.fi_errno())
        }
    }
}

#[test]
fn a_port_that_does_not_exist() {
    let (line, code) = refused("infiniband:mlx5_0");
    assert!(line.contains("infiniband") && line.contains("shm"), "{line}");
    assert_eq!(code, errno::FI_EINVAL);
    let mut hints = Info::default();
    hints.domain_attr.name = Some("infiniband:mlx5_0".into());
    let none = InfoFlags::empty();
    let asked = getinfo_with(&settings(), API_VERSION, None, None, none, Some(&hints));
    assert_eq!(asked.err(), Some(Error::NoData));
}

#[test]
fn a_frame_size_that_is_too_small() {
    let segment = Segment::new("mtu");
    let (line, code) = refused(&format!("{},mtu=100", segment.port()));
    assert!(line.contains("100") && line.contains("256"), "{line}");
    assert_eq!(code, errno::FI_EINVAL);
}

#[test]
fn an_address_that_somebody_has() {
    let segment = Segment::new("mac");
    let port = format!("{},mac=02:00:00:00:00:07", segment.port());
    let _first = crate::worker::open(&port, settings());
    let (line, code) = refused(&port);
    assert!(line.contains("02:00:00:00:00:07") && line.contains("in use"), "{line}");
    assert_eq!(code, errno::FI_EADDRINUSE);
}

#[test]
fn an_endpoint_number_that_somebody_has() {
    let segment = Segment::new("number");
    let node = crate::worker::open(&segment.port(), settings());
    let source = InfoFlags::SOURCE;
    let info = getinfo_with(&settings(), API_VERSION, None, Some("0"), source, None);
    let again = node.domain.endpoint(&info.unwrap()[0]);
    assert_eq!(again.err(), Some(Error::AddrInUse));
}

#[test]
fn a_segment_that_others_could_write() {
    let segment = Segment::new("mode");
    drop(crate::worker::open(&segment.port(), settings()));
    std::fs::write(segment.path(), [0; 4096]).unwrap();
    std::fs::set_permissions(segment.path(), std::fs::Permissions::from_mode(0o666)).unwrap();
    let (line, code) = refused(&segment.port());
    assert!(line.contains("not safe") && line.contains("rm "), "{line}");
    assert_eq!(code, errno::FI_EACCES);
}

#[test]
fn a_segment_of_another_version() {
    let segment = Segment::new("version");
    std::fs::write(segment.path(), [0x55; 8192]).unwrap();
    std::fs::set_permissions(segment.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    let (line, code) = refused(&segment.port());
    assert!(line.contains("version") && line.contains("rm "), "{line}");
    assert_eq!(code, errno::FI_ENOPROTOOPT);
}

#[test]
fn a_variable_that_means_nothing() {
    let bad = Settings::parse(|name| (name == "BAREWIRE_T_DEAD_MS").then(|| "soon".to_owned()));
    let line = bad.unwrap_err().to_string();
    assert_eq!(line, "BAREWIRE_T_DEAD_MS=\"soon\": expected milliseconds, at least 100");
}

#[test]
fn a_processor_that_does_not_exist() {
    let segment = Segment::new("cpu");
    let mut info = Info { caps: Caps::MSG, ..Info::default() };
    info.domain_attr.name = Some(segment.port());
    info.domain_attr.data_progress = Progress::Auto;
    let wrong = Settings { cpu: Some(1000), ..settings() };
    let e = fabric(&FabricAttr::default()).unwrap().domain_with(&info, wrong).err().unwrap();
    assert_eq!(e.error.fi_errno(), errno::FI_EINVAL);
    assert!(e.to_string().contains("BAREWIRE_CPU"), "{e}");
}

/// Counters are published while a domain is open and gone when it closes.
#[test]
fn statistics_can_be_read_from_outside() {
    let segment = Segment::new("stats");
    let node = crate::worker::open(&segment.port(), settings());
    let station = node.domain.port().station;
    let mine = || stats::read_all().unwrap().into_iter().find(|s| s.station == station);
    let seen = mine().expect("published");
    assert_eq!((seen.pid, seen.alive), (std::process::id(), true));
    assert!(seen.port_name.contains(&segment.0));
    let me = node.knows(&node.ep.getname().unwrap().to_string());
    node.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 1, 0, 1).unwrap();
    node.ep.tinject(&[1; 8], me, 1).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    for _ in 0..3 {
        node.domain.progress().unwrap();
    }
    let seen = mine().unwrap();
    assert_eq!(seen.endpoints[0].received, 1, "{seen:?}");
    drop(node);
    assert!(mine().is_none());
}
