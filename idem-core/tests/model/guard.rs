//! What can happen: workers as `run/atomic.rs` and `run/lease.rs` make them, on a store as `store/rows.rs` makes it; a
//! broker, a clock, crashes, cut connections and people.
//!
//! What is one action here is one step that others see all of or nothing of. A claim is two, since the row is read in
//! one statement and replaced in another. Failures and releases are loops of the same kind in the store, but what they
//! write depends on nothing but the row that they replace, so they are one.

use idem_core::machine::{
    Decision, Delivered, Failure, FailureCause, IllegalStep, Input, OperatorAction, State, StateKind, Token,
    Transition, TryFailed,
};
use idem_core::run::CrashPoint;
use stateright::{Model, Property};

use super::properties;
use super::world::{
    Budget, Cause, Change, Claim, History, LEASE, Late, NOW, Open, Outcome, Partition, Phase, TICK, Task, Worker,
    World, age, fingerprint, is_alive,
};

/// As `machine::step`.
pub type Step = fn(&State, Input) -> Result<Transition, IllegalStep>;

/// How a worker takes a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Claim, effect and completion in one transaction.
    Atomic,
    /// The claim is committed; the effect is outside; then the completion.
    Lease,
    /// As atomic, but the claim is committed ahead, so that a message which kills its worker runs out of tries.
    Careful,
    /// As lease, but the effect is in a transaction of the handler's own, which the completion joins.
    Hybrid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purge {
    /// Whenever a job is completed.
    Early,
    /// When every copy is passed and nobody has one in hand.
    Late,
}

/// What surrounds `step`. Each of these can be broken to see that the model would show it.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// A handler is gone by its deadline.
    pub stops: bool,
    /// A row is replaced only if it is still the one that was read.
    pub compares: bool,
    /// The commit point is the lowest undecided record.
    pub holds_offsets: bool,
    /// An atomic handler's effect is in the transaction.
    pub effect_in_tx: bool,
    /// The downstream key does not depend on the try.
    pub one_downstream_key: bool,
    /// A claim whose reply was lost is asked again by the same token.
    pub same_token: bool,
    /// A claim that is answered after its lease is not used.
    pub minds_late_answers: bool,
    /// An effect is committed only with a completion that changes the row.
    pub one_completion: bool,
}

pub const RULES: Rules = Rules {
    stops: true,
    compares: true,
    holds_offsets: true,
    effect_in_tx: true,
    one_downstream_key: true,
    same_token: true,
    minds_late_answers: true,
    one_completion: true,
};

/// A bounded piece of the world to explore.
#[derive(Clone, Debug)]
pub struct Config {
    pub modes: &'static [Mode],
    /// By partition, the payloads of its messages. All have one key.
    pub log: &'static [&'static [usize]],
    pub attempts: u32,
    pub budget: Budget,
    pub operators: &'static [OperatorAction],
    /// Somebody looks for leases that have run out.
    pub sweeps: bool,
    pub purge: Purge,
    pub rules: Rules,
}

#[derive(Clone)]
pub struct Guard {
    pub step: Step,
    pub config: Config,
    pub properties: Vec<Property<Guard>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    Heard,
    /// The request is carried out and its worker does not hear of it.
    Lost,
    /// Likewise, and it is carried out at any later time.
    Late,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A record comes up. The claim is sent.
    Take {
        worker: usize,
        partition: usize,
        offset: usize,
    },
    /// The database inserts the row, or reads the one that is there.
    Ask(usize, Reply),
    Replace(usize, Reply),
    GiveBack(usize, Reply),
    Effect(usize),
    Return(usize, Option<Cause>),
    Renew(usize, Reply),
    /// The outcome is written down; in a transaction, not yet committed.
    Write(usize, Reply),
    Commit(usize, Reply),
    /// The row tells whether a handler's own transaction was committed.
    ReadBack(usize),
    /// A batch handler is called again, in halves, since nothing of its transaction seems to be committed.
    RunAgain(usize),
    /// The runtime hears the outcome.
    Report(usize),
    /// A waiting record of a partition that was taken away is forgotten.
    Forget(usize),
    /// The process dies, with its last request `sent` or not.
    Crash {
        worker: usize,
        sent: bool,
    },
    Restart(usize),
    /// A late request is carried out.
    Land,
    /// A transaction without an owner is committed after all, or rolled back.
    LandCommit,
    BreakCommit,
    Assign {
        partition: usize,
        worker: usize,
    },
    CommitOffset(usize),
    Tick,
    Operate(OperatorAction),
    Sweep,
    Purge,
}

impl Action {
    /// What happens if everybody does what they should and nothing breaks.
    pub fn is_good(self) -> bool {
        match self {
            Self::Ask(_, reply)
            | Self::Replace(_, reply)
            | Self::GiveBack(_, reply)
            | Self::Renew(_, reply)
            | Self::Write(_, reply)
            | Self::Commit(_, reply) => reply == Reply::Heard,
            Self::Return(_, failed) => failed.is_none(),
            Self::RunAgain(_) => false,
            Self::Crash { .. } | Self::Operate(_) | Self::Sweep | Self::Purge => false,
            _ => true,
        }
    }
}

impl Model for Guard {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let workers = self.config.modes.len();
        let partition = |(index, log): (usize, &&[usize])| Partition {
            owner: Some(index % workers),
            decided: vec![false; log.len()],
            committed: 0,
            settled: vec![false; log.len()],
        };
        vec![World {
            row: State::Absent,
            open: None,
            late: None,
            partitions: self.config.log.iter().enumerate().map(partition).collect(),
            workers: vec![Worker::Idle; workers],
            left: self.config.budget,
            seen: History::default(),
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        for worker in 0..world.workers.len() {
            self.actions_of(world, worker, actions);
        }
        if world.late.is_some() {
            actions.push(Action::Land);
        }
        if world.open.is_some_and(|open| open.by.is_none()) {
            actions.extend([Action::LandCommit, Action::BreakCommit]);
        }
        for (index, partition) in world.partitions.iter().enumerate() {
            if partition.owner.is_some() {
                actions.push(Action::CommitOffset(index));
            }
            for (worker, at) in world.workers.iter().enumerate() {
                let may = partition.owner.is_none() || (partition.owner != Some(worker) && world.left.moves > 0);
                if may && !matches!(at, Worker::Down(_)) {
                    actions.push(Action::Assign { partition: index, worker });
                }
            }
        }
        actions.push(Action::Tick);
        if world.left.operations > 0 {
            actions.extend(self.config.operators.iter().map(|action| Action::Operate(*action)));
        }
        if self.config.sweeps {
            actions.push(Action::Sweep);
        }
        if world.left.purges > 0 {
            actions.push(Action::Purge);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        let done = self.act(&mut next, action);
        (done.is_some() || next.seen.broken.illegal).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        self.properties.clone()
    }
}

impl Guard {
    pub fn new(step: Step, config: Config, sometimes: &[&'static str]) -> Self {
        let properties = properties::of(&config, sometimes);
        Self { step, config, properties }
    }

    /// Whether what the worker claims now is in a transaction.
    fn is_in_tx(&self, world: &World, worker: usize) -> bool {
        match self.config.modes[worker] {
            Mode::Atomic => true,
            Mode::Careful => world.task(worker).is_some_and(|task| task.ahead),
            Mode::Lease | Mode::Hybrid => false,
        }
    }

    /// Whether its handler's time is the lease's.
    fn is_leased(&self, worker: usize) -> bool {
        matches!(self.config.modes[worker], Mode::Lease | Mode::Hybrid)
    }

    fn actions_of(&self, world: &World, worker: usize, actions: &mut Vec<Action>) {
        let task = match &world.workers[worker] {
            Worker::Down(_) => return actions.push(Action::Restart(worker)),
            Worker::Idle => {
                let mut forgets = false;
                for (index, partition) in world.partitions.iter().enumerate() {
                    if partition.owner == Some(worker) {
                        let undecided =
                            (partition.committed..partition.decided.len()).filter(|o| !partition.decided[*o]);
                        actions.extend(undecided.map(|offset| Action::Take { worker, partition: index, offset }));
                        forgets |= partition.decided[partition.committed..].contains(&true);
                    }
                }
                if forgets && world.left.crashes > 0 {
                    actions.push(Action::Crash { worker, sent: false });
                }
                return;
            }
            Worker::Busy(task) => task,
        };
        let mut replies = vec![Reply::Heard];
        if world.left.lost > 0 {
            replies.push(Reply::Lost);
            if world.late.is_none() && world.open.is_none_or(|open| open.by.is_some()) {
                replies.push(Reply::Late);
            }
        }
        let each = |action: fn(usize, Reply) -> Action| replies.iter().map(move |reply| action(worker, *reply));
        match &task.phase {
            Phase::Owing { .. } => actions.extend(each(Action::GiveBack)),
            Phase::Asking { .. } => actions.extend(each(Action::Ask)),
            Phase::Replacing { .. } => actions.extend(each(Action::Replace)),
            Phase::Running { effect, .. } => {
                actions.push(match (*effect, self.config.modes[worker]) {
                    (false, _) => Action::Effect(worker),
                    (true, Mode::Hybrid) => Action::Write(worker, Reply::Heard),
                    (true, _) => Action::Return(worker, None),
                });
                if world.left.failures > 0 {
                    let causes = [Cause::Transient, Cause::Terminal];
                    actions.extend(causes.map(|cause| Action::Return(worker, Some(cause))));
                }
                if self.is_leased(worker) {
                    actions.extend(each(Action::Renew));
                }
            }
            Phase::Handled { .. } => {
                actions.extend(each(Action::Write));
                actions.extend(each(Action::Renew));
            }
            Phase::BeforeCommit { .. } => actions.extend(each(Action::Commit)),
            Phase::Unsure { .. } => {
                actions.extend([Action::ReadBack(worker), Action::RunAgain(worker)]);
                if world.left.failures > 0 {
                    actions.push(Action::Return(worker, Some(Cause::Transient)));
                }
            }
            Phase::Ended(_) => actions.push(Action::Report(worker)),
        }
        if task.stale && matches!(task.phase, Phase::Asking { .. } | Phase::Owing { .. }) {
            actions.push(Action::Forget(worker));
        }
        if world.left.crashes > 0 {
            actions.push(Action::Crash { worker, sent: false });
            if replies.contains(&Reply::Late) {
                actions.push(Action::Crash { worker, sent: true });
            }
        }
    }

    /// Does it; nothing if it is not possible or changes nothing.
    fn act(&self, world: &mut World, action: Action) -> Option<()> {
        match action {
            Action::Take { worker, partition, offset } => {
                let task = Task {
                    partition,
                    offset,
                    payload: self.config.log[partition][offset],
                    stale: false,
                    token: world.new_token(),
                    ahead: false,
                    has_begun: false,
                    gave_back: None,
                    failing: None,
                    phase: Phase::Asking { left: LEASE },
                };
                world.workers[worker] = Worker::Busy(Box::new(task));
            }
            Action::Ask(worker, reply) => self.ask(world, worker, reply)?,
            Action::Replace(worker, reply) => self.replace(world, worker, reply)?,
            Action::GiveBack(worker, reply) => self.give_back(world, worker, reply)?,
            Action::Effect(worker) => self.effect(world, worker)?,
            Action::Return(worker, failed) => self.returns(world, worker, failed)?,
            Action::Renew(worker, reply) => self.renew(world, worker, reply)?,
            Action::Write(worker, reply) => self.write(world, worker, reply)?,
            Action::Commit(worker, reply) => self.commit(world, worker, reply)?,
            Action::ReadBack(worker) => self.read_back(world, worker)?,
            Action::RunAgain(worker) => {
                let Phase::Unsure { claim, left } = world.task(worker)?.phase else { return None };
                let is_held = world.row.kind() == StateKind::Processing && world.row.token() == Some(claim.token);
                (is_held && left > 0).then(|| world.begins(worker, claim, left))?;
            }
            Action::Report(worker) => {
                let task = world.task(worker)?;
                let Phase::Ended(outcome) = task.phase else { return None };
                let (partition, offset, stale) = (task.partition, task.offset, task.stale);
                if outcome.is_decided() && !stale {
                    world.partitions[partition].decided[offset] = true;
                }
                world.workers[worker] = Worker::Idle;
            }
            Action::Forget(worker) => world.workers[worker] = Worker::Idle,
            Action::Crash { worker, sent } => self.crash(world, worker, sent)?,
            Action::Restart(worker) => world.workers[worker] = Worker::Idle,
            Action::Land => self.land(world)?,
            Action::LandCommit => {
                let Open { to, change, effect, .. } = world.open.take()?;
                world.write(to, change);
                effect.into_iter().for_each(|payload| world.effect(payload));
            }
            Action::BreakCommit => {
                world.open.take()?;
            }
            Action::Assign { partition, worker } => {
                if world.partitions[partition].owner.is_some() {
                    world.left.moves -= 1;
                }
                forget_assignment(&mut world.partitions[partition], Some(worker));
                for other in &mut world.workers {
                    if let Worker::Busy(task) = other {
                        task.stale |= task.partition == partition;
                    }
                }
            }
            Action::CommitOffset(partition) => {
                let partition = &mut world.partitions[partition];
                let decided = &partition.decided;
                let point = match self.config.rules.holds_offsets {
                    true => decided[partition.committed..].iter().position(|decided| !decided),
                    false => None,
                };
                let highest = decided.iter().rposition(|decided| *decided).map_or(0, |last| last + 1);
                let point = point.map_or(highest, |undecided| partition.committed + undecided);
                (point > partition.committed).then(|| partition.committed = point)?;
            }
            Action::Tick => self.tick(world)?,
            Action::Operate(action) => {
                self.outsider(world, Input::Operator { action, now: NOW }, Change::Operate(action))?;
                world.left.operations -= 1;
            }
            Action::Sweep => self.outsider(world, Input::Expire { now: NOW }, Change::Sweep)?,
            Action::Purge => {
                let passed = world.partitions.iter().all(|partition| partition.committed == partition.decided.len());
                let nobody = world.tasks().next().is_none() && world.late.is_none() && world.open.is_none();
                let may = self.config.purge == Purge::Early || (passed && nobody);
                let is_done = world.row.kind() == StateKind::Completed && !world.is_locked_for(None);
                (may && is_done).then_some(())?;
                world.write(State::Absent, Change::Purge);
                world.left.purges -= 1;
            }
        }
        Some(())
    }

    /// Asks the machine on a worker's behalf, who may ask anything at any time.
    fn advance(&self, world: &mut World, state: &State, input: Input) -> Option<Transition> {
        let moved = (self.step)(state, input).ok();
        world.seen.broken.illegal |= moved.is_none();
        moved
    }

    fn delivered(&self, token: Token, payload: usize) -> Input {
        let (payload, lease) = (fingerprint(payload), TICK * u32::from(LEASE));
        Input::Delivered(Delivered { token, payload, now: NOW, lease, max_attempts: self.config.attempts })
    }

    fn failed(&self, token: Token, cause: Cause) -> Input {
        let cause = match cause {
            Cause::Transient => FailureCause::Transient { retry_at: NOW.plus(TICK) },
            Cause::Terminal => FailureCause::Terminal,
        };
        Input::Fail(TryFailed { token, cause, max_attempts: self.config.attempts })
    }

    fn ask(&self, world: &mut World, worker: usize, reply: Reply) -> Option<()> {
        let task = world.task(worker)?;
        let (token, payload) = (task.token, task.payload);
        let Phase::Asking { left } = task.phase else { return None };
        let row = world.row;
        // The key of a row that an open transaction has inserted is waited for.
        if row == State::Absent && world.is_locked_for(Some(worker)) {
            return None;
        }
        let moved = self.advance(world, &row, self.delivered(token, payload))?;
        let (claim, outcome) = understood(moved, token, payload);
        if row == State::Absent {
            return self.claim(world, worker, reply, (row, moved.next, claim, outcome, left));
        }
        // A lost answer to a question is no other than a question not asked.
        (reply == Reply::Heard).then_some(())?;
        if moved.next == row {
            self.answered(world, worker, claim, outcome, left);
        } else {
            *world.phase_mut(worker)? = Phase::Replacing { from: row, to: moved.next, claim, outcome, left };
        }
        Some(())
    }

    fn replace(&self, world: &mut World, worker: usize, reply: Reply) -> Option<()> {
        let Phase::Replacing { from, to, claim, outcome, left } = world.task(worker)?.phase else { return None };
        if world.is_locked_for(Some(worker)) {
            // Not waited for.
            (reply == Reply::Heard).then(|| self.answered(world, worker, None, Outcome::InProgress, left))
        } else if reply != Reply::Late && self.config.rules.compares && world.row != from {
            // Looked at again.
            (reply == Reply::Heard).then_some(())?;
            *world.phase_mut(worker)? = Phase::Asking { left };
            Some(())
        } else {
            self.claim(world, worker, reply, (from, to, claim, outcome, left))
        }
    }

    /// The row is the claim's, or, if all tries were used up, set aside.
    fn claim(
        &self,
        world: &mut World,
        worker: usize,
        reply: Reply,
        (from, to, claim, outcome, left): (State, State, Option<Claim>, Outcome, u8),
    ) -> Option<()> {
        let task = world.task(worker)?;
        let (token, payload, failing) = (task.token, task.payload, task.failing);
        let change = Change::Claim { token, runs: claim.is_some() };
        if self.is_in_tx(world, worker) {
            // A cut connection undoes it, as if it had not been asked.
            (reply == Reply::Heard).then_some(())?;
            world.open = Some(Open { by: Some(worker), to: as_completed(to, claim), change, effect: None });
            match (claim, failing) {
                (None, _) => *world.phase_mut(worker)? = Phase::BeforeCommit { outcome, runs: None },
                (Some(claim), None) => world.begins(worker, claim, LEASE),
                (Some(_), Some(cause)) => {
                    let moved = self.advance(world, &to, self.failed(token, cause))?;
                    world.open.as_mut()?.to = moved.next;
                    *world.phase_mut(worker)? = Phase::BeforeCommit { outcome: after_failure(&moved), runs: None };
                }
            }
            return Some(());
        }
        match reply {
            Reply::Heard => {
                world.write(to, change);
                self.answered(world, worker, claim, outcome, left);
            }
            Reply::Lost => {
                world.write(to, change);
                self.ask_again(world, worker)?;
            }
            Reply::Late => {
                world.late = Some(match from {
                    State::Absent => Late::Insert { token, payload },
                    from => Late::Replace { from, to, change },
                });
                self.ask_again(world, worker)?;
            }
        }
        Some(())
    }

    /// The worker was not answered.
    fn ask_again(&self, world: &mut World, worker: usize) -> Option<()> {
        world.left.lost -= 1;
        let token = world.new_token();
        let same_token = self.config.rules.same_token;
        let Worker::Busy(task) = &mut world.workers[worker] else { return None };
        task.phase = Phase::Asking { left: LEASE };
        if !same_token {
            (task.token, task.has_begun) = (token, false);
        }
        // A failure that was perhaps not written down is not kept: the message runs again.
        if task.failing.take().is_some() {
            task.has_begun = false;
        }
        Some(())
    }

    fn answered(&self, world: &mut World, worker: usize, claim: Option<Claim>, outcome: Outcome, left: u8) {
        match claim {
            // It leaves no claim behind that it will not use.
            None if outcome == Outcome::InProgress && self.is_ahead(world, worker) => {
                let Some(Task { token, .. }) = world.task(worker) else { return };
                let owing = Phase::Owing { owed: *token, left: LEASE };
                if let Some(phase) = world.phase_mut(worker) {
                    *phase = owing;
                }
            }
            None => world.ends(worker, outcome),
            Some(_) if self.config.modes[worker] == Mode::Careful => {
                if let Worker::Busy(task) = &mut world.workers[worker] {
                    (task.ahead, task.phase) = (true, Phase::Asking { left: LEASE });
                }
            }
            Some(_) if left == 0 && self.config.rules.minds_late_answers => self.owe(world, worker),
            Some(claim) => world.begins(worker, claim, left),
        }
    }

    fn is_ahead(&self, world: &World, worker: usize) -> bool {
        world.task(worker).is_some_and(|task| task.ahead)
    }

    /// The claim must not be used any more: it is given back, and the job asked for anew.
    fn owe(&self, world: &mut World, worker: usize) {
        let token = world.new_token();
        if let Worker::Busy(task) = &mut world.workers[worker] {
            task.phase = Phase::Owing { owed: std::mem::replace(&mut task.token, token), left: LEASE };
            task.has_begun = false;
        }
    }

    fn give_back(&self, world: &mut World, worker: usize, reply: Reply) -> Option<()> {
        let Phase::Owing { owed, left } = world.task(worker)?.phase else { return None };
        (reply != Reply::Late && !world.is_locked_for(Some(worker))).then_some(())?;
        let row = world.row;
        let moved = self.advance(world, &row, Input::Release { token: owed })?;
        if moved.next != row {
            world.write(moved.next, Change::Release(owed));
        }
        if reply == Reply::Lost {
            world.left.lost -= 1;
            return Some(());
        }
        let Worker::Busy(task) = &mut world.workers[worker] else { return None };
        if task.ahead {
            world.ends(worker, Outcome::InProgress);
        } else {
            task.gave_back = Some(owed);
            task.phase = Phase::Asking { left };
        }
        Some(())
    }

    fn effect(&self, world: &mut World, worker: usize) -> Option<()> {
        let Phase::Running { claim, effect, .. } = world.phase_mut(worker)? else { return None };
        *effect = true;
        let Claim { payload, attempt, .. } = *claim;
        match self.config.modes[worker] {
            Mode::Lease => {
                world.effect(payload);
                world.seen.downstream |= if self.config.rules.one_downstream_key { 1 } else { 1 << attempt.min(7) };
            }
            _ if !self.config.rules.effect_in_tx => world.effect(payload),
            Mode::Atomic | Mode::Careful => world.open.as_mut()?.effect = Some(payload),
            Mode::Hybrid => {}
        }
        Some(())
    }

    fn returns(&self, world: &mut World, worker: usize, failed: Option<Cause>) -> Option<()> {
        let (Phase::Running { claim, left, .. } | Phase::Unsure { claim, left }) = world.task(worker)?.phase else {
            return None;
        };
        if failed.is_some() {
            world.left.failures -= 1;
        }
        let is_leased = self.is_leased(worker);
        let Worker::Busy(task) = &mut world.workers[worker] else { return None };
        if is_leased {
            task.phase = Phase::Handled { claim, left, failed };
        } else if failed.is_none() {
            task.phase = Phase::BeforeCommit { outcome: Outcome::Completed, runs: None };
        } else {
            task.failing = failed;
            task.phase = Phase::Asking { left: LEASE };
            world.open = None;
        }
        Some(())
    }

    fn renew(&self, world: &mut World, worker: usize, reply: Reply) -> Option<()> {
        let (Phase::Running { claim, left, .. } | Phase::Handled { claim, left, .. }) = world.task(worker)?.phase
        else {
            return None;
        };
        let token = claim.token;
        if reply == Reply::Late {
            world.late = Some(Late::Renew(token));
            world.left.lost -= 1;
            return Some(());
        }
        (!world.is_locked_for(Some(worker))).then_some(())?;
        let renewed = self.write_renewal(world, token)?;
        match (reply, renewed) {
            (Reply::Heard, true) => {
                (left < LEASE).then_some(())?;
                if let Phase::Running { left, .. } | Phase::Handled { left, .. } = world.phase_mut(worker)? {
                    *left = LEASE;
                }
            }
            // What has returned is written all the same.
            (Reply::Heard, false) if matches!(world.task(worker)?.phase, Phase::Handled { .. }) => return None,
            (Reply::Heard, false) => world.ends(worker, Outcome::LeaseLost),
            _ => world.left.lost -= 1,
        }
        Some(())
    }

    /// Whether it stands.
    fn write_renewal(&self, world: &mut World, token: Token) -> Option<bool> {
        let (row, lease) = (world.row, TICK * u32::from(LEASE));
        let moved = self.advance(world, &row, Input::Renew { token, now: NOW, lease })?;
        let stands = moved.decision == Decision::Applied;
        if stands {
            world.write(moved.next, Change::Renew(token));
        }
        Some(stands)
    }

    fn write(&self, world: &mut World, worker: usize, reply: Reply) -> Option<()> {
        let (claim, failed) = match world.task(worker)?.phase {
            Phase::Handled { claim, failed, .. } => (claim, failed),
            Phase::Running { claim, left, effect: true } => return self.complete_in(world, worker, claim, left),
            _ => return None,
        };
        if reply == Reply::Late {
            world.late = Some(match failed {
                Some(cause) => Late::Fail { token: claim.token, cause },
                None => Late::Complete(claim),
            });
            world.left.lost -= 1;
            return Some(());
        }
        (!world.is_locked_for(Some(worker))).then_some(())?;
        let outcome = match failed {
            Some(cause) => self.write_failure(world, claim.token, cause)?,
            None => self.write_completion(world, claim)?,
        };
        match reply {
            Reply::Heard => world.ends(worker, outcome),
            _ => world.left.lost -= 1,
        }
        Some(())
    }

    /// The completion joins the handler's own transaction, or undoes it.
    fn complete_in(&self, world: &mut World, worker: usize, claim: Claim, left: u8) -> Option<()> {
        (!world.is_locked_for(Some(worker))).then_some(())?;
        let row = world.row;
        let moved = self.advance(world, &row, Input::Complete { token: claim.token })?;
        // If an earlier transaction of this very claim was committed although its connection was cut, its effect is the one
        // that counts.
        if moved.decision != Decision::Applied || (moved.next == row && self.config.rules.one_completion) {
            world.ends(worker, Outcome::LeaseLost);
            return Some(());
        }
        let (change, effect) = (Change::Complete(claim.token), self.config.rules.effect_in_tx.then_some(claim.payload));
        world.open = Some(Open { by: Some(worker), to: moved.next, change, effect });
        *world.phase_mut(worker)? = Phase::BeforeCommit { outcome: Outcome::Completed, runs: Some((claim, left)) };
        Some(())
    }

    fn write_completion(&self, world: &mut World, claim: Claim) -> Option<Outcome> {
        let Claim { token, attempt, fence, payload, .. } = claim;
        if world.row == State::Absent {
            // Written anew, so that a purge does not make the effect happen again.
            let record = idem_core::machine::Record { payload: fingerprint(payload), attempts: attempt, fence };
            world.write(State::Completed { record, token: Some(token) }, Change::Complete(token));
            return Some(Outcome::Completed);
        }
        let row = world.row;
        let moved = self.advance(world, &row, Input::Complete { token })?;
        if moved.decision != Decision::Applied {
            return Some(Outcome::LeaseLost);
        }
        world.write(moved.next, Change::Complete(token));
        Some(Outcome::Completed)
    }

    fn write_failure(&self, world: &mut World, token: Token, cause: Cause) -> Option<Outcome> {
        let row = world.row;
        let moved = self.advance(world, &row, self.failed(token, cause))?;
        if moved.decision != Decision::Applied {
            return Some(Outcome::LeaseLost);
        }
        world.write(moved.next, Change::Fail(token));
        Some(after_failure(&moved))
    }

    fn commit(&self, world: &mut World, worker: usize, reply: Reply) -> Option<()> {
        let Phase::BeforeCommit { outcome, runs } = world.task(worker)?.phase else { return None };
        if reply == Reply::Late {
            world.open.as_mut()?.by = None;
        } else {
            let Open { to, change, effect, .. } = world.open.take()?;
            world.write(to, change);
            effect.into_iter().for_each(|payload| world.effect(payload));
        }
        match (reply, runs) {
            (Reply::Heard, _) => world.ends(worker, outcome),
            (_, Some((claim, left))) => {
                world.left.lost -= 1;
                *world.phase_mut(worker)? = Phase::Unsure { claim, left };
            }
            (_, None) => self.ask_again(world, worker)?,
        }
        Some(())
    }

    fn read_back(&self, world: &mut World, worker: usize) -> Option<()> {
        let Phase::Unsure { claim, left } = world.task(worker)?.phase else { return None };
        match world.row {
            State::Completed { token: Some(by), .. } if by == claim.token => world.ends(worker, Outcome::Completed),
            // Its handler was stopped with its lease, so the try does not count.
            State::Processing { token: by, .. } if by == claim.token && left == 0 => self.owe(world, worker),
            State::Processing { token: by, .. } if by == claim.token => {
                *world.phase_mut(worker)? = Phase::Handled { claim, left, failed: Some(Cause::Transient) };
            }
            _ => world.ends(worker, Outcome::LeaseLost),
        }
        Some(())
    }

    fn crash(&self, world: &mut World, worker: usize, sent: bool) -> Option<()> {
        let is_in_tx = self.is_in_tx(world, worker);
        let point = world.task(worker).and_then(|task| crash_point(is_in_tx, &task.phase));
        if sent {
            world.left.lost -= 1;
            self.cut(world, worker)?;
        }
        world.left.crashes -= 1;
        if world.open.is_some_and(|open| open.by == Some(worker)) {
            world.open = None;
        }
        for partition in world.partitions.iter_mut().filter(|partition| partition.owner == Some(worker)) {
            forget_assignment(partition, None);
        }
        world.workers[worker] = Worker::Down(point);
        Some(())
    }

    /// What the worker has sent goes on without it.
    fn cut(&self, world: &mut World, worker: usize) -> Option<()> {
        let Task { token, payload, ref phase, .. } = *world.task(worker)?;
        let phase = phase.clone();
        match phase {
            Phase::BeforeCommit { .. } => world.open.as_mut()?.by = None,
            _ if self.is_in_tx(world, worker) => return None,
            Phase::Asking { .. } if world.row == State::Absent => {
                world.late = Some(Late::Insert { token, payload });
            }
            Phase::Replacing { from, to, claim, .. } => {
                let change = Change::Claim { token, runs: claim.is_some() };
                world.late = Some(Late::Replace { from, to, change });
            }
            Phase::Running { claim, .. } => world.late = Some(Late::Renew(claim.token)),
            Phase::Handled { claim, failed: Some(cause), .. } => {
                world.late = Some(Late::Fail { token: claim.token, cause });
            }
            Phase::Handled { claim, failed: None, .. } if self.config.modes[worker] == Mode::Lease => {
                world.late = Some(Late::Complete(claim));
            }
            _ => return None,
        }
        Some(())
    }

    /// What is late arrives.
    fn land(&self, world: &mut World) -> Option<()> {
        let late = world.late?;
        if world.open.is_some() && !matches!(late, Late::Replace { .. }) {
            return None;
        }
        world.late = None;
        match late {
            Late::Insert { token, payload } if world.row == State::Absent => {
                let moved = self.advance(world, &State::Absent, self.delivered(token, payload))?;
                world.write(moved.next, Change::Claim { token, runs: true });
            }
            Late::Replace { from, to, change } if world.open.is_none() && world.row == from => {
                // It arrives when its lease is over.
                if to.kind() == StateKind::Processing && !is_alive(&to) {
                    world.left.stops = world.left.stops.checked_sub(1)?;
                }
                world.write(to, change);
            }
            Late::Insert { .. } | Late::Replace { .. } => {}
            Late::Renew(token) => {
                self.write_renewal(world, token)?;
            }
            Late::Complete(claim) => {
                self.write_completion(world, claim)?;
            }
            Late::Fail { token, cause } => {
                self.write_failure(world, token, cause)?;
            }
        }
        Some(())
    }

    fn tick(&self, world: &mut World) -> Option<()> {
        let was_alive = is_alive(&world.row);
        let mut changes = age(&mut world.row);
        let has_ended = was_alive && !is_alive(&world.row);
        if let Some(open) = &mut world.open {
            changes |= age(&mut open.to);
        }
        if let Some(Late::Replace { from, to, .. }) = &mut world.late {
            changes |= age(from) | age(to);
        }
        for worker in 0..world.workers.len() {
            // A claim that is committed ahead has a lease until its transaction locks the row.
            let is_leased = self.config.modes[worker] != Mode::Atomic && !self.is_in_tx(world, worker);
            let holder = world.row.token();
            let Worker::Busy(task) = &mut world.workers[worker] else { continue };
            if let Phase::Replacing { from, to, .. } = &mut task.phase {
                changes |= age(from) | age(to);
            }
            let runs = matches!(task.phase, Phase::Running { .. } | Phase::BeforeCommit { .. });
            // It does not know that it holds the lease.
            let asks = matches!(task.phase, Phase::Asking { .. } | Phase::Replacing { .. });
            let mut is_over = has_ended && asks && holder == Some(task.token);
            if let Phase::Owing { left, .. }
            | Phase::Asking { left }
            | Phase::Replacing { left, .. }
            | Phase::Running { left, .. }
            | Phase::Handled { left, .. }
            | Phase::BeforeCommit { runs: Some((_, left)), .. }
            | Phase::Unsure { left, .. } = &mut task.phase
                && is_leased
                && *left > 0
            {
                changes = true;
                *left -= 1;
                is_over |= *left == 0;
            }
            if is_over && (self.config.rules.stops || !runs) {
                world.left.stops = world.left.stops.checked_sub(1)?;
            }
            if !is_over || !self.config.rules.stops {
                continue;
            }
            match task.phase {
                Phase::Running { .. } => self.owe(world, worker),
                // Its transaction is dropped, and rolled back.
                Phase::BeforeCommit { runs: Some((claim, left)), .. } => {
                    task.phase = Phase::Unsure { claim, left };
                    world.open = None;
                }
                _ => {}
            }
        }
        changes.then_some(())
    }

    /// Somebody who is no worker asks the machine; what is illegal is not done.
    fn outsider(&self, world: &mut World, input: Input, change: Change) -> Option<()> {
        (!world.is_locked_for(None)).then_some(())?;
        let moved = (self.step)(&world.row, input).ok()?;
        (moved.next != world.row).then(|| world.write(moved.next, change))
    }
}

fn forget_assignment(partition: &mut Partition, owner: Option<usize>) {
    partition.owner = owner;
    partition.decided = vec![false; partition.decided.len()];
}

/// What the worker makes of the answer to its claim.
fn understood(moved: Transition, token: Token, payload: usize) -> (Option<Claim>, Outcome) {
    let outcome = match moved.decision {
        Decision::Run(run) => {
            let (kind, attempt, fence) = (run.kind, run.attempt, run.fence);
            let claim = Claim { kind, token: run.token, attempt, fence, payload };
            return (Some(claim), Outcome::Completed);
        }
        // The reply to our own commit was lost: the row says that it went through.
        Decision::Duplicate if moved.next.token() == Some(token) => Outcome::Completed,
        Decision::Duplicate => Outcome::Duplicate,
        Decision::Conflict => Outcome::Conflict,
        Decision::InProgress { .. } => Outcome::InProgress,
        Decision::NotDue { .. } => Outcome::NotDue,
        Decision::Exhausted => Outcome::Exhausted,
        Decision::Applied | Decision::LeaseLost => Outcome::LeaseLost,
    };
    (None, outcome)
}

fn crash_point(is_in_tx: bool, phase: &Phase) -> Option<CrashPoint> {
    match phase {
        Phase::Asking { .. } | Phase::Replacing { .. } if is_in_tx => Some(CrashPoint::Begun),
        Phase::Running { effect: false, .. } => Some(CrashPoint::Claimed),
        Phase::Running { effect: true, .. } if is_in_tx => Some(CrashPoint::Handled),
        Phase::Handled { .. } => Some(CrashPoint::Handled),
        Phase::BeforeCommit { .. } => Some(CrashPoint::BeforeCommit),
        Phase::Ended(_) => Some(CrashPoint::Recorded),
        _ => None,
    }
}

fn after_failure(moved: &Transition) -> Outcome {
    match moved.next {
        State::Failed { failure: Failure::Due(_), .. } => Outcome::Failed,
        _ => Outcome::SetAside,
    }
}

/// As an atomic claim is stored.
fn as_completed(to: State, claim: Option<Claim>) -> State {
    match (to, claim) {
        (State::Processing { record, token, .. }, Some(_)) => State::Completed { record, token: Some(token) },
        (to, _) => to,
    }
}
