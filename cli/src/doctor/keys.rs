//! Checks of what sealed frames need: AES in hardware, and key files that a domain takes.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use barewire::key_file_len;
use nix::unistd::{Uid, User};

use super::machine::Machine;
use super::{Check, KEY, SPEED};

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

/// Whose the key files are, who may read them, and how long the keys are.
pub(super) fn files(machine: &Machine) -> Check {
    let name = "keys";
    if machine.key_files.is_empty() {
        let found = "BAREWIRE_KEY_FILE is not set: anybody on the wire can read and forge frames";
        return Check::ok(name, KEY, found);
    }
    let mut told = Vec::new();
    for (i, path) in machine.key_files.iter().enumerate() {
        let shown = path.display();
        // As a domain has it: all but the first may be missing, and nothing else may be wrong.
        let is_missing =
            || std::fs::metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound);
        if i > 0 && !path.as_os_str().is_empty() && is_missing() {
            told.push(format!("{shown}: none"));
            continue;
        }
        match key_file_len(path) {
            Ok(len) => told.push(format!("{shown}: {}, {len} bytes", owner(path))),
            Err(why) => {
                let new = format!("head -c 32 /dev/urandom > {shown} && chmod 600 {shown}");
                let mend = match why.line.rsplit_once("; ") {
                    Some((_, mend)) if mend.starts_with("chmod") => mend.to_owned(),
                    _ => format!("{new} (the same file on all nodes)"),
                };
                return Check::missing(name, KEY, why.line, mend);
            }
        }
    }
    Check::ok(name, KEY, told.join("; "))
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
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::super::Status;
    use super::super::machine::fixture::Fixture;
    use super::*;

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
    fn a_key_file_is_told_with_owner_mode_and_length() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, len: usize, mode: u32| -> PathBuf {
            let path = dir.path().join(name);
            std::fs::write(&path, vec![b'k'; len]).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let check = |key_files: Vec<PathBuf>| {
            let mut machine = Fixture::full().machine();
            machine.key_files = key_files;
            files(&machine)
        };
        let good = put("good", 32, 0o600);
        let found = check(vec![good.clone(), dir.path().join("next")]);
        assert_eq!(found.status, Status::Ok);
        assert!(found.found.contains("mode 600, 32 bytes") && found.found.ends_with("next: none"));
        let open = check(vec![good.clone(), put("open", 32, 0o644)]);
        assert_eq!((open.status, open.needed_for), (Status::Missing, KEY));
        assert!(open.mend.unwrap().starts_with("chmod 600"));
        let short = check(vec![put("short", 15, 0o600)]);
        assert!(short.found.contains("15 bytes"), "{short:?}");
        assert!(short.mend.unwrap().starts_with("head -c 32 /dev/urandom"));
        assert_eq!(check(vec![dir.path().join("none"), good]).status, Status::Missing);
        assert_eq!(check(vec![PathBuf::new()]).status, Status::Missing);
        assert!(check(Vec::new()).found.contains("not set"));
    }
}
