//! The process ends at each named point, is started again, and the promise is checked from outside (C2).
//!
//! Each crash happens in a child: this very program, told by environment what to work on and where to end.

mod support;

use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use idem_core::run::CrashPoint;
use idem_core::store::{StoreOptions, connect};
use idem_core::{Guard, Mode, Policy};
use serde::{Deserialize, Serialize};

use crate::support::handlers::{Kind, Order, World, delivery};
use crate::support::{Address, ENGINES, Place, child as child_with, drive, task, tell};

/// How many children live at once.
const AT_ONCE: usize = 4;

/// What a child works on.
#[derive(Clone, Serialize, Deserialize)]
struct Task {
    address: Address,
    kind: Kind,
    load: Load,
}

/// Which messages come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Load {
    One,
    Several,
    /// The first try of one of them fails.
    SeveralWithAFailure,
}

impl Load {
    const ALL: [Load; 3] = [Load::One, Load::Several, Load::SeveralWithAFailure];

    fn orders(self) -> Vec<Order> {
        let order = |id: &str, fails_once| Order { id: id.to_owned(), fails_once, ..Order::default() };
        match self {
            Load::One => vec![order("A", false)],
            Load::Several => ["A", "B", "C", "D"].map(|id| order(id, false)).to_vec(),
            Load::SeveralWithAFailure => ["A", "B", "C", "D"].map(|id| order(id, id == "B")).to_vec(),
        }
    }
}

/// One worker's life: asks for the jobs until all are decided.
async fn work(Task { address, kind, load }: Task) {
    let world = World::new(&address.outside, 0).await;
    let store = connect(&address.store, &StoreOptions::default()).await.expect("the store works");
    let policy = Policy::default().lease(Duration::from_millis(600)).backoff(Duration::ZERO, Duration::from_millis(1));
    let guarded = kind.bind(&Guard::new(store).state(world).policy(policy));
    let deliveries = load.orders().iter().map(|order| delivery(&guarded, order, "m")).collect();
    drive("a child", &guarded, deliveries, |_, _| {}).await;
}

/// Not a test of its own: what the child does. Without its task it has nothing to do.
#[tokio::test]
async fn child() {
    if let Some(task) = task() {
        work(task).await;
    }
}

/// Runs a child; whether it ended well.
async fn run_child(task: &Task, crash_at: Option<CrashPoint>) -> bool {
    let mut command = child_with(task);
    if let Some(point) = crash_at {
        command.env("IDEM_CRASH_AT", format!("{}:1", point.as_str()));
    }
    let output = tokio::task::spawn_blocking(move || command.output().expect("this program can be run again"));
    output.await.expect("no panic").status.success()
}

/// The points that a kind of handlers passes.
fn points(kind: Kind) -> &'static [CrashPoint] {
    match kind.mode() {
        Mode::Atomic => &CrashPoint::ALL,
        Mode::Lease => &[CrashPoint::Claimed, CrashPoint::Handled, CrashPoint::Recorded],
    }
}

/// How many tries a job may have had after one crash.
fn attempts(kind: Kind, load: Load, point: CrashPoint, fails_once: bool) -> std::ops::RangeInclusive<i64> {
    // A call for several that fails is repeated in parts, so that only the bad one of its events has failed.
    let failures = i64::from(fails_once);
    let crashes = match (kind.mode(), point) {
        // The claim is rolled back with the crash.
        (Mode::Atomic, _) => 0..=0,
        (Mode::Lease, CrashPoint::Claimed | CrashPoint::Handled) => 1..=1,
        // What was in the first write is recorded. Of handlers that run side by side, and of a batch that is called again in
        // parts, the others are not.
        (Mode::Lease, _) if load == Load::One => 0..=0,
        (Mode::Lease, _) if kind == Kind::LeaseBatch && load == Load::Several => 0..=0,
        (Mode::Lease, _) => 0..=1,
    };
    // A claim that the crash counted is a try too: what fails at its first is not asked to fail again.
    let at_least = 1 + failures.max(*crashes.start());
    at_least..=1 + failures + crashes.end()
}

async fn crash(place: &Place, kind: Kind, load: Load, point: CrashPoint) {
    let what = format!("{} {kind:?} {load:?} {point:?}", place.engine);
    let task = Task { address: place.address.clone(), kind, load };
    assert!(!run_child(&task, Some(point)).await, "{what}: it did not crash");
    assert!(run_child(&task, None).await, "{what}: it does not go on");
    assert!(run_child(&task, None).await, "{what}: a redelivery is not skipped");

    let (rows, outside) = (place.rows().await, place.outside().await);
    let orders = load.orders();
    let (effects, table) = match kind.mode() {
        Mode::Atomic => (&rows, "invoices"),
        Mode::Lease => (&outside, "charges"),
    };
    let total = effects.number(&format!("SELECT count(*) FROM {table}")).await;
    assert_eq!(total, orders.len() as i64, "{what}: effects");
    let completed = rows.number("SELECT count(*) FROM processed_jobs WHERE status = 'COMPLETED'").await;
    assert_eq!(completed, orders.len() as i64, "{what}: COMPLETED rows");
    assert_eq!(rows.number("SELECT count(*) FROM processed_jobs").await, completed, "{what}: rows");
    for order in orders {
        let id = &order.id;
        let column = if table == "invoices" { "id" } else { "job" };
        let mine = effects.number(&format!("SELECT count(*) FROM {table} WHERE {column} = '{id}'")).await;
        assert_eq!(mine, 1, "{what}: effects of {id}");
        let attempts_of = format!("SELECT attempts FROM processed_jobs WHERE idempotency_key = '{id}'");
        let tried = rows.number(&attempts_of).await;
        let promised = attempts(kind, load, point, order.fails_once);
        assert!(promised.contains(&tried), "{what}: {id} had {tried} tries, promised were {promised:?}");
        let calls = outside.number(&format!("SELECT count(*) FROM calls WHERE job = '{id}'")).await;
        match kind.mode() {
            Mode::Atomic => assert_eq!(calls, 0, "{what}"),
            // A claim that crashed before its handler began is a try without a call. Of handlers that run side by side, some
            // may not have begun when another has ended.
            Mode::Lease => {
                let side_by_side = kind == Kind::Lease && load != Load::One;
                let without = i64::from(point == CrashPoint::Claimed || side_by_side);
                // Within its first try a call for all four is repeated for two of them, and for one.
                let halved = kind == Kind::LeaseBatch && load == Load::SeveralWithAFailure;
                let repeated = if halved { 2 } else { 0 };
                assert!(
                    (tried - without..=tried + repeated).contains(&calls),
                    "{what}: {id} was called {calls} times in {tried} tries"
                );
                let one = kind == Kind::Lease && load == Load::One;
                let twice = i64::from(point == CrashPoint::Handled);
                assert!(!one || calls == 1 + twice, "{what}: only a crash between effect and completion calls again");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c2_a_crash_at_any_point_neither_loses_nor_doubles_an_effect() {
    let mut cases = Vec::new();
    for engine in ENGINES {
        for kind in Kind::ALL {
            for load in Load::ALL {
                cases.extend(points(kind).iter().map(|point| (engine, kind, load, *point)));
            }
        }
    }
    // Per engine, three loads for each kind of handlers: two that pass five points, two that pass three.
    let crashes = cases.len();
    assert_eq!(crashes, ENGINES.len() * 3 * (5 + 5 + 3 + 3));
    stream::iter(cases)
        .for_each_concurrent(AT_ONCE, |(engine, kind, load, point)| async move {
            crash(&Place::new(engine).await, kind, load, point).await;
        })
        .await;
    tell(&format!("crashes: {crashes} crashes on {} engines", ENGINES.len()));
}
