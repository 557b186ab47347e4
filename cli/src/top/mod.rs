//! `barewire top`: a live screen of processes, peers and switches.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire::stats::Published;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::capture::signals;
use crate::fail::Fail;
use crate::out;
use crate::stats::{published, since_1970_ns, tell_unread};

mod model;
mod view;

use model::{Filter, Model, Sort};

/// Shows live the processes, peers and switches of this node, and what waits for what
///
/// The upper part lists switches and processes, the lower part the peers of all processes or of the
/// selected one. The last line but one shows the most severe cause of waiting. Rates are per
/// second. Root sees the processes of all users.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  ended by q, Ctrl-C or a signal
  1  the counters cannot be read, or the terminal cannot be used

Examples:
  barewire top
  barewire top --once --sort resent    one screen of the rates of one second, for a file or a pipe
  barewire top --filter 4711           peers of one process

Keys:
  up, down, j, k  select a process             Esc     all peers
  s               sort by the next column      w       only peers that something waits for
  /               filter lines by text         space   pause, and continue
  PgUp, PgDn      more peers                   q       quit

Columns:
  OPS/S    messages and one-sided operations, both ways
  TX, RX   bytes of frames per second; `-` where they are not counted
  PEERS    peers of a domain
  WAITING  operations of a domain that wait, and what most of them wait for
  OUT, IN  frames per second that a switch sent to its NIC, and received from it
  LOCAL/S  frames per second from one process behind a switch to another
  DROPS/S  frames per second that a switch dropped: `barewire stats` says why
  B/S      bytes per second through a switch
  STATIONS processes behind a switch, or the time since it last ran
  RESENT   packets retransmitted per second
  PATH     near: a process of this node, by memory; far: any other
  FLIGHT   packets in flight, and the window; 4k are 4,000 to 4,999
  WAITS    operations that wait, and for what: see `barewire stats --help`
Wide terminals have more, narrow ones fewer; * stands for a number that does not fit.
`barewire stats --json` is for programs.")]
pub(crate) struct TopArgs {
    /// Seconds between updates, 0.1 to 3600.
    #[arg(long, default_value_t = 1.0)]
    interval: f64,
    /// Prints one screen and exits; the default if standard output is not a terminal.
    #[arg(long)]
    once: bool,
    /// Sorts peers by this column, the largest first.
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t)]
    sort: Sort,
    /// Only peers with this text in process, port, address, path, state or cause.
    #[arg(long, default_value = "", value_name = "TEXT")]
    filter: String,
    /// Only peers that an operation waits for.
    #[arg(long)]
    waiting: bool,
    /// Only domains and switches of this process.
    #[arg(long)]
    pid: Option<u32>,
}

/// Input mode of the keyboard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum InputMode {
    #[default]
    Nothing,
    Filter,
}

/// Selection, sorting and filter of the user.
#[derive(Debug, Default)]
struct State {
    wanted: Filter,
    /// File of the selected domain, whose peers alone are shown.
    selected: Option<PathBuf>,
    /// Index of the selected domain.
    selected_at: usize,
    /// Number of peers scrolled out above.
    scrolled: usize,
    paused: bool,
    typing: InputMode,
    ended: bool,
}

impl State {
    /// Index of the first domain to show in `height` lines, one of them the header.
    fn first_domain(&self, height: u16) -> usize {
        (self.selected_at + 2).saturating_sub(height.into())
    }

    fn key(&mut self, key: KeyEvent, domains: &[PathBuf]) {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            self.ended = true;
            return;
        }
        if self.typing == InputMode::Filter {
            return self.type_filter(key.code);
        }
        match key.code {
            KeyCode::Char('q') => self.ended = true,
            KeyCode::Char('s') => self.wanted.sort = self.wanted.sort.next(),
            KeyCode::Char('w') => self.wanted.waiting = !self.wanted.waiting,
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Char('/') => self.typing = InputMode::Filter,
            KeyCode::Esc => self.select(None),
            KeyCode::Down | KeyCode::Char('j') => {
                self.step(domains, |at| at.map_or(0, |at| at + 1))
            }
            KeyCode::Up | KeyCode::Char('k') => {
                self.step(domains, |at| at.map_or(usize::MAX, |at| at.saturating_sub(1)));
            }
            KeyCode::PageDown => self.scrolled += 10,
            KeyCode::PageUp => self.scrolled = self.scrolled.saturating_sub(10),
            _ => {}
        }
    }

    fn type_filter(&mut self, code: KeyCode) {
        let filter = &mut self.wanted.filter;
        match code {
            KeyCode::Enter => self.typing = InputMode::Nothing,
            KeyCode::Esc => {
                filter.clear();
                self.typing = InputMode::Nothing;
            }
            KeyCode::Backspace => drop(filter.pop()),
            KeyCode::Char(c) => filter.push(c),
            _ => {}
        }
        self.scrolled = 0;
    }

    /// Moves the selection by `next`.
    fn step(&mut self, domains: &[PathBuf], next: impl Fn(Option<usize>) -> usize) {
        let at = self.selected.as_ref().and_then(|path| domains.iter().position(|d| d == path));
        let at = next(at).min(domains.len().saturating_sub(1));
        self.selected_at = at;
        self.select(domains.get(at).cloned());
    }

    fn select(&mut self, domain: Option<PathBuf>) {
        if domain.is_none() {
            self.selected_at = 0;
        }
        self.selected = domain;
        self.scrolled = 0;
    }

    /// The model of two snapshots.
    fn model(&mut self, [before, now]: &[Published; 2], now_ns: u64) -> Model {
        let mut model = Model::new(before, now, now_ns, &self.wanted);
        let is_there = |path: &PathBuf| model.domains.iter().any(|d| d.path == *path);
        if self.selected.as_ref().is_some_and(|path| !is_there(path)) {
            self.select(None);
        }
        if let Some(path) = &self.selected {
            model.only(path);
        }
        self.scrolled = self.scrolled.min(model.peers.len());
        model
    }
}

/// Shows the screen until the user ends it, or once.
///
/// # Errors
/// The counters cannot be read, or the terminal cannot be used.
pub(crate) fn run(args: &TopArgs) -> Result<ExitCode, Fail> {
    if !(0.1..=3600.0).contains(&args.interval) {
        return Err(Fail::usage("--interval: expected 0.1 to 3600 seconds"));
    }
    let (sort, filter, waiting) = (args.sort, args.filter.clone(), args.waiting);
    let state = State { wanted: Filter { sort, filter, waiting }, ..State::default() };
    if args.once || !std::io::stdout().is_terminal() {
        return once(args, state);
    }
    let signals = signals()?;
    let unusable = |why: std::io::Error| Fail::new(format!("the terminal: {why}"));
    let mut terminal = ratatui::try_init().map_err(unusable)?;
    let ended = live(args, state, |looks, state, wait| {
        if signals.read_signal().map_err(Fail::new)?.is_some() {
            state.ended = true;
        }
        let model = state.model(looks, since_1970_ns());
        terminal.draw(|frame| view::draw(frame, &model, state)).map_err(unusable)?;
        let domains: Vec<PathBuf> = model.domains.into_iter().map(|d| d.path).collect();
        if event::poll(wait).map_err(unusable)?
            && let Event::Key(key) = event::read().map_err(unusable)?
            && key.kind == KeyEventKind::Press
        {
            state.key(key, &domains);
        }
        Ok(())
    });
    ratatui::restore();
    ended.map(|()| ExitCode::SUCCESS)
}

/// Longest wait for a key, after which signals are checked.
const LOOK: Duration = Duration::from_millis(200);

/// Reads the statistics once an interval; `turn` shows them and waits for a key, at most until the
/// next read.
fn live(
    args: &TopArgs,
    mut state: State,
    mut turn: impl FnMut(&[Published; 2], &mut State, Duration) -> Result<(), Fail>,
) -> Result<(), Fail> {
    let interval = Duration::from_secs_f64(args.interval);
    let first = published(args.pid)?;
    let mut looks = [first.clone(), first];
    // A short first interval, so that rates appear soon.
    let mut due = Instant::now() + interval.min(LOOK);
    while !state.ended {
        let now = Instant::now();
        if now >= due && !state.paused {
            due = now + interval;
            looks.swap(0, 1);
            looks[1] = published(args.pid)?;
        }
        // No read is due while the screen is paused.
        let left = if state.paused { LOOK } else { due.saturating_duration_since(now) };
        turn(&looks, &mut state, left.clamp(Duration::from_millis(1), LOOK))?;
    }
    Ok(())
}

/// Columns of a screen that is no terminal.
const WIDTH: u16 = 80;

/// Prints one screen after one interval.
fn once(args: &TopArgs, mut state: State) -> Result<ExitCode, Fail> {
    let before = published(args.pid)?;
    tell_unread(&before);
    std::thread::sleep(Duration::from_secs_f64(args.interval));
    let looks = [before, published(args.pid)?];
    let model = state.model(&looks, since_1970_ns());
    let size = ratatui::crossterm::terminal::size();
    // A serial line reports 0 columns.
    let is_known = |&(width, _): &(u16, u16)| width > 0 && std::io::stdout().is_terminal();
    let width = size.ok().filter(is_known).map_or(WIDTH, |(width, _)| width);
    out::print(screen(&model, &state, (width, view::height(&model))))?;
    Ok(ExitCode::SUCCESS)
}

/// A screen as text.
fn screen(model: &Model, state: &State, (width, height): (u16, u16)) -> String {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(drawn) = terminal.draw(|frame| view::draw(frame, model, state));
    view::text(drawn.buffer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    const SECOND: u64 = 1_000_000_000;

    fn looks(peers: u8) -> [Published; 2] {
        let look = |at| {
            let mut domain = sample::domain(12, at);
            domain.sessions = (1..=peers).map(sample::session).collect();
            let domains = vec![domain, sample::domain(4_194_304, at)];
            Published { domains, switches: vec![sample::switch(14, at)], unread: Vec::new() }
        };
        [look(SECOND), look(2 * SECOND)]
    }

    fn shown(state: &mut State, peers: u8, size: (u16, u16)) -> String {
        let model = state.model(&looks(peers), 2 * SECOND);
        screen(&model, state, size)
    }

    fn press(state: &mut State, codes: &[KeyCode]) {
        let domains: Vec<PathBuf> = looks(1)[1].domains.iter().map(|d| d.path.clone()).collect();
        codes.iter().for_each(|&code| state.key(KeyEvent::from(code), &domains));
    }

    #[test]
    fn a_screen_of_80_by_24_has_all_its_parts() {
        let screen = shown(&mut State::default(), 60, (80, 24));
        let lines: Vec<&str> = screen.lines().collect();
        assert_eq!(lines.len(), 24);
        assert_eq!(lines[0], "barewire top - 2 domains, 61 peers, by waiting");
        assert!(lines[1].ends_with("DROPS/S   B/S STATIONS"), "{screen}");
        assert!(lines[2].starts_with("     14 vfio:0000:05:00.0") && lines[2].ends_with(" 0 1"));
        assert!(lines[3].contains("PID PORT") && lines[3].ends_with("FOR"), "{screen}");
        assert!(lines[4].starts_with("     12 afpacket:eth0"), "{screen}");
        assert!(lines[5].starts_with("4194304 ") && lines[5].contains(" 2 credit"), "{screen}");
        assert!(lines[6].ends_with("WAITS FOR"), "{screen}");
        let row = "     12 02:00:00:00:00:01       far      0     -      0  1.5us    1/32 2 credit";
        assert_eq!(lines[7], row);
        assert_eq!(lines[22], "122 wait, credit: the peer lacks memory; it has posted no receives");
        assert!(lines[23].starts_with("q quit"), "{screen}");
    }

    #[test]
    fn a_wide_screen_has_more_columns_and_a_small_one_is_no_panic() {
        let wide = shown(&mut State::default(), 3, (160, 24));
        for name in ["STATE", "RTO", "HEARD", "CREDITS", "FRAME", "2.00ms", "1.5 s"] {
            assert!(wide.contains(name), "{name}\n{wide}");
        }
        for size in [(1, 1), (10, 3), (80, 5)] {
            shown(&mut State::default(), 3, size);
        }
    }

    /// Goal: a number stands there whole or not at all, however narrow the screen and however large
    /// the number. Method: figures of many digits, each of them a 7, on every width: a number that
    /// has lost its first digits is none of those that a wide screen has.
    #[test]
    fn a_number_is_whole_or_not_there() {
        let mut looks = looks(1);
        for look in &mut looks {
            let row = &mut look.domains[0].sessions[0];
            (row.in_flight, row.window, row.waiting) = (777, 4096, 77_777);
            (row.srtt_ns, row.rto_ns, row.silent_ns) = (9_996_000, 99_960, 7_777_000_000_000);
            (row.credits, row.frame_max) = (77_777_777, 777_777);
        }
        let shown = |width| {
            let model = State::default().model(&looks, 2 * SECOND);
            let text = screen(&model, &State::default(), (width, 24));
            // The titles and the last two lines are words.
            text.lines().skip(1).take(21).map(str::to_owned).collect::<Vec<_>>()
        };
        let wide = shown(200).join(" ");
        let words: Vec<&str> = wide.split_whitespace().collect();
        assert!(words.contains(&"777/4k") && words.contains(&"10ms"), "{wide}");
        assert!(words.contains(&"129") && words.contains(&"*******"), "{wide}");
        for width in 1..160 {
            for line in shown(width) {
                // A word at the end of a line may be cut short, and a MAC.
                let whole = line.split_whitespace().collect::<Vec<_>>();
                let numbers =
                    whole.iter().filter(|word| word.starts_with(|c: char| c.is_ascii_digit()));
                let cut = numbers.filter(|word| !words.contains(word) && !word.contains(':'));
                let cut: Vec<_> = cut.collect();
                assert!(cut.is_empty(), "{width}: {cut:?} in {line:?}");
            }
        }
    }

    #[test]
    fn keys_select_sort_filter_and_end() {
        let mut state = State::default();
        press(&mut state, &[KeyCode::Down, KeyCode::Down, KeyCode::Down]);
        let one = shown(&mut state, 60, (80, 24));
        assert!(one.starts_with("barewire top - 2 domains, 1 peer of one"), "{one}");
        press(&mut state, &[KeyCode::Esc, KeyCode::Char('s'), KeyCode::Char('w')]);
        let all = shown(&mut state, 60, (80, 24));
        assert!(
            all.starts_with("barewire top - 2 domains, 61 peers, by tx, waiting only"),
            "{all}"
        );
        press(&mut state, &"/00:0a".chars().map(KeyCode::Char).collect::<Vec<_>>());
        assert!(shown(&mut state, 60, (80, 24)).contains("filter: 00:0a_"));
        press(&mut state, &[KeyCode::Enter]);
        assert!(shown(&mut state, 60, (80, 24)).contains(" 1 peer, by tx, waiting only, with"));
        assert!(!state.ended);
        press(&mut state, &[KeyCode::Char('q')]);
        assert!(state.ended);
    }

    /// Goal: the last peer can be reached, and to go on behind it is no harm.
    #[test]
    fn peers_scroll_to_their_end() {
        let mut state = State::default();
        assert!(!shown(&mut state, 60, (80, 24)).contains("02:00:00:00:00:3c"));
        press(&mut state, &[KeyCode::PageDown; 20]);
        assert!(shown(&mut state, 60, (80, 24)).contains("02:00:00:00:00:3c"));
        press(&mut state, &[KeyCode::PageUp; 20]);
        assert!(shown(&mut state, 60, (80, 24)).contains("02:00:00:00:00:01"));
    }

    /// Goal: a screen that is paused costs no processor time. Method: the waits that it asks for,
    /// before, in and after a pause that is longer than the interval.
    #[test]
    fn a_paused_screen_waits() {
        use clap::Parser;
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: TopArgs,
        }
        let args = Line::try_parse_from(["top", "--interval", "0.1"]).unwrap().args;
        let mut waits = Vec::new();
        live(&args, State::default(), |_, state, wait| {
            waits.push((state.paused, wait));
            std::thread::sleep(wait.min(Duration::from_millis(50)));
            state.paused = (4..12).contains(&waits.len());
            state.ended = waits.len() == 16;
            Ok(())
        })
        .unwrap();
        assert!(waits.iter().all(|&(paused, wait)| !paused || wait == LOOK), "{waits:?}");
        assert!(waits.iter().any(|&(paused, wait)| !paused && wait < LOOK), "{waits:?}");
    }

    /// Goal: where a selected process ends all are shown again.
    #[test]
    fn a_selection_ends_with_its_process() {
        let mut state = State { selected: Some("gone".into()), ..State::default() };
        assert!(
            shown(&mut state, 2, (80, 24)).starts_with("barewire top - 2 domains, 3 peers, by")
        );
        assert_eq!(state.selected, None);
    }
}
