//! Writes an archive in the format that the kernel unpacks at boot ("newc" cpio).
//!
//! Everything belongs to root. The kernel creates no folder that the archive does not contain, so
//! the parent folders of a file are written before it.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// An archive that is being written.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    inode: u32,
    seen: BTreeSet<String>,
}

const DIR: u32 = 0o040_000;
const FILE: u32 = 0o100_000;

impl Archive {
    /// Adds an empty folder, and those above it, with mode 755.
    pub(crate) fn dir(&mut self, path: &str) {
        self.dir_with(path, 0o755);
    }

    /// Adds an empty folder with a mode of its own.
    pub(crate) fn dir_with(&mut self, path: &str, mode: u32) {
        let path = path.trim_matches('/');
        if path.is_empty() || self.seen.contains(path) {
            return;
        }
        if let Some((above, _)) = path.rsplit_once('/') {
            self.dir(above);
        }
        self.entry(path, DIR | mode, &[]);
    }

    /// Adds a file, unless the archive has it already.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        let path = path.trim_matches('/');
        if self.seen.contains(path) {
            return;
        }
        if let Some((above, _)) = path.rsplit_once('/') {
            self.dir(above);
        }
        self.entry(path, FILE | mode, content);
    }

    /// Adds a copy of the host's file `from`, with its mode.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn copy(&mut self, from: &Path, to: &str) -> Result<(), String> {
        let failed = |why| format!("{}: {why}", from.display());
        let content = std::fs::read(from).map_err(failed)?;
        let mode = std::fs::metadata(from).map_err(failed)?.permissions().mode();
        self.file(to, mode & 0o777 | 0o444, &content);
        Ok(())
    }

    /// The whole archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        self.seen.insert(path.to_owned());
        let links = if mode & DIR != 0 { 2 } else { 1 };
        let len = content.len() as u32;
        let name_len = path.len() as u32 + 1;
        self.bytes.extend_from_slice(b"070701");
        // Inode, mode, owner, group, links, time, length, four device numbers, name, no checksum.
        let fields = [self.inode, mode, 0, 0, links, 0, len, 0, 0, 0, 0, name_len, 0];
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the kernel's reader finds every entry. Method: a reader of our own, by the format's
    /// description.
    #[test]
    fn every_entry_is_found_again_after_its_folders() {
        let mut archive = Archive::default();
        archive.file("a/b/c", 0o644, b"hello");
        archive.file("/a/b/c", 0o600, b"twice");
        archive.dir_with("tmp", 0o1777);
        archive.file("init", 0o755, b"");
        let bytes = archive.finish();
        let mut found = Vec::new();
        let mut at = 0;
        loop {
            let field = |n: usize| {
                let hex = std::str::from_utf8(&bytes[at + 6 + 8 * n..at + 14 + 8 * n]).unwrap();
                u32::from_str_radix(hex, 16).unwrap() as usize
            };
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (mode, len, name_len) = (field(1), field(6), field(11));
            let name = String::from_utf8(bytes[at + 110..at + 110 + name_len - 1].into()).unwrap();
            let data = (at + 110 + name_len).next_multiple_of(4);
            if name == "TRAILER!!!" {
                break;
            }
            found.push((name, mode, bytes[data..data + len].to_vec()));
            at = (data + len).next_multiple_of(4);
        }
        let expected: [(&str, usize, &[u8]); 5] = [
            ("a", 0o040_755, b""),
            ("a/b", 0o040_755, b""),
            ("a/b/c", 0o100_644, b"hello"),
            ("tmp", 0o041_777, b""),
            ("init", 0o100_755, b""),
        ];
        let expected = expected.map(|(name, mode, data)| (name.to_owned(), mode, data.to_vec()));
        assert_eq!(found, expected);
    }
}
