//! Names of memif ports.

use super::spec::{PortInfo, bad_spec, device_and_options, no_option, parse, yes_or_no};
use crate::backend::memif::{Memif, MemifSettings, Role, check_here};
use crate::error::OpenError;
use crate::port::Port;

/// Opens `memif:SOCKET,...`.
pub(super) fn open(spec: &str) -> Result<Box<dyn Port>, OpenError> {
    Ok(Box::new(Memif::open(&settings(spec)?)?))
}

/// Whether [`open`] would open it.
pub(super) fn check(spec: &str) -> Result<(), OpenError> {
    settings(spec)?.check_path()
}

fn settings(spec: &str) -> Result<MemifSettings, OpenError> {
    let (socket, options) = device_and_options(spec, "memif").ok_or_else(|| {
        bad_spec(
            spec,
            "which socket? write memif:/run/vpp/memif.sock, or memif:@job7 for one of no file",
        )
    })?;
    let mut settings = MemifSettings::at(socket);
    for (key, value) in options {
        match key {
            "id" => settings.id = parse(spec, value)?,
            "role" => {
                settings.role = match value {
                    "server" | "master" => Role::Server,
                    "client" | "slave" => Role::Client,
                    _ => return Err(bad_spec(spec, "write role=server or role=client")),
                }
            }
            "secret" => settings.secret = Some(value.to_owned()),
            "rsize" => settings.log2_ring = Some(parse(spec, value)?),
            "bsize" => settings.bsize = Some(parse(spec, value)?),
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "mac" => settings.mac = Some(parse(spec, value)?),
            "crc" => settings.crc = yes_or_no(spec, key, value)?,
            "lossless" => settings.lossless = yes_or_no(spec, key, value)?,
            _ => {
                let known = "id=, role=, secret=, rsize=, bsize=, mtu=, mac=, crc=, lossless=, \
                             near= and switch=";
                return Err(no_option(spec, key, known));
            }
        }
    }
    Ok(settings)
}

/// Entry of the list of ports; there are no memifs to enumerate.
pub(super) fn kind_info() -> PortInfo {
    let why_not = match check_here() {
        Ok(()) => "name a socket: memif:@job7,role=server in one process and memif:@job7 in the \
                   other, or memif:/run/vpp/memif.sock into VPP"
            .to_owned(),
        Err(why) => why.to_string(),
    };
    PortInfo {
        spec: "memif".into(),
        what: "another process by shared memory: VPP, DPDK, or one of ours".into(),
        why_not: Some(why_not),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what people are told to write is understood, and its two ends go together.
    #[test]
    fn the_list_says_how_to_name_one() {
        let why_not = kind_info().why_not.unwrap();
        let words = why_not.split([' ']).map(|word| word.trim_end_matches(','));
        let named: Vec<_> = words.filter(|word| word.starts_with("memif:")).map(settings).collect();
        let [Ok(server), Ok(client), Ok(vpp)] = &named[..] else { panic!("{why_not}: {named:?}") };
        assert_eq!((server.role, client.role), (Role::Server, Role::Client));
        assert_eq!((&server.socket, server.id), (&client.socket, client.id));
        assert!(vpp.socket.starts_with('/'), "{vpp:?}");
    }
    /// Goal: what is wrong is told without the secret. Method: another option, a second secret, and
    /// a port around it.
    #[test]
    fn a_secret_is_not_told() {
        for wrong in
            ["memif:@x,secret=hunter2,role=none", "memif:@x,none=1,secret=hunter2,secret=hunter2"]
        {
            for spec in [wrong.to_owned(), format!("fault(loss=0.1):{wrong}")] {
                let why = crate::open::open(&spec).err().expect("it is wrong").to_string();
                assert!(!why.contains("hunter2") && why.contains("secret=..."), "{why}");
            }
        }
    }
}
