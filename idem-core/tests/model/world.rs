//! What there is: the row, open transactions, partitions and their offsets, workers, and what has happened.
//!
//! Time is relative. It is always [`NOW`], and a tick moves every kept instant one nearer, down to `NOW`; so the clock
//! is not bounded, and still there are finitely many states. Tokens are numbered likewise: a new one is the smallest
//! that nobody remembers.

use std::sync::LazyLock;
use std::time::Duration;

use idem_core::machine::{Failure, OperatorAction, RunKind, State, StateKind, Token};
use idem_core::run::CrashPoint;
use idem_core::{Fingerprint, Timestamp};
use uuid::Uuid;

pub const NOW: Timestamp = Timestamp::from_micros(1_000);
pub const TICK: Duration = Duration::from_micros(1);
/// A lease in ticks: one may pass between two statements, and time is left.
pub const LEASE: u8 = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// As it is committed.
    pub row: State,
    /// The transaction that has the row, or the key of the row that is not there, locked.
    pub open: Option<Open>,
    /// A request that its worker has given up, and that the database may carry out at any later time.
    pub late: Option<Late>,
    pub partitions: Vec<Partition>,
    pub workers: Vec<Worker>,
    /// How much may still go wrong.
    pub left: Budget,
    pub seen: History,
}

/// How much may go wrong, or be done from outside, in one history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Workers that die.
    pub crashes: u8,
    /// Requests whose reply is lost, or that are carried out after their worker has given them up.
    pub lost: u8,
    /// Partitions taken from a living worker.
    pub moves: u8,
    /// Leases that end in their holder's hands: handlers are stopped, claims given up, completions late.
    pub stops: u8,
    /// Tries in which the handler fails.
    pub failures: u8,
    /// What people do.
    pub operations: u8,
    /// Rows purged.
    pub purges: u8,
}

/// A transaction that has written and not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Open {
    /// Whose it is; nobody's once the connection is cut with COMMIT on its way.
    pub by: Option<usize>,
    /// What the row becomes.
    pub to: State,
    pub change: Change,
    /// What the handler did in it: an effect for this payload.
    pub effect: Option<usize>,
}

/// A request that is still on its way although nobody waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Late {
    Insert { token: Token, payload: usize },
    Replace { from: State, to: State, change: Change },
    Renew(Token),
    Complete(Claim),
    Fail { token: Token, cause: Cause },
}

/// Why a row changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// A delivery; `runs` if its handler is to run.
    Claim {
        token: Token,
        runs: bool,
    },
    Renew(Token),
    Complete(Token),
    Fail(Token),
    Release(Token),
    Sweep,
    Operate(OperatorAction),
    Purge,
}

/// What a worker knows of its claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    pub kind: RunKind,
    pub token: Token,
    pub attempt: u32,
    pub fence: i64,
    pub payload: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Partition {
    pub owner: Option<usize>,
    /// The owner's memory, gone with the assignment: which records from the committed one on are decided.
    pub decided: Vec<bool>,
    /// The next record to read, as the broker has it.
    pub committed: usize,
    /// Whose outcome is durable, whoever knows it. Judged from the row, not from what workers say.
    pub settled: Vec<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Worker {
    Idle,
    Busy(Box<Task>),
    /// Its memory is gone. It died at this named point, or elsewhere.
    Down(Option<CrashPoint>),
}

/// One message in a worker's hands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    pub partition: usize,
    pub offset: usize,
    pub payload: usize,
    /// The partition was taken away meanwhile: the outcome moves no offset.
    pub stale: bool,
    /// Names the claim. The same until an outcome is known.
    pub token: Token,
    /// Careful: the claim is committed, and the transaction is next.
    pub ahead: bool,
    /// Its handler has begun under this token.
    pub has_begun: bool,
    /// The token of an earlier claim that was given back.
    pub gave_back: Option<Token>,
    /// Atomic: the handler has failed and was rolled back; this transaction only writes the failure down.
    pub failing: Option<Cause>,
    pub phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    Transient,
    Terminal,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// A claim is held that must not be used: it is given back before the next.
    Owing { owed: Token, left: u8 },
    /// The claim is sent. `left`: ticks until one lease after it was sent.
    Asking { left: u8 },
    /// The row was read and is to be replaced.
    Replacing { from: State, to: State, claim: Option<Claim>, outcome: Outcome, left: u8 },
    /// The handler runs; it must be gone in `left` ticks.
    Running { claim: Claim, left: u8, effect: bool },
    /// The handler has returned; nothing is written down, and the lease goes on.
    Handled { claim: Claim, left: u8, failed: Option<Cause> },
    /// Everything is written in the open transaction. Hybrid: by the handler, which runs and must be gone in so many ticks.
    BeforeCommit { outcome: Outcome, runs: Option<(Claim, u8)> },
    /// Hybrid: the handler does not know whether its transaction was committed; the row tells.
    Unsure { claim: Claim, left: u8 },
    /// The outcome is known to this worker, and to nobody else.
    Ended(Outcome),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Completed,
    Duplicate,
    Conflict,
    InProgress,
    NotDue,
    Exhausted,
    /// A failed try, and the job is tried again.
    Failed,
    /// A failed try, and the job is set aside.
    SetAside,
    LeaseLost,
}

impl Outcome {
    /// Whether the offset may pass the message.
    pub fn is_decided(self) -> bool {
        matches!(self, Self::Completed | Self::Duplicate | Self::Conflict | Self::Exhausted | Self::SetAside)
    }
}

/// What happened, as somebody sees it who sees everything. No worker knows it and `step` does not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// Effects that count, by payload; two stands for more.
    pub effects: [u8; 2],
    /// The downstream keys that the callee has seen, as bits.
    pub downstream: u8,
    /// Claims made of the row that is there.
    pub claims: u8,
    /// Those of them that are not to count as tries.
    pub given_back: u8,
    /// Claims whose handler has begun.
    pub starts: u8,
    /// Who holds the job: the last claim, until it ends.
    pub holder: Option<Token>,
    pub done: bool,
    pub operated: Option<OperatorAction>,
    pub broken: Broken,
}

/// Rules that a change of the row, or an answer, has broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Broken {
    /// Somebody but the last claimant wrote.
    pub late_write: bool,
    /// A completed job changed or ran.
    pub ran_again: bool,
    /// A job that was set aside changed or ran, and no person wanted it.
    pub unset_aside: bool,
    /// A job was claimed before it was due.
    pub early: bool,
    /// A lease that was over was extended.
    pub revived: bool,
    /// An operator's action changed a job whose lease was alive.
    pub meddled: bool,
    /// A message was told that its job is done, though the row is not completed with its payload.
    pub false_done: bool,
    /// A worker's input was illegal.
    pub illegal: bool,
}

pub fn fingerprint(payload: usize) -> Option<Fingerprint> {
    static MADE: LazyLock<[Fingerprint; 2]> =
        LazyLock::new(|| [0, 1].map(|payload| Fingerprint::of(&payload).expect("a number has a form")));
    Some(MADE[payload])
}

pub fn is_alive(state: &State) -> bool {
    matches!(state, State::Processing { locked_until, .. } if *locked_until > NOW)
}

pub fn is_set_aside(state: &State) -> bool {
    matches!(state, State::Failed { failure: Failure::Terminal | Failure::Exhausted, .. })
}

/// Moves what the state keeps one tick nearer; whether it kept anything.
pub fn age(state: &mut State) -> bool {
    let (State::Processing { locked_until: at, .. } | State::Failed { failure: Failure::Due(at), .. }) = state else {
        return false;
    };
    let is_kept = *at > NOW;
    *at = NOW.plus(at.since(NOW).saturating_sub(TICK));
    is_kept
}

impl World {
    /// Changes the committed row, and notes what an onlooker would.
    pub fn write(&mut self, to: State, change: Change) {
        let before = std::mem::replace(&mut self.row, to);
        let (seen, changed) = (&mut self.seen, to != before);
        let by_a_person = matches!(change, Change::Operate(_) | Change::Purge);
        seen.broken.ran_again |= changed && before.kind() == StateKind::Completed && change != Change::Purge;
        seen.broken.unset_aside |= changed && is_set_aside(&before) && !by_a_person;
        match change {
            Change::Claim { token, runs: true } => {
                // Asked again because the reply was lost: still the same claim.
                if before.kind() != StateKind::Processing || before.token() != Some(token) {
                    seen.claims = seen.claims.saturating_add(1);
                    seen.broken.early |= matches!(before, State::Failed { failure: Failure::Due(at), .. } if at > NOW);
                }
                seen.holder = Some(token);
            }
            Change::Claim { runs: false, .. } => seen.holder = None,
            Change::Renew(token) => {
                seen.broken.late_write |= seen.holder != Some(token);
                seen.broken.revived |= changed && !is_alive(&before);
            }
            // Of a row that was purged meanwhile: its counts come with the completion.
            Change::Complete(_) if before == State::Absent => {
                let record = to.record().expect("a completed job has one");
                seen.claims = u8::try_from(record.fence).expect("few claims");
                seen.given_back = seen.claims - u8::try_from(record.attempts).expect("few tries");
            }
            Change::Complete(token) => seen.broken.late_write |= changed && seen.holder != Some(token),
            Change::Fail(token) => {
                seen.broken.late_write |= changed && seen.holder != Some(token);
                seen.holder = None;
            }
            Change::Release(token) => {
                seen.broken.late_write |= changed && seen.holder != Some(token);
                seen.holder = None;
                seen.given_back = seen.given_back.saturating_add(1);
            }
            Change::Sweep => {
                seen.broken.meddled |= changed && is_alive(&before);
                seen.holder = None;
            }
            Change::Operate(action) => {
                seen.broken.meddled |= changed && is_alive(&before);
                seen.holder = None;
                seen.operated = Some(action);
                if action == OperatorAction::Retry {
                    seen.given_back = seen.claims;
                }
            }
            Change::Purge => {
                (seen.holder, seen.claims, seen.given_back, seen.starts) = (None, 0, 0, 0);
            }
        }
        seen.done = to.kind() == StateKind::Completed;
    }

    /// A handler begins.
    pub fn begins(&mut self, worker: usize, claim: Claim, left: u8) {
        let Worker::Busy(task) = &mut self.workers[worker] else { return };
        task.phase = Phase::Running { claim, left, effect: false };
        task.gave_back = None;
        // A transaction whose connection was cut is run again without being another try.
        if !std::mem::replace(&mut task.has_begun, true) {
            self.seen.starts = self.seen.starts.saturating_add(1);
        }
        self.seen.broken.ran_again |= self.seen.done;
    }

    pub fn effect(&mut self, payload: usize) {
        let count = &mut self.seen.effects[payload];
        *count = (*count + 1).min(2);
    }

    pub fn effects(&self) -> u8 {
        self.seen.effects.iter().sum()
    }

    /// The worker's outcome is known. Judges by the row whether its message may be passed.
    pub fn ends(&mut self, worker: usize, outcome: Outcome) {
        let Worker::Busy(task) = &mut self.workers[worker] else { return };
        let said = self.row.record().and_then(|record| record.payload);
        let same = said == fingerprint(task.payload);
        let is_done = self.row.kind() == StateKind::Completed && same;
        let settled = match outcome {
            Outcome::Completed | Outcome::Duplicate => {
                self.seen.broken.false_done |= !is_done;
                is_done
            }
            Outcome::Conflict => said.is_some() && !same,
            Outcome::Exhausted | Outcome::SetAside => is_set_aside(&self.row),
            Outcome::InProgress | Outcome::NotDue | Outcome::Failed | Outcome::LeaseLost => false,
        };
        self.partitions[task.partition].settled[task.offset] |= settled;
        task.phase = Phase::Ended(outcome);
        task.gave_back = None;
        task.failing = None;
    }

    /// The smallest token that nobody remembers.
    pub fn new_token(&self) -> Token {
        let numbered = |number: u128| Token(Uuid::from_u128(number));
        (1..).map(numbered).find(|token| !self.remembers(*token)).expect("few are remembered")
    }

    fn remembers(&self, token: Token) -> bool {
        let in_state = |state: &State| state.token() == Some(token);
        in_state(&self.row)
            || self.seen.holder == Some(token)
            || self.open.is_some_and(|open| in_state(&open.to))
            || self.late.is_some_and(|late| match late {
                Late::Insert { token: by, .. } | Late::Renew(by) | Late::Fail { token: by, .. } => by == token,
                Late::Replace { from, to, .. } => in_state(&from) || in_state(&to),
                Late::Complete(claim) => claim.token == token,
            })
            || self.tasks().any(|(_, task)| {
                let in_phase = match &task.phase {
                    Phase::Owing { owed, .. } => *owed == token,
                    Phase::Replacing { from, to, .. } => in_state(from) || in_state(to),
                    _ => false,
                };
                in_phase || task.token == token || task.gave_back == Some(token)
            })
    }

    pub fn tasks(&self) -> impl Iterator<Item = (usize, &Task)> {
        self.workers.iter().enumerate().filter_map(|(index, worker)| match worker {
            Worker::Busy(task) => Some((index, &**task)),
            Worker::Idle | Worker::Down(_) => None,
        })
    }

    pub fn task(&self, worker: usize) -> Option<&Task> {
        match &self.workers[worker] {
            Worker::Busy(task) => Some(task),
            Worker::Idle | Worker::Down(_) => None,
        }
    }

    pub fn phase_mut(&mut self, worker: usize) -> Option<&mut Phase> {
        match &mut self.workers[worker] {
            Worker::Busy(task) => Some(&mut task.phase),
            Worker::Idle | Worker::Down(_) => None,
        }
    }

    /// Whether another transaction than this worker's has the row.
    pub fn is_locked_for(&self, worker: Option<usize>) -> bool {
        self.open.is_some_and(|open| open.by.is_none() || open.by != worker)
    }
}
