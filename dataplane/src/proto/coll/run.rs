//! The interpreter of a schedule: the next action, and what it waits for.
//!
//! The driver takes [`Action`]s one by one with [`Run::action`], calls [`Run::done`] for each that
//! it has executed, and reports receives and sends that have ended. The interpreter holds none of
//! the call's memory, so a simulation can drive it with only a clock.

use super::plan::WINDOW;
use super::program::Program;
use super::{Comm, Local, Round};

/// The next action of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Post a receive.
    Recv(Comm),
    /// Post a send. Its end is reported with this number of the round.
    Send(Comm, u32),
    /// Compute.
    Local(Local),
    /// Wait until a message ends.
    Wait,
    /// The call has ended at this member.
    Done,
}

/// A schedule in progress.
#[derive(Clone, Debug)]
pub struct Run {
    program: Program,
    round: Round,
    number: u32,
    stage: Stage,
    /// Index of the next element in the list of the stage.
    at: usize,
    /// Receives in progress: of this round, and of free rounds before it.
    recvs: u32,
    /// Sends in progress: of this round, of the previous one, of older ones.
    sends: [u32; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Before,
    Recvs,
    Sends,
    After,
    Last,
}

impl Run {
    /// Begins a schedule.
    pub fn new(program: Program) -> Self {
        let mut run = Self {
            program,
            round: Round::default(),
            number: 0,
            stage: Stage::Before,
            at: 0,
            recvs: 0,
            sends: [0; 3],
        };
        run.advance(0);
        run
    }

    /// Starts another schedule in the memory of one that has ended or was abandoned.
    pub fn restart(&mut self, program: Program) {
        self.program = program;
        (self.recvs, self.sends) = (0, [0; 3]);
        self.advance(0);
    }

    /// The schedule.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The next action; the same again until [`done`](Self::done) is called or a message ends.
    pub fn action(&mut self) -> Action {
        loop {
            match self.stage {
                // Memory that the older sends read may be written from here on.
                Stage::Before if self.sends[2] > 0 => return Action::Wait,
                Stage::Before => match self.round.before.get(self.at) {
                    Some(&local) => return Action::Local(local),
                    None => self.enter(Stage::Recvs),
                },
                Stage::Recvs => match self.round.recvs.get(self.at) {
                    Some(&comm) => return Action::Recv(comm),
                    None => self.enter(Stage::Sends),
                },
                Stage::Sends => match self.round.sends.get(self.at) {
                    Some(&comm) => return Action::Send(comm, self.number),
                    None => self.enter(Stage::After),
                },
                Stage::After if self.recvs > self.recvs_allowed() => return Action::Wait,
                Stage::After => match self.round.after.get(self.at) {
                    Some(_) if self.sends[1] + self.sends[2] > 0 => return Action::Wait,
                    Some(&local) => return Action::Local(local),
                    None => self.advance(self.number + 1),
                },
                Stage::Last if self.recvs > 0 || self.sends != [0; 3] => return Action::Wait,
                Stage::Last => return Action::Done,
            }
        }
    }

    /// Maximum receives that may be in progress when the next round begins.
    fn recvs_allowed(&self) -> u32 {
        if self.round.free { WINDOW } else { 0 }
    }

    /// Reports that the last [`action`](Self::action) was executed.
    pub fn done(&mut self) {
        match self.stage {
            Stage::Recvs => self.recvs += 1,
            Stage::Sends => self.sends[0] += 1,
            Stage::Before | Stage::After | Stage::Last => {}
        }
        self.at += 1;
    }

    /// Reports that a receive has ended.
    pub fn received(&mut self) {
        self.recvs -= 1;
    }

    /// Reports that a send of round `number` has ended.
    pub fn sent(&mut self, number: u32) {
        let age = (self.number - number).min(2) as usize;
        self.sends[age] -= 1;
    }

    /// Number of the present round, from 0.
    pub fn number(&self) -> u32 {
        self.number
    }

    fn enter(&mut self, stage: Stage) {
        (self.stage, self.at) = (stage, 0);
    }

    fn advance(&mut self, number: u32) {
        if number > 0 {
            self.sends = [0, self.sends[0], self.sends[1] + self.sends[2]];
        }
        self.number = number;
        let more = self.program.next_round(&mut self.round);
        self.enter(if more { Stage::Before } else { Stage::Last });
    }
}
