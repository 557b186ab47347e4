//! Checks of what sealed frames need: AES in hardware, and key files that a domain takes.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use barewire::{CertFacts, Settings, cert_facts, check_fit, key_file_len, keyring};
use barewire_driver::mem::{KeyMemory, Locked};
use nix::unistd::{Uid, User};

use super::machine::{CredentialFiles, Machine};
use super::{Check, KEY, SPEED, split_mend};

/// Whether the processor encrypts with AES itself.
pub(super) fn aes(machine: &Machine) -> Check {
    let name = "aes";
    // The lines of x86 and of ARM.
    let flags = machine.cpu_line("flags").or_else(|| machine.cpu_line("Features"));
    let Some(flags) = flags else {
        let mend = "sudo mount -t proc proc /proc";
        return Check::warn(name, SPEED, "/proc/cpuinfo cannot be read", mend);
    };
    let has = |wanted: &str| flags.split_whitespace().any(|flag| flag == wanted);
    match (has("aes"), has("vaes")) {
        (true, true) => Check::ok(name, SPEED, "in hardware, and in vectors"),
        (true, false) => Check::ok(name, SPEED, "in hardware"),
        (false, _) => {
            let found = "not in hardware: sealed frames are ChaCha20-Poly1305, some times slower";
            let mend = match machine.is_virtual() {
                true => "give this guest its host's processor: virsh edit, <cpu mode='host-model'>",
                false => "switch it on in the firmware, or leave long messages unsealed",
            };
            Check::warn(name, SPEED, found, mend)
        }
    }
}

/// Whether keys may get to swap space.
pub(super) fn memory(machine: &Machine) -> Check {
    // As a domain does with its key.
    drop(Locked::zeros(1));
    let swaps = machine.read("/proc/swaps").unwrap_or_default();
    memory_told(KeyMemory::now(), swaps.lines().count() > 1)
}

fn memory_told(memory: KeyMemory, has_swap: bool) -> Check {
    let name = "key memory";
    let KeyMemory { len, locked, .. } = memory;
    match (locked < len, has_swap) {
        (false, _) => Check::ok(name, KEY, "locked, and left out of core dumps"),
        (true, false) => {
            Check::ok(name, KEY, "left out of core dumps; not locked, but there is no swap space")
        }
        (true, true) => {
            let found = "the kernel does not lock it (ulimit -l), so keys may get to swap space";
            let mend = "echo '* - memlock 8192' | sudo tee -a \
                        /etc/security/limits.d/barewire.conf, then log in again; or encrypt swap";
            Check::warn(name, KEY, found, mend)
        }
    }
}

/// The checks of the files that are named.
pub(super) fn named(credentials: &CredentialFiles) -> Vec<Check> {
    let mut checks = Vec::new();
    if !credentials.key_files.is_empty() {
        checks.push(files(credentials));
    }
    if credentials.certificate.is_some() {
        checks.push(certificate(credentials));
    }
    checks
}

/// The owners, modes and lengths of the key files.
pub(super) fn files(credentials: &CredentialFiles) -> Check {
    let name = "keys";
    if credentials.key_files.is_empty() {
        let found = "BAREWIRE_KEY_FILE is not set: anybody on the wire can read and forge frames";
        return Check::ok(name, KEY, found);
    }
    let mut told = Vec::new();
    let named = credentials.key_files.iter().filter(|path| !path.as_os_str().is_empty());
    for (i, path) in named.enumerate() {
        let shown = path.display();
        // As a domain has it: all but the first may be missing, and nothing else may be wrong.
        let is_missing =
            || std::fs::metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound);
        if i > 0 && is_missing() {
            told.push(format!("{shown}: none"));
            continue;
        }
        match key_file_len(path) {
            Ok(len) => told.push(format!("{shown}: {}, {len} bytes", owner(path))),
            Err(why) => {
                let new = format!(
                    "head -c 32 /dev/urandom > {shown} && chmod 600 {shown} (the same file on all \
                     nodes)"
                );
                let (found, mend) = split_mend(&why.line, &new);
                let mend = if mend.starts_with("chmod") { mend } else { &new };
                return Check::missing(name, KEY, found, mend);
            }
        }
    }
    // What is wrong with the list.
    let settings = Settings { key_files: credentials.key_files.clone(), ..Settings::default() };
    if let Err(why) = keyring(&settings) {
        let (found, mend) = split_mend(&why.line, "ls -l");
        return Check::missing(name, KEY, found, mend);
    }
    told.push("sessions within this node are not sealed; near=no at the port seals them".into());
    Check::ok(name, KEY, told.join("; "))
}

/// Seconds before its end at which a certificate should have been renewed, if it lives for four
/// times that: else the last quarter of its life. Who renews short ones does so at the half.
const LEFT: u64 = 14 * 86_400;

/// What mends a certificate of which the error does not say it.
const SHOWN: &str = "docs/security.md shows how";

/// Longest frame of a plain Ethernet port, bytes, its header included.
const FRAME_LEN: usize = 1514;

/// The name in the certificate, and its end of validity.
pub(super) fn certificate(credentials: &CredentialFiles) -> Check {
    let name = "certificate";
    let Some(files) = &credentials.certificate else {
        return Check::ok(name, KEY, "BAREWIRE_CERT_FILE is not set");
    };
    if !credentials.key_files.is_empty() {
        let found =
            "BAREWIRE_CERT_FILE and BAREWIRE_KEY_FILE are both set: a domain has one of them";
        return Check::missing(name, KEY, found, "unset BAREWIRE_KEY_FILE");
    }
    match cert_facts(files) {
        Err(why) => {
            let (found, mend) = split_mend(&why.line, SHOWN);
            Check::missing(name, KEY, found, mend)
        }
        Ok(CertFacts { name: who, valid: [not_before, not_after], frame_len }) => {
            let life = not_after.saturating_sub(not_before);
            let left = not_after.saturating_sub(credentials.now_ns / 1_000_000_000);
            let (days, hours) = (left / 86_400, left / 3_600);
            let found = format!("{who}, private key {}", owner(&files.key));
            let found = match days {
                0 => format!("{found}, {hours} hours left"),
                _ => format!("{found}, {days} days left"),
            };
            if let Some(Err(why)) = credentials.port.as_ref().map(|port| check_fit(frame_len, port))
            {
                let (found, mend) = split_mend(&why.line, SHOWN);
                return Check::missing(name, KEY, found, mend);
            }
            if credentials.port.is_none() && frame_len > FRAME_LEN {
                let found = format!("{found}, a session begins with a frame of {frame_len} bytes");
                let mend = "take an ECDSA key and fewer intermediates, or ports with longer frames";
                return Check::warn(name, KEY, found, mend);
            }
            if left < LEFT.min(life / 4) {
                return Check::warn(name, KEY, found, "renew it; running domains take the new one");
            }
            Check::ok(name, KEY, found)
        }
    }
}

/// The mode of a file and whose it is.
fn owner(path: &Path) -> String {
    let Ok(is) = std::fs::metadata(path) else { return "gone".to_owned() };
    let user = User::from_uid(Uid::from_raw(is.uid())).ok().flatten();
    let user = user.map_or_else(|| format!("user {}", is.uid()), |user| user.name);
    format!("{user}'s, mode {:o}", is.mode() & 0o777)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::machine::fixture::Fixture;
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use barewire::CertFiles;

    #[test]
    fn aes_is_read_from_the_flags() {
        let check = |text| aes(&Fixture::full().with("/proc/cpuinfo", text).machine());
        assert_eq!(check("flags\t: fpu aes vaes\n").status, Status::Ok);
        assert_eq!(check("Features\t: fp asimd aes pmull\n").status, Status::Ok);
        let none = check("flags\t: fpu sse2 hypervisor\n");
        assert_eq!(none.status, Status::Warn);
        assert!(none.found.contains("ChaCha20") && none.mend.unwrap().contains("guest"));
    }

    #[test]
    fn a_certificate_is_told_with_its_name_and_end() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        let id = "spiffe://a.org/job".try_into().unwrap();
        params.subject_alt_names = vec![rcgen::SanType::URI(id)];
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        let cert = params.self_signed(&key).unwrap().pem();
        let put = |name: &str, text: &str, mode: u32| {
            std::fs::write(at(name), text).unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let check = |now: u64| {
            let files = CertFiles::new(at("cert"), at("key"), at("cert"));
            let now_ns = now * 1_000_000_000;
            certificate(&CredentialFiles {
                certificate: Some(files),
                now_ns,
                ..CredentialFiles::default()
            })
        };
        put("cert", &cert, 0o644);
        put("key", &key.serialize_pem(), 0o600);
        let end = 2_208_988_800;
        let good = check(end - 20 * 86_400);
        assert_eq!(good.status, Status::Ok);
        assert!(good.found.contains("spiffe://a.org/job") && good.found.contains("20 days left"));
        assert_eq!(check(end - 13 * 86_400).status, Status::Warn);
        put("key", &key.serialize_pem(), 0o640);
        let open = check(end - 20 * 86_400);
        assert_eq!(open.status, Status::Missing);
        assert!(open.mend.unwrap().starts_with("chmod 600"));
        put("key", &rcgen::KeyPair::generate().unwrap().serialize_pem(), 0o600);
        assert!(check(0).found.contains("not that of the certificate"));
        put("cert", &cert, 0o664);
        assert!(check(0).mend.unwrap().starts_with("chmod 644"));
        // What peers would refuse, and what is long.
        let issue = |change: &dyn Fn(&mut rcgen::CertificateParams)| {
            let mut params = params.clone();
            change(&mut params);
            put("cert", &params.self_signed(&key).unwrap().pem(), 0o644);
            put("key", &key.serialize_pem(), 0o600);
            check(end - 20 * 86_400)
        };
        let one = issue(&|params| {
            params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
        });
        assert_eq!(one.status, Status::Missing);
        assert!(one.found.contains("not both clientAuth and serverAuth"));
        assert!(one.mend.unwrap().contains("extendedKeyUsage=clientAuth,serverAuth"));
        let authority = issue(&|params| {
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        });
        assert!(
            authority.found.contains("CA:TRUE") && authority.mend.unwrap().contains("CA:FALSE")
        );
        let long = issue(&|params| {
            let text = "x".repeat(1300).as_str().try_into().unwrap();
            params.subject_alt_names.push(rcgen::SanType::DnsName(text));
        });
        assert_eq!(long.status, Status::Warn);
        assert!(long.found.contains("a session begins with a frame of"));
    }

    #[test]
    fn memory_for_keys_is_told() {
        let told = |locked, swap| memory_told(KeyMemory { used: 32, len: 16 << 10, locked }, swap);
        assert_eq!(told(16 << 10, true).status, Status::Ok);
        assert_eq!(told(0, false).status, Status::Ok);
        let found = told(0, true);
        assert_eq!((found.status, found.needed_for), (Status::Warn, KEY));
        assert!(found.found.contains("swap") && found.mend.unwrap().contains("memlock"));
    }

    #[test]
    fn a_key_file_is_told_with_owner_mode_and_length() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, len: usize, mode: u32| -> PathBuf {
            let path = dir.path().join(name);
            std::fs::write(&path, vec![b'k'; len]).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let check = |key_files: Vec<PathBuf>| {
            files(&CredentialFiles { key_files, ..CredentialFiles::default() })
        };
        let good = put("good", 32, 0o600);
        let found = check(vec![good.clone(), dir.path().join("next")]);
        assert_eq!(found.status, Status::Ok);
        assert!(found.found.contains("mode 600, 32 bytes") && found.found.contains("next: none;"));
        assert!(found.found.contains("within this node are not sealed"), "{found:?}");
        let open = check(vec![good.clone(), put("open", 32, 0o644)]);
        assert_eq!((open.status, open.needed_for), (Status::Missing, KEY));
        assert!(open.mend.unwrap().starts_with("chmod 600"));
        let short = check(vec![put("short", 15, 0o600)]);
        assert!(short.found.contains("15 bytes"), "{short:?}");
        assert!(short.mend.unwrap().starts_with("head -c 32 /dev/urandom"));
        assert_eq!(check(vec![dir.path().join("none"), good.clone()]).status, Status::Missing);
        let empty = check(vec![PathBuf::new()]);
        assert!(empty.found.ends_with("is set and empty"), "{empty:?}");
        assert_eq!(empty.mend.unwrap(), "name a file, or unset it");
        assert!(check(vec![good.clone(), PathBuf::new()]).found.contains("between the colons"));
        assert!(check(vec![good; 5]).found.contains("4 keys at most"));
        assert!(check(Vec::new()).found.contains("not set"));
    }
}
