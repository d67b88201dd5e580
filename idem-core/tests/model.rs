//! Every history of a few workers, a broker, a clock, crashes, cut connections and people, against the real
//! [`step`](idem_core::machine::step).
//!
//! Each case bounds what may go wrong, and is explored completely. `properties.rs` lists what must hold in every state
//! of every history, and what must be reached so that this says something; `broken.rs` breaks the machine, and what
//! surrounds it, one decision at a time, and each must be noticed. The numbers of states are pinned: a model that suddenly
//! has fewer has lost something that may happen.
//!
//! What the model takes for granted: a handler under a lease is gone by its deadline (`RunDeadline`, and its tests),
//! except in the cases of handlers that do not stop; the unique key lets one of several inserts win; a statement's row is
//! as it was or as it became.

#[path = "model/broken.rs"]
mod broken;
#[path = "model/guard.rs"]
mod guard;
#[path = "model/properties.rs"]
mod properties;
#[path = "model/world.rs"]
mod world;

use std::collections::{BTreeSet, HashMap, VecDeque};

use guard::Mode::{Atomic, Careful, Hybrid, Lease};
use guard::{Action, Config, Guard, Purge, RULES, Rules, Step};
use idem_core::machine::{OperatorAction, step};
use stateright::{Checker, HasDiscoveries, Model, Path};
use world::{Budget, World};

struct Case {
    config: Config,
    /// What some history must reach.
    reaches: &'static [&'static str],
    /// How many different states there are.
    states: usize,
}

const NOTHING: Budget = Budget { crashes: 0, lost: 0, moves: 0, stops: 0, failures: 0, operations: 0, purges: 0 };

/// Two workers, each with a copy of the message on a partition of its own.
const TWO: Config = Config {
    modes: &[Lease, Lease],
    log: &[&[0], &[0]],
    attempts: 2,
    budget: NOTHING,
    operators: &[],
    sweeps: false,
    purge: Purge::Late,
    rules: RULES,
};

macro_rules! cases {
    ($($(#[$comment:meta])* $name:ident: $case:expr;)*) => {
        const CASES: &[(&str, Case)] = &[$((stringify!($name), $case)),*];

        $($(#[$comment])* #[test] fn $name() { explore(stringify!($name)); })*
    };
}

cases! {
    atomic_two_workers: Case {
        config: Config {
            modes: &[Atomic, Atomic],
            budget: Budget { crashes: 1, lost: 1, failures: 1, ..NOTHING },
            ..TWO
        },
        reaches: &[
            "everything is passed",
            "crash at begun",
            "crash at claimed",
            "crash at handled",
            "crash before the commit",
            "crash when recorded",
            "lost reply to a commit",
            "a commit without its worker",
            "the row changes between read and write",
            "a row locked by another",
            "retry",
            "duplicate",
            "in progress",
            "not due",
            "failed",
            "set aside",
            "exhausted",
        ],
        states: 46_906,
    };
    atomic_three_workers: Case {
        config: Config {
            modes: &[Atomic, Atomic, Atomic],
            log: &[&[0], &[0], &[0]],
            budget: Budget { crashes: 1, ..NOTHING },
            ..TWO
        },
        reaches: &["everything is passed", "duplicate", "crash before the commit"],
        states: 34_200,
    };
    /// A limit that ARCHITECTURE.md names: the claim rolls back with the crash, so the try is not counted.
    atomic_with_message_that_kills: Case {
        config: Config {
            modes: &[Atomic, Atomic],
            log: &[&[0]],
            budget: Budget { crashes: 3, ..NOTHING },
            ..TWO
        },
        reaches: &["everything is passed", "more starts than tries"],
        states: 921,
    };
    /// Even a callee that honours no key sees one call.
    lease_where_nothing_goes_wrong: Case {
        config: Config { modes: &[Lease, Lease, Lease], log: &[&[0], &[0], &[0]], ..TWO },
        reaches: &["everything is passed", "duplicate", "in progress"],
        states: 4591,
    };
    lease_with_crash_and_lost_reply: Case {
        config: Config { budget: Budget { crashes: 1, lost: 1, ..NOTHING }, ..TWO },
        reaches: &[
            "everything is passed",
            "crash at claimed",
            "crash at handled",
            "crash when recorded",
            "lost reply to a claim",
            "lost reply to a completion",
            "a request without its worker",
            "the row changes between read and write",
            "takeover",
            "duplicate",
            "in progress",
            "two effects",
        ],
        states: 61_369,
    };
    lease_with_crash_and_stop: Case {
        config: Config { budget: Budget { crashes: 1, stops: 1, ..NOTHING }, ..TWO },
        reaches: &[
            "everything is passed",
            "takeover",
            "a claim is given back",
            "a late holder is refused",
            "exhausted",
            "exhausted without a failed try",
            "two effects",
        ],
        states: 93_107,
    };
    lease_with_lost_reply_and_stop: Case {
        config: Config {
            log: &[&[0]],
            budget: Budget { lost: 1, stops: 1, moves: 1, ..NOTHING },
            ..TWO
        },
        reaches: &[
            "everything is passed",
            "lost reply to a claim",
            "a claim is given back",
            "a late holder is refused",
            "a partition is taken from a living worker",
        ],
        states: 29_259,
    };
    lease_with_failures_and_crash: Case {
        config: Config { budget: Budget { failures: 2, crashes: 1, ..NOTHING }, ..TWO },
        reaches: &["everything is passed", "retry", "not due", "failed", "set aside", "exhausted", "takeover"],
        states: 65_218,
    };
    lease_with_failures_and_stop: Case {
        config: Config { budget: Budget { failures: 2, stops: 1, ..NOTHING }, ..TWO },
        reaches: &["everything is passed", "a late holder is refused", "exhausted", "a claim is given back"],
        states: 94_303,
    };
    lease_three_workers: Case {
        config: Config { modes: &[Lease, Lease, Lease], budget: Budget { crashes: 1, ..NOTHING }, ..TWO },
        reaches: &["everything is passed", "takeover", "the row changes between read and write"],
        states: 18_852,
    };
    /// Code that blocks its thread, or a task that the handler has spawned: two may be at work, and still one counts.
    handlers_that_do_not_stop: Case {
        config: Config {
            budget: Budget { lost: 1, ..NOTHING },
            rules: Rules { stops: false, ..RULES },
            ..TWO
        },
        reaches: &["everything is passed", "two handlers run", "two effects", "a late holder is refused"],
        states: 80_479,
    };
    /// The same with an effect in the guard's database: the fence is in its transaction, so it stays one.
    hybrid_handlers_that_do_not_stop: Case {
        config: Config {
            modes: &[Hybrid, Hybrid],
            budget: Budget { stops: 1, ..NOTHING },
            rules: Rules { stops: false, ..RULES },
            ..TWO
        },
        reaches: &["everything is passed", "two handlers run", "a late holder is refused"],
        states: 16_721,
    };
    hybrid_with_crash_and_lost_reply: Case {
        config: Config {
            modes: &[Hybrid, Hybrid],
            budget: Budget { crashes: 1, lost: 1, ..NOTHING },
            ..TWO
        },
        reaches: &[
            "everything is passed",
            "crash before the commit",
            "lost reply to a commit",
            "a commit without its worker",
            "a late holder is refused",
        ],
        states: 55_883,
    };
    careful_with_message_that_kills: Case {
        config: Config {
            modes: &[Careful, Careful],
            log: &[&[0]],
            budget: Budget { crashes: 3, ..NOTHING },
            ..TWO
        },
        reaches: &["everything is passed", "retry", "exhausted without a failed try"],
        states: 3059,
    };
    careful_with_crash_and_lost_reply: Case {
        config: Config {
            modes: &[Careful, Careful],
            budget: Budget { crashes: 1, lost: 1, ..NOTHING },
            ..TWO
        },
        reaches: &[
            "everything is passed",
            "crash at begun",
            "crash before the commit",
            "lost reply to a commit",
            "a commit without its worker",
        ],
        states: 79_106,
    };
    careful_with_failures: Case {
        config: Config {
            modes: &[Careful, Careful],
            budget: Budget { failures: 2, stops: 1, ..NOTHING },
            ..TWO
        },
        reaches: &["everything is passed", "retry", "set aside", "exhausted"],
        states: 18_095,
    };
    /// The careful window of one worker meets another worker's ordinary transactions.
    careful_beside_atomic: Case {
        config: Config {
            modes: &[Careful, Atomic],
            budget: Budget { crashes: 1, lost: 1, ..NOTHING },
            ..TWO
        },
        reaches: &["everything is passed", "takeover", "a row locked by another", "a commit without its worker"],
        states: 44_156,
    };
    /// Two messages with one key and different payloads on one partition, and a copy of the first on another.
    offsets: Case {
        config: Config {
            log: &[&[0, 1], &[0]],
            budget: Budget { crashes: 1, ..NOTHING },
            ..TWO
        },
        reaches: &["everything is passed", "conflict", "duplicate", "decided out of order"],
        states: 23_722,
    };
    offsets_with_rebalance: Case {
        config: Config {
            log: &[&[0, 1]],
            budget: Budget { crashes: 1, moves: 1, ..NOTHING },
            ..TWO
        },
        reaches: &[
            "everything is passed",
            "conflict",
            "decided out of order",
            "a partition is taken from a living worker",
        ],
        states: 23_712,
    };
    people: Case {
        config: Config {
            operators: &[
                OperatorAction::Release,
                OperatorAction::Retry,
                OperatorAction::Complete,
                OperatorAction::Fail,
            ],
            sweeps: true,
            budget: Budget { operations: 1, crashes: 1, ..NOTHING },
            ..TWO
        },
        reaches: &["a person releases", "a person retries", "a person completes", "a person fails"],
        states: 25_106,
    };
    people_and_failures: Case {
        config: Config {
            operators: &[
                OperatorAction::Release,
                OperatorAction::Retry,
                OperatorAction::Complete,
                OperatorAction::Fail,
            ],
            sweeps: true,
            budget: Budget { operations: 1, failures: 1, ..NOTHING },
            ..TWO
        },
        reaches: &["a person releases", "a person retries", "a person completes", "a person fails", "exhausted"],
        states: 13_831,
    };
    purge_after_the_last_copy: Case {
        config: Config {
            modes: &[Atomic, Atomic],
            budget: Budget { purges: 1, crashes: 1, moves: 1, ..NOTHING },
            ..TWO
        },
        reaches: &["everything is passed", "purged when passed"],
        states: 9383,
    };
    /// A limit that the documentation names: the row of a job must outlive its last copy.
    purge_before_the_last_copy: Case {
        config: Config {
            modes: &[Atomic, Atomic],
            budget: Budget { purges: 1, crashes: 1, ..NOTHING },
            purge: Purge::Early,
            ..TWO
        },
        reaches: &["purged", "two effects"],
        states: 3555,
    };
    /// Outside, the callee's memory of the downstream key still makes one of all calls.
    purge_before_the_last_copy_of_a_lease: Case {
        config: Config {
            budget: Budget { purges: 1, stops: 1, ..NOTHING },
            purge: Purge::Early,
            ..TWO
        },
        reaches: &["purged", "two effects", "written anew after a purge"],
        states: 9175,
    };
}

fn case(name: &str) -> &'static Case {
    let (_, case) = CASES.iter().find(|(of, _)| *of == name).expect("a name of the list");
    case
}

/// Goes through every history of a case.
fn explore(name: &str) {
    let Case { config, reaches, states } = case(name);
    let checker = Guard::new(step, config.clone(), reaches).checker().spawn_bfs().join();
    println!(
        "{name}: {} states, {} steps, {} deep",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth()
    );
    let discoveries = checker.discoveries();
    for (property, path) in &discoveries {
        assert!(!properties::is_always(property), "{name}: not always: {property}\n{}", shown(path));
    }
    for property in *reaches {
        assert!(discoveries.contains_key(property), "{name}: never reached: {property}");
    }
    assert_eq!(
        checker.unique_state_count(),
        *states,
        "{name}: the number of states has changed; if that is meant, pin it"
    );
}

fn shown(path: &Path<World, Action>) -> String {
    let (actions, last) = (path.clone().into_actions(), path.last_state());
    let lines: Vec<_> = actions.iter().map(|action| format!("    {action:?}")).collect();
    format!("{}\n{last:?}", lines.join("\n"))
}

#[test]
fn all_that_can_be_reached_is_reached_somewhere() {
    let reached: BTreeSet<_> = CASES.iter().flat_map(|(_, case)| case.reaches).copied().collect();
    let all: BTreeSet<_> = properties::sometimes().collect();
    assert_eq!(reached, all);
}

/// Whether the case, with something broken, shows this promise broken; and by which history.
fn notices(broken_step: Step, config: Config, promise: &'static str) -> Option<String> {
    let wanted = HasDiscoveries::AnyOf(BTreeSet::from([promise]));
    let guard = Guard::new(broken_step, config, &[]);
    let checker = guard.checker().finish_when(wanted).target_state_count(2_000_000).spawn_bfs().join();
    checker.discovery(promise).map(|path| shown(&path))
}

#[test]
fn every_broken_step_is_noticed() {
    let mut unnoticed = Vec::new();
    for (what, broken_step, name, promise) in broken::STEPS {
        match notices(*broken_step, case(name).config.clone(), promise) {
            Some(trace) => println!("{what}: {promise}, after\n{trace}"),
            None => unnoticed.push(format!("{what}, in {name} as `{promise}`")),
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
}

#[test]
fn everything_broken_around_the_step_is_noticed() {
    let mut unnoticed = Vec::new();
    for (what, rules, name, promise) in broken::SURROUNDINGS {
        match notices(step, Config { rules: *rules, ..case(name).config.clone() }, promise) {
            Some(trace) => println!("{what}: {promise}, after\n{trace}"),
            None => unnoticed.push(format!("{what}, in {name} as `{promise}`")),
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
}

/// Wherever things have got to: if nothing more goes wrong, everything can still be decided and passed.
#[test]
fn every_history_can_still_end_well() {
    for name in [
        "atomic_two_workers",
        "lease_with_lost_reply_and_stop",
        "careful_with_message_that_kills",
        "careful_beside_atomic",
        "hybrid_handlers_that_do_not_stop",
        "offsets_with_rebalance",
        "people",
        "purge_before_the_last_copy",
    ] {
        let guard = Guard::new(step, case(name).config.clone(), &[]);
        let (worlds, ways) = graph(&guard);
        let ended = |world: &World| properties::is_passed(world) && world.tasks().next().is_none();
        let mut ends: Vec<bool> = worlds.iter().map(ended).collect();
        let mut open: VecDeque<usize> = (0..worlds.len()).filter(|index| ends[*index]).collect();
        while let Some(index) = open.pop_front() {
            for &before in &ways[index] {
                if !std::mem::replace(&mut ends[before], true) {
                    open.push_back(before);
                }
            }
        }
        let stuck = ends.iter().position(|ends| !ends);
        assert!(stuck.is_none(), "{name}: stuck in {:#?}", stuck.map(|index| &worlds[index]));
    }
}

/// All states, and for each from which others a good action leads there.
fn graph(guard: &Guard) -> (Vec<World>, Vec<Vec<usize>>) {
    let mut worlds = guard.init_states();
    let mut known: HashMap<World, usize> = worlds.iter().cloned().zip(0..).collect();
    let mut ways = vec![Vec::new(); worlds.len()];
    let (mut index, mut actions) = (0, Vec::new());
    while index < worlds.len() {
        guard.actions(&worlds[index], &mut actions);
        for action in actions.drain(..) {
            let Some(next) = guard.next_state(&worlds[index], action) else { continue };
            let to = *known.entry(next).or_insert_with_key(|next| {
                worlds.push(next.clone());
                ways.push(Vec::new());
                worlds.len() - 1
            });
            if action.is_good() {
                ways[to].push(index);
            }
        }
        index += 1;
    }
    (worlds, ways)
}
