//! `barewire capture --keys`: decrypts sealed frames of a recording with the secrets of a key log.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire_dataplane::seal::{Read as ReadResult, RecordReader};

use crate::fail::Fail;
use crate::recording::{self, Recording};

/// Pause between two checks of the key log for more secrets.
const POLL_PERIOD: Duration = Duration::from_millis(50);

/// Longest accepted block or record of a recording, bytes.
const BLOCK_MAX: usize = 1 << 20;

/// Decrypts frames with the secrets of a key log, which may grow.
pub(crate) struct Decryptor {
    path: PathBuf,
    secrets: RecordReader,
    /// Bytes of the file that were read.
    read_len: u64,
    checked_at: Instant,
    /// A malformed line was reported.
    has_warned: bool,
    opened: u64,
    sealed: u64,
}

impl Decryptor {
    /// Opens a key log and reads its secrets.
    ///
    /// # Errors
    /// The file cannot be read, or has lines but no secret of a session.
    pub(crate) fn new(path: &Path) -> Result<Self, Fail> {
        let (path, secrets) = (path.to_owned(), RecordReader::default());
        let checked_at = Instant::now();
        let (read_len, has_warned, opened, sealed) = (0, false, 0, 0);
        let mut decryptor =
            Self { path, secrets, read_len, checked_at, has_warned, opened, sealed };
        decryptor.read()?;
        Ok(decryptor)
    }

    fn read(&mut self) -> Result<(), Fail> {
        let shown = self.path.display();
        let cannot = |e: io::Error| {
            let fail = Fail::new(format!("{shown}: {e}"));
            match e.kind() {
                io::ErrorKind::NotFound => fail.mend(format!(
                    "start one of the processes with BAREWIRE_KEY_LOG={shown}, which writes it"
                )),
                _ => fail.mend(format!("may this user read it? ls -l {shown}")),
            }
        };
        let mut text = String::new();
        self.checked_at = Instant::now();
        File::open(&self.path).and_then(|mut f| f.read_to_string(&mut text)).map_err(cannot)?;
        // The last line may be incomplete.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        self.read_len = text.len() as u64;
        let Err(line) = self.secrets.read(&text[..whole]) else { return Ok(()) };
        let what = format!("{shown}, line {line}: not the secret of a session");
        if self.secrets.is_empty() {
            return Err(Fail::new(what).mend("name a file that BAREWIRE_KEY_LOG has filled"));
        }
        // A process with a full disk may have left an incomplete line.
        if !std::mem::replace(&mut self.has_warned, true) {
            eprintln!("{what}; it is passed over");
        }
        Ok(())
    }

    /// Decrypts a sealed frame in place, if the key log has the secret of its session.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub(crate) fn open(&mut self, frame: &mut Vec<u8>) -> Result<(), Fail> {
        let mut seen = self.secrets.open(frame);
        if seen == ReadResult::Sealed && self.checked_at.elapsed() >= POLL_PERIOD {
            self.checked_at = Instant::now();
            if std::fs::metadata(&self.path).is_ok_and(|is| is.len() != self.read_len) {
                self.read()?;
                seen = self.secrets.open(frame);
            }
        }
        self.opened += u64::from(seen == ReadResult::Opened);
        self.sealed += u64::from(seen == ReadResult::Sealed);
        Ok(())
    }

    /// The numbers of decrypted and of sealed frames.
    pub(crate) fn summary(&self) -> String {
        format!("{} opened, {} stay sealed", self.opened, self.sealed)
    }
}

/// Copies the recording `from` to `to` with its sealed frames decrypted: a pcapng or pcap file in
/// the byte order of this machine. Everything else is copied unchanged.
///
/// # Errors
/// `from` cannot be read or is no such file, or `to` cannot be written.
pub(crate) fn copy(from: &Path, to: &Path, decryptor: &mut Decryptor) -> Result<ExitCode, Fail> {
    let input = File::open(from).map_err(|e| Fail::new(format!("{}: {e}", from.display())))?;
    if is_same_file(&input, to) {
        let shown = to.display();
        return Err(Fail::new(format!("{shown}: is what is read; write to another file")));
    }
    let (mut input, mut magic) = (BufReader::new(input), [0; 4]);
    let shown = from.display();
    let broken = |e: io::Error| Fail::new(format!("{shown}: {e}"));
    input.read_exact(&mut magic).map_err(broken)?;
    let unwritten = |why: io::Error| recording::fail(to, &why);
    let output = Recording::create(to, None).map_err(unwritten)?;
    let mut output = BufWriter::new(output);
    let mut frames = 0;
    match u32::from_le_bytes(magic) {
        0x0a0d_0d0a => copy_blocks(magic, &mut input, &mut output, decryptor, &mut frames),
        0xa1b2_c3d4 | 0xa1b2_3c4d => {
            copy_records(magic, &mut input, &mut output, decryptor, &mut frames)
        }
        _ => {
            let what = format!("{shown}: neither pcapng nor pcap in this machine's byte order");
            return Err(Fail::new(what));
        }
    }
    .map_err(|why| match why {
        CopyError::Read(e) => broken(e),
        CopyError::Write(e) => unwritten(e),
        CopyError::Fail(fail) => fail,
    })?;
    output.flush().map_err(unwritten)?;
    eprintln!("{frames} frames, {}", decryptor.summary());
    Ok(ExitCode::SUCCESS)
}

/// Why a recording was not copied.
enum CopyError {
    Read(io::Error),
    Write(io::Error),
    Fail(Fail),
}

impl From<io::Error> for CopyError {
    fn from(e: io::Error) -> Self {
        Self::Read(e)
    }
}

impl From<Fail> for CopyError {
    fn from(fail: Fail) -> Self {
        Self::Fail(fail)
    }
}

/// Whether `other` is the open file, by whatever name.
fn is_same_file(file: &File, other: &Path) -> bool {
    let id = |is: std::fs::Metadata| (is.dev(), is.ino());
    let other = std::fs::metadata(other).map(id);
    file.metadata().map(id).ok().is_some_and(|own| other.is_ok_and(|other| own == other))
}

/// Copies the blocks of a pcapng file, whose first four bytes were read. Source:
/// draft-ietf-opsawg-pcapng, section 4.3 (Enhanced Packet Block).
fn copy_blocks(
    first: [u8; 4],
    input: &mut impl Read,
    output: &mut impl Write,
    decryptor: &mut Decryptor,
    frames: &mut u64,
) -> Result<(), CopyError> {
    let mut next = Some(first);
    while let Some(kind) = next {
        let mut len = [0; 4];
        input.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if !(12..=BLOCK_MAX).contains(&len) || !len.is_multiple_of(4) {
            return Err(
                invalid_data("a block of an impossible length, or of another byte order").into()
            );
        }
        let mut body = vec![0; len - 8];
        input.read_exact(&mut body)?;
        body.truncate(len - 12);
        if u32::from_le_bytes(kind) == 6 {
            *frames += 1;
            open_packet(&mut body, decryptor)?;
        }
        let len = (body.len() + 12) as u32;
        for part in [&kind[..], &len.to_le_bytes(), &body, &len.to_le_bytes()] {
            output.write_all(part).map_err(CopyError::Write)?;
        }
        next = word_or_end(input)?;
    }
    Ok(())
}

/// Decrypts the frame of a packet block: interface, time (8 bytes), captured and original length,
/// the frame, padding to four bytes, options.
fn open_packet(body: &mut Vec<u8>, decryptor: &mut Decryptor) -> Result<(), CopyError> {
    const HEAD: usize = 20;
    if body.len() < HEAD {
        return Err(invalid_data("a packet block without a head").into());
    }
    let [len, whole] = [word(body, 12), word(body, 16)];
    let end = HEAD + len.next_multiple_of(4);
    if end > body.len() {
        return Err(invalid_data("a packet that is longer than its block").into());
    }
    if len != whole {
        return Ok(());
    }
    let mut frame = body[HEAD..HEAD + len].to_vec();
    decryptor.open(&mut frame)?;
    let len = (frame.len() as u32).to_le_bytes();
    body[12..16].copy_from_slice(&len);
    body[16..HEAD].copy_from_slice(&len);
    frame.resize(frame.len().next_multiple_of(4), 0);
    body.splice(HEAD..end, frame);
    Ok(())
}

/// Copies the records of a pcap file, whose magic number was read. Source: draft-ietf-opsawg-pcap.
fn copy_records(
    magic: [u8; 4],
    input: &mut impl Read,
    output: &mut impl Write,
    decryptor: &mut Decryptor,
    frames: &mut u64,
) -> Result<(), CopyError> {
    let mut head = [0; 20];
    input.read_exact(&mut head)?;
    output.write_all(&magic).map_err(CopyError::Write)?;
    output.write_all(&head).map_err(CopyError::Write)?;
    while let Some(seconds) = word_or_end(input)? {
        let mut rest = [0; 12];
        input.read_exact(&mut rest)?;
        let [len, whole] = [word(&rest, 4), word(&rest, 8)];
        if len > BLOCK_MAX {
            return Err(invalid_data("a record of an impossible length").into());
        }
        let mut frame = vec![0; len];
        input.read_exact(&mut frame)?;
        *frames += 1;
        if len == whole {
            decryptor.open(&mut frame)?;
            let len = (frame.len() as u32).to_le_bytes();
            rest[4..8].copy_from_slice(&len);
            rest[8..].copy_from_slice(&len);
        }
        for part in [&seconds[..], &rest, &frame] {
            output.write_all(part).map_err(CopyError::Write)?;
        }
    }
    Ok(())
}

/// The next four bytes, `None` at the end.
fn word_or_end(input: &mut impl Read) -> io::Result<Option<[u8; 4]>> {
    let mut word = [0; 4];
    match input.read(&mut word[..1])? {
        0 => Ok(None),
        _ => input.read_exact(&mut word[1..]).map(|()| Some(word)),
    }
}

fn word(bytes: &[u8], at: usize) -> usize {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word) as usize
}

fn invalid_data(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
