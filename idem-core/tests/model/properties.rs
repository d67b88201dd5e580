//! What must always be, and what must be reached so that it says something.

use idem_core::machine::{OperatorAction, RunKind, State, StateKind};
use idem_core::run::CrashPoint;
use stateright::Property;

use super::guard::{Config, Guard, Mode, Purge};
use super::world::{Outcome, Phase, Task, Worker, World, is_set_aside};

type Condition = fn(&Guard, &World) -> bool;

/// Whether a promise is made for a configuration.
type Scope = fn(&Config) -> bool;

const ALWAYS: &[(&str, Scope, Condition)] = &[
    // T1, and for outside effects where nothing goes wrong.
    ("the effect happens at most once", effect_is_once, |_, world| world.effects() <= 1),
    // T2: a callee that honours the key makes of all calls one.
    ("the callee sees one downstream key", |_| true, |_, world| world.seen.downstream.count_ones() <= 1),
    // Flow, step 5, and L3.
    ("at most one handler runs", |config| config.rules.stops, |_, world| running(world) <= 1),
    ("only the last claim can write", purged_late, |_, world| !world.seen.broken.late_write),
    // Flow, step 3.
    ("a completed job never runs again", |_| true, |_, world| !world.seen.broken.ran_again),
    // R2.
    ("a job that was set aside stays so", |_| true, |_, world| !world.seen.broken.unset_aside),
    ("no try begins before it is due", |_| true, |_, world| !world.seen.broken.early),
    // Flow, step 9.
    (
        "no offset passes an undecided job",
        |_| true,
        |_, world| {
            world
                .partitions
                .iter()
                .all(|partition| partition.settled[..partition.committed].iter().all(|settled| *settled))
        },
    ),
    // S4.
    (
        "another payload never counts as done",
        |_| true,
        |_, world| !world.seen.broken.false_done && world.seen.effects.iter().filter(|count| **count > 0).count() <= 1,
    ),
    (
        "each claim counts as one try",
        |_| true,
        |_, world| {
            world.row.record().is_none_or(|record| {
                record.fence == i64::from(world.seen.claims)
                    && record.attempts + u32::from(world.seen.given_back) == u32::from(world.seen.claims)
            })
        },
    ),
    // R2: also of a job that kills its worker each time.
    (
        "a job begins no more often than it may",
        |config| !config.modes.contains(&Mode::Atomic),
        |guard, world| u32::from(world.seen.starts.saturating_sub(world.seen.given_back)) <= guard.config.attempts,
    ),
    // A try is counted when it is claimed. Where everybody has come to an end, each was begun, or given back, or its
    // worker died, or its lease ended first: lost replies alone use none up.
    (
        "an outage costs no try",
        |config| config.budget.moves + config.budget.operations == 0,
        |guard, world| {
            let (seen, budget) = (&world.seen, &guard.config.budget);
            let ended = budget.crashes - world.left.crashes + budget.stops - world.left.stops;
            world.tasks().next().is_some()
                || seen.claims <= seen.starts.saturating_add(seen.given_back).saturating_add(ended)
        },
    ),
    // Flow, step 5.
    ("a lease that is over stays over", |_| true, |_, world| !world.seen.broken.revived),
    (
        "who has given a job back does not hold it",
        |_| true,
        |_, world| {
            let holder = match world.row {
                State::Processing { token, .. } => Some(token),
                _ => None,
            };
            world.tasks().all(|(_, task)| task.gave_back.is_none() || task.gave_back != holder)
        },
    ),
    ("nobody meddles with a living lease", |_| true, |_, world| !world.seen.broken.meddled),
    ("who has completed a job is not told otherwise", not_hybrid, |_, world| {
        let completed_by = match world.row {
            State::Completed { token, .. } => token,
            _ => None,
        };
        let told = |task: &Task| task.phase == Phase::Ended(Outcome::LeaseLost) && completed_by == Some(task.token);
        !world.tasks().any(|(_, task)| told(task))
    }),
    ("what workers do is never illegal", |_| true, |_, world| !world.seen.broken.illegal),
];

const SOMETIMES: &[(&str, Condition)] = &[
    ("everything is passed", |_, world| is_passed(world)),
    ("crash at begun", |_, world| crashed(world, CrashPoint::Begun)),
    ("crash at claimed", |_, world| crashed(world, CrashPoint::Claimed)),
    ("crash at handled", |_, world| crashed(world, CrashPoint::Handled)),
    ("crash before the commit", |_, world| crashed(world, CrashPoint::BeforeCommit)),
    ("crash when recorded", |_, world| crashed(world, CrashPoint::Recorded)),
    ("lost reply to a claim", |_, world| {
        let claimed = world.row.kind() == StateKind::Processing;
        tasks(world, |task| {
            matches!(task.phase, Phase::Asking { .. }) && claimed && world.row.token() == Some(task.token)
        })
    }),
    ("lost reply to a completion", |_, world| {
        let completed = world.row.kind() == StateKind::Completed;
        tasks(world, |task| {
            matches!(task.phase, Phase::Handled { .. }) && completed && world.row.token() == Some(task.token)
        })
    }),
    ("lost reply to a commit", |_, world| {
        let completed = world.row.kind() == StateKind::Completed;
        tasks(world, |task| {
            let unheard = matches!(task.phase, Phase::Asking { .. } | Phase::Unsure { .. });
            unheard && completed && world.row.token() == Some(task.token)
        })
    }),
    ("a commit without its worker", |_, world| world.open.is_some_and(|open| open.by.is_none())),
    ("a request without its worker", |_, world| world.late.is_some()),
    ("the row changes between read and write", |_, world| {
        tasks(world, |task| matches!(task.phase, Phase::Replacing { from, .. } if from != world.row))
    }),
    ("a row locked by another", |_, world| {
        let replaces = |(worker, task): (usize, &Task)| {
            matches!(task.phase, Phase::Replacing { .. }) && world.is_locked_for(Some(worker))
        };
        world.tasks().any(replaces)
    }),
    ("takeover", |_, world| runs(world, RunKind::Takeover)),
    ("retry", |_, world| runs(world, RunKind::Retry)),
    ("duplicate", |_, world| ended(world, Outcome::Duplicate)),
    ("conflict", |_, world| ended(world, Outcome::Conflict)),
    ("in progress", |_, world| ended(world, Outcome::InProgress)),
    ("not due", |_, world| ended(world, Outcome::NotDue)),
    ("exhausted", |_, world| ended(world, Outcome::Exhausted)),
    ("exhausted without a failed try", |guard, world| {
        ended(world, Outcome::Exhausted) && world.left.failures == guard.config.budget.failures
    }),
    ("failed", |_, world| ended(world, Outcome::Failed)),
    ("set aside", |_, world| ended(world, Outcome::SetAside)),
    ("a late holder is refused", |_, world| ended(world, Outcome::LeaseLost)),
    ("a claim is given back", |_, world| world.seen.given_back > 0 && world.seen.operated.is_none()),
    ("two handlers run", |_, world| running(world) > 1),
    ("two effects", |_, world| world.effects() > 1),
    ("more starts than tries", |guard, world| u32::from(world.seen.starts) > guard.config.attempts),
    ("a partition is taken from a living worker", |_, world| tasks(world, |task| task.stale)),
    ("decided out of order", |_, world| {
        world
            .partitions
            .iter()
            .any(|partition| partition.decided[partition.committed..].windows(2).any(|two| !two[0] && two[1]))
    }),
    ("a person releases", |_, world| operated(world, OperatorAction::Release)),
    ("a person retries", |_, world| operated(world, OperatorAction::Retry)),
    ("a person completes", |_, world| operated(world, OperatorAction::Complete)),
    ("a person fails", |_, world| operated(world, OperatorAction::Fail)),
    ("purged", |_, world| world.row == State::Absent && world.effects() > 0),
    ("purged when passed", |_, world| world.row == State::Absent && is_passed(world)),
    ("written anew after a purge", |guard, world| {
        world.left.purges < guard.config.budget.purges
            && world.row.kind() == StateKind::Completed
            && world.seen.starts == 0
    }),
];

/// The properties of a configuration.
pub fn of(config: &Config, sometimes: &[&'static str]) -> Vec<Property<Guard>> {
    let always = ALWAYS.iter().filter(|(_, holds, _)| holds(config)).map(|(name, _, is)| Property::always(name, *is));
    let find = |wanted: &&str| {
        let (name, is) = SOMETIMES.iter().find(|(name, _)| name == wanted).expect("a name of the list");
        Property::sometimes(name, *is)
    };
    always.chain(sometimes.iter().map(find)).collect()
}

pub fn is_always(name: &str) -> bool {
    ALWAYS.iter().any(|(always, ..)| *always == name)
}

/// Names that no configuration must leave out.
pub fn sometimes() -> impl Iterator<Item = &'static str> {
    SOMETIMES.iter().map(|(name, _)| *name)
}

pub fn is_passed(world: &World) -> bool {
    world.partitions.iter().all(|partition| partition.committed == partition.decided.len())
}

fn effect_is_once(config: &Config) -> bool {
    let outside = config.modes.contains(&Mode::Lease);
    let budget = &config.budget;
    let nothing_goes_wrong = budget.crashes + budget.stops + budget.failures + budget.lost == 0;
    (!outside || nothing_goes_wrong) && purged_late(config)
}

/// There a handler may run again between a COMMIT that was cut off and its being carried out: the next delivery tells.
fn not_hybrid(config: &Config) -> bool {
    !config.modes.contains(&Mode::Hybrid)
}

fn purged_late(config: &Config) -> bool {
    config.budget.purges == 0 || config.purge == Purge::Late
}

fn tasks(world: &World, is: impl Fn(&Task) -> bool) -> bool {
    world.tasks().any(|(_, task)| is(task))
}

fn running(world: &World) -> usize {
    let runs = |phase: &Phase| matches!(phase, Phase::Running { .. } | Phase::BeforeCommit { runs: Some(_), .. });
    world.tasks().filter(|(_, task)| runs(&task.phase)).count()
}

fn runs(world: &World, kind: RunKind) -> bool {
    tasks(world, |task| matches!(task.phase, Phase::Running { claim, .. } if claim.kind == kind))
}

fn ended(world: &World, outcome: Outcome) -> bool {
    tasks(world, |task| task.phase == Phase::Ended(outcome))
}

fn crashed(world: &World, point: CrashPoint) -> bool {
    world.workers.contains(&Worker::Down(Some(point)))
}

fn operated(world: &World, action: OperatorAction) -> bool {
    world.seen.operated == Some(action) && !is_set_aside(&world.row) | (action == OperatorAction::Fail)
}
