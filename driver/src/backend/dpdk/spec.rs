//! Device strings: `dpdk:net_tap0,iface=bw0`, `dpdk(mtu=9000):0000:05:00.0`.

use super::DpdkSettings;
use crate::mem::Hugepages;
use crate::port::MacAddr;

/// Reads `dpdk:DEVICE[,ARGS]` or `dpdk(OPTIONS):DEVICE[,ARGS]`.
///
/// # Errors
/// What is wrong, and what to write.
pub(crate) fn parse(spec: &str) -> Result<DpdkSettings, String> {
    let rest = spec.strip_prefix("dpdk").unwrap_or(spec);
    let (options, rest) = match rest.strip_prefix('(') {
        Some(inside) => inside.split_once("):").ok_or("write dpdk(OPTION=VALUE,...):DEVICE")?,
        None => ("", rest.strip_prefix(':').unwrap_or(rest)),
    };
    let mut settings = DpdkSettings::default();
    for option in options.split(',').filter(|option| !option.is_empty()) {
        parse_option(&mut settings, option)?;
    }
    let (device, args) = rest.split_once(',').unwrap_or((rest, ""));
    if device.is_empty() {
        return Err(
            "a device is missing; write dpdk:net_tap0,iface=bw0 or dpdk:0000:05:00.0".into()
        );
    }
    let legal = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    if !device.chars().all(legal) || device.len() > 63 {
        return Err(format!("\"{device}\" is no name of a device, such as net_tap0"));
    }
    if !args.chars().all(|c| c.is_ascii_graphic()) {
        return Err("the driver's arguments hold a space or what cannot be printed".into());
    }
    (settings.device, settings.args) = (device.to_owned(), args.to_owned());
    Ok(settings)
}

fn parse_option(settings: &mut DpdkSettings, option: &str) -> Result<(), String> {
    let (key, value) = option.split_once('=').unwrap_or((option, ""));
    let number = || value.parse::<usize>().map_err(|why| format!("{key}=\"{value}\": {why}"));
    let is_yes = || match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("write {key}=yes or {key}=no")),
    };
    match key {
        "mtu" => settings.mtu = Some(number()?),
        "mac" => {
            let mac = value.parse::<MacAddr>().map_err(|why| format!("{why}"))?;
            if !mac.is_single() {
                return Err("a station's address has an even first byte; write \
                            dpdk(mac=02:00:00:00:00:01):..."
                    .into());
            }
            settings.mac = Some(mac);
        }
        "ring" => {
            settings.ring_len = number()?;
            if !(64..=32_768).contains(&settings.ring_len) {
                return Err(format!("ring={value} is outside 64 to 32768"));
            }
        }
        "mbufs" => settings.mbuf_count = Some(number()?),
        "huge" => {
            settings.hugepages = match value {
                "yes" => Hugepages::Required,
                "no" => Hugepages::No,
                _ => return Err("write huge=yes, huge=no, or nothing for: if there are any".into()),
            }
        }
        "crc" => settings.crc = Some(is_yes()?),
        "lossless" => settings.lossless = is_yes()?,
        "promisc" => settings.promiscuous = is_yes()?,
        "ethertype" => {
            let hex = value.strip_prefix("0x").ok_or("write ethertype=0x88b5")?;
            let bad = |why| format!("ethertype=\"{value}\": {why}");
            settings.ethertype = Some(u16::from_str_radix(hex, 16).map_err(bad)?);
        }
        _ => {
            let known = "mtu=, mac=, ring=, mbufs=, huge=, crc=, lossless=, ethertype=, promisc=, \
                         near= and switch=";
            return Err(format!("no option \"{key}\" in the parentheses; there are {known}"));
        }
    }
    Ok(())
}

/// The string that opens the device again.
pub(super) fn text(settings: &DpdkSettings) -> String {
    let usual = DpdkSettings::default();
    let mut options: Vec<String> = Vec::new();
    options.extend(settings.mtu.map(|mtu| format!("mtu={mtu}")));
    options.extend(settings.mac.map(|mac| format!("mac={mac}")));
    if settings.ring_len != usual.ring_len {
        options.push(format!("ring={}", settings.ring_len));
    }
    options.extend(settings.mbuf_count.map(|count| format!("mbufs={count}")));
    match settings.hugepages {
        Hugepages::IfFree => {}
        Hugepages::Required => options.push("huge=yes".into()),
        Hugepages::No => options.push("huge=no".into()),
    }
    options.extend(settings.crc.map(|crc| format!("crc={}", if crc { "yes" } else { "no" })));
    if settings.lossless {
        options.push("lossless=yes".into());
    }
    options.extend(settings.ethertype.map(|ethertype| format!("ethertype={ethertype:#06x}")));
    if settings.promiscuous {
        options.push("promisc=yes".into());
    }
    let options =
        if options.is_empty() { String::new() } else { format!("({})", options.join(",")) };
    let comma = if settings.args.is_empty() { "" } else { "," };
    format!("dpdk{options}:{}{comma}{}", settings.device, settings.args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_is_read_and_written() {
        for spec in [
            "dpdk:net_tap0,iface=bw0",
            "dpdk:0000:05:00.0",
            "dpdk(mtu=9000,mac=02:00:00:00:00:07,ring=128,mbufs=4096,huge=no,ethertype=0x88b5):\
             net_memif0,role=client,socket=/tmp/a.sock",
            "dpdk(huge=yes):net_ring0,pair=a",
            "dpdk(crc=no):net_af_packet0,iface=eth0",
            "dpdk(lossless=yes):net_memif0,role=client",
            "dpdk(crc=yes,ethertype=0x88b5,promisc=yes):0000:05:00.0",
        ] {
            let settings = parse(spec).unwrap();
            assert_eq!(text(&settings), spec);
        }
        let settings = parse("dpdk(mtu=9000):net_tap0,iface=bw0,mac=fixed").unwrap();
        assert_eq!((settings.device.as_str(), settings.mtu), ("net_tap0", Some(9000)));
        assert_eq!((settings.arg("iface"), settings.arg("mac")), (Some("bw0"), Some("fixed")));
        assert_eq!(settings.arg("face"), None);
    }

    #[test]
    fn a_wrong_string_says_what_to_write() {
        for (spec, says) in [
            ("dpdk", "a device is missing"),
            ("dpdk:", "a device is missing"),
            ("dpdk(mtu=9000)net_tap0", "dpdk(OPTION=VALUE"),
            ("dpdk(mtu=9k):net_tap0", "invalid digit"),
            ("dpdk(ring=1):net_tap0", "64 to 32768"),
            ("dpdk(speed=1):net_tap0", "no option \"speed\""),
            ("dpdk(huge=maybe):net_tap0", "huge=yes"),
            ("dpdk(crc=maybe):net_memif0", "crc=yes"),
            ("dpdk(lossless=perhaps):net_memif0", "lossless=yes"),
            ("dpdk(ethertype=88b5):net_tap0", "0x88b5"),
            ("dpdk(promisc=1):net_tap0", "promisc=yes"),
            ("dpdk(mac=1):net_tap0", "02:00:00:00:00:01"),
            ("dpdk(mac=01:00:00:00:00:01):net_tap0", "even first byte"),
            ("dpdk:net tap0", "no name of a device"),
            ("dpdk:net_tap0,iface=a b", "a space"),
        ] {
            let why = parse(spec).unwrap_err();
            assert!(why.contains(says), "{spec}: {why}");
        }
    }
}
