//! `barewire capture --keys`: sealed frames as what was sealed, for who may read them.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire_dataplane::seal::{Read as Seen, RecordReader};

use crate::fail::Fail;
use crate::recording::{self, Recording};

/// Pause between two looks whether there are more secrets.
const LOOK: Duration = Duration::from_millis(50);

/// The longest block or record of a recording that is believed.
const BLOCK_MAX: usize = 1 << 20;

/// The secrets of a file, which may grow, and what they have opened.
pub(crate) struct Opener {
    path: PathBuf,
    secrets: RecordReader,
    /// Bytes of the file that were read, and when.
    read_len: u64,
    looked: Instant,
    /// A line that is none was told.
    has_told: bool,
    opened: u64,
    sealed: u64,
}

impl Opener {
    /// Reads the secrets that are there.
    ///
    /// # Errors
    /// The file cannot be read, or has lines and none is a session's secret.
    pub(crate) fn new(path: &Path) -> Result<Self, Fail> {
        let (path, secrets) = (path.to_owned(), RecordReader::default());
        let looked = Instant::now();
        let (read_len, has_told, opened, sealed) = (0, false, 0, 0);
        let mut opener = Self { path, secrets, read_len, looked, has_told, opened, sealed };
        opener.read()?;
        Ok(opener)
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
        self.looked = Instant::now();
        File::open(&self.path).and_then(|mut f| f.read_to_string(&mut text)).map_err(cannot)?;
        // The last line may be half written.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        self.read_len = text.len() as u64;
        let Err(line) = self.secrets.read(&text[..whole]) else { return Ok(()) };
        let what = format!("{shown}, line {line}: not the secret of a session");
        if self.secrets.is_empty() {
            return Err(Fail::new(what).mend("name a file that BAREWIRE_KEY_LOG has filled"));
        }
        // A process whose disk was full has left half a line.
        if !std::mem::replace(&mut self.has_told, true) {
            eprintln!("{what}; it is passed over");
        }
        Ok(())
    }

    /// Makes a sealed frame what was sealed, if its session's secret is there by now.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub(crate) fn open(&mut self, frame: &mut Vec<u8>) -> Result<(), Fail> {
        let mut seen = self.secrets.open(frame);
        if seen == Seen::Sealed && self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            if std::fs::metadata(&self.path).is_ok_and(|is| is.len() != self.read_len) {
                self.read()?;
                seen = self.secrets.open(frame);
            }
        }
        self.opened += u64::from(seen == Seen::Opened);
        self.sealed += u64::from(seen == Seen::Sealed);
        Ok(())
    }

    /// What has become of the frames.
    pub(crate) fn summary(&self) -> String {
        format!("{} opened, {} stay sealed", self.opened, self.sealed)
    }
}

/// Copies the recording `from` to `to` with its sealed frames opened: a file of pcapng or pcap, in
/// the byte order of this machine. Everything else of it stays as it is.
///
/// # Errors
/// `from` cannot be read or is no such file, or `to` cannot be written.
pub(crate) fn copy(from: &Path, to: &Path, opener: &mut Opener) -> Result<ExitCode, Fail> {
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
        0x0a0d_0d0a => copy_blocks(magic, &mut input, &mut output, opener, &mut frames),
        0xa1b2_c3d4 | 0xa1b2_3c4d => {
            copy_records(magic, &mut input, &mut output, opener, &mut frames)
        }
        _ => {
            let what = format!("{shown}: neither pcapng nor pcap in this machine's byte order");
            return Err(Fail::new(what));
        }
    }
    .map_err(|why| match why {
        Broken::Read(e) => broken(e),
        Broken::Written(e) => unwritten(e),
        Broken::Fail(fail) => fail,
    })?;
    output.flush().map_err(unwritten)?;
    eprintln!("{frames} frames, {}", opener.summary());
    Ok(ExitCode::SUCCESS)
}

/// Why a recording is not copied.
enum Broken {
    Read(io::Error),
    Written(io::Error),
    Fail(Fail),
}

impl From<io::Error> for Broken {
    fn from(e: io::Error) -> Self {
        Self::Read(e)
    }
}

impl From<Fail> for Broken {
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

/// The blocks of pcapng, of which the first four bytes were read. Source:
/// draft-ietf-opsawg-pcapng, section 4.3 (Enhanced Packet Block).
fn copy_blocks(
    first: [u8; 4],
    input: &mut impl Read,
    output: &mut impl Write,
    opener: &mut Opener,
    frames: &mut u64,
) -> Result<(), Broken> {
    let mut next = Some(first);
    while let Some(kind) = next {
        let mut len = [0; 4];
        input.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if !(12..=BLOCK_MAX).contains(&len) || !len.is_multiple_of(4) {
            return Err(broken("a block of an impossible length, or of another byte order").into());
        }
        let mut body = vec![0; len - 8];
        input.read_exact(&mut body)?;
        body.truncate(len - 12);
        if u32::from_le_bytes(kind) == 6 {
            *frames += 1;
            open_packet(&mut body, opener)?;
        }
        let len = (body.len() + 12) as u32;
        for part in [&kind[..], &len.to_le_bytes(), &body, &len.to_le_bytes()] {
            output.write_all(part).map_err(Broken::Written)?;
        }
        next = word_or_end(input)?;
    }
    Ok(())
}

/// Opens the frame of a packet block: interface, time (8 bytes), length here and on the wire, the
/// frame, padding to four bytes, options.
fn open_packet(body: &mut Vec<u8>, opener: &mut Opener) -> Result<(), Broken> {
    const HEAD: usize = 20;
    if body.len() < HEAD {
        return Err(broken("a packet block without a head").into());
    }
    let [len, whole] = [word(body, 12), word(body, 16)];
    let end = HEAD + len.next_multiple_of(4);
    if end > body.len() {
        return Err(broken("a packet that is longer than its block").into());
    }
    if len != whole {
        return Ok(());
    }
    let mut frame = body[HEAD..HEAD + len].to_vec();
    opener.open(&mut frame)?;
    let len = (frame.len() as u32).to_le_bytes();
    body[12..16].copy_from_slice(&len);
    body[16..HEAD].copy_from_slice(&len);
    frame.resize(frame.len().next_multiple_of(4), 0);
    body.splice(HEAD..end, frame);
    Ok(())
}

/// The records of pcap, of which the magic number was read. Source: draft-ietf-opsawg-pcap.
fn copy_records(
    magic: [u8; 4],
    input: &mut impl Read,
    output: &mut impl Write,
    opener: &mut Opener,
    frames: &mut u64,
) -> Result<(), Broken> {
    let mut head = [0; 20];
    input.read_exact(&mut head)?;
    output.write_all(&magic).map_err(Broken::Written)?;
    output.write_all(&head).map_err(Broken::Written)?;
    while let Some(seconds) = word_or_end(input)? {
        let mut rest = [0; 12];
        input.read_exact(&mut rest)?;
        let [len, whole] = [word(&rest, 4), word(&rest, 8)];
        if len > BLOCK_MAX {
            return Err(broken("a record of an impossible length").into());
        }
        let mut frame = vec![0; len];
        input.read_exact(&mut frame)?;
        *frames += 1;
        if len == whole {
            opener.open(&mut frame)?;
            let len = (frame.len() as u32).to_le_bytes();
            rest[4..8].copy_from_slice(&len);
            rest[8..].copy_from_slice(&len);
        }
        for part in [&seconds[..], &rest, &frame] {
            output.write_all(part).map_err(Broken::Written)?;
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

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
