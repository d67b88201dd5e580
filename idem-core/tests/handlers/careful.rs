//! Messages that may have killed a process run with care: their attempts are counted before they run.

use std::sync::Arc;
use std::time::Duration;

use idem_core::machine::{Record, State as RowState};
use idem_core::store::{Engine, Store, StoreOptions, Tx, connect, sql};
use idem_core::{Delivery, Guard, Guarded, Job, Outcome, Policy, State, Undecided, idempotent};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::bench::{
    self, Bench, Failed, Order, World, delivery, each_engine, is_completed, memory, order, round, run_child,
    until_ended,
};
use crate::subjects::{self, Folder, Schema, key, terms};
use crate::watched::Watched;

#[idempotent(key = "id", consumer = "careful", attempts = 3, backoff = "1ms..1ms", max_run = "60s")]
async fn careful(event: Order, tx: &mut Tx, job: &Job, world: State<World>) -> Result<u32, Failed> {
    world.begins(&event.id);
    let _inside = world.enter("");
    if tx.engine() != Engine::Memory {
        tx.execute(sql("INSERT INTO effects (id) VALUES ($1)").bind(&event.id)).await?;
    }
    match event.act.as_str() {
        "kill" => std::process::abort(),
        "again" => return Err(Failed::Again),
        "wait" => world.passes_gate().await,
        "rest" => tokio::time::sleep(Duration::from_millis(5)).await,
        _ => {}
    }
    Ok(job.attempt())
}

const EFFECTS: &str = "CREATE TABLE effects (id varchar(100) NOT NULL)";

fn bind(store: Arc<dyn Store>, world: &World) -> Guarded {
    let policy = Policy::default().lease(Duration::from_millis(400));
    Guard::new(store).policy(policy).state(world.clone()).bind(careful).unwrap()
}

fn with_care(guarded: &Guarded, order: &Order) -> Delivery {
    delivery(guarded, order).with_care()
}

async fn run_one_with_care(guarded: &Guarded, order: &Order) -> Outcome {
    guarded.run_one(with_care(guarded, order), &CancellationToken::new()).await
}

async fn row(bench: &Bench, id: &str) -> RowState {
    bench.store.read(&terms("careful").consumer, &[key(id)]).await.expect("the store works")[0]
}

fn attempts(row: &RowState) -> u32 {
    row.record().map_or(0, |record| record.attempts)
}

// ---- processes that die

/// Where a child works.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    url: String,
}

const NEIGHBOURS: [&str; 3] = ["A", "C", "D"];

/// One worker's life: all of its messages may have been running when an earlier one ended.
pub async fn work(Task { url }: Task) {
    let store = connect(&url, &StoreOptions::default()).await.expect("the store works");
    let guarded = bind(store, &World::default());
    let orders = [order("A", ""), order("B", "kill"), order("C", ""), order("D", "")];
    let deliveries = orders.iter().map(|order| with_care(&guarded, order)).collect();
    let ended = until_ended(&guarded, deliveries).await;
    assert!(matches!(ended["B"], Outcome::Exhausted { attempts: 3, .. }), "{:?}", ended["B"]);
    for id in NEIGHBOURS {
        let done = matches!(ended[id], Outcome::Completed { .. } | Outcome::Duplicate(_));
        assert!(done, "{id}: {:?}", ended[id]);
    }
}

async fn a_killer_runs_out_of_attempts(engine: Engine, url: &str) {
    let task = bench::Task::Careful(Task { url: url.to_owned() });
    let store = connect(url, &StoreOptions::default()).await.expect("the store works");
    store.migrate().await.expect("the tables can be made");
    let mut tx = store.begin().await.unwrap();
    tx.execute(sql(EFFECTS)).await.unwrap();
    tx.into_inner().commit().await.unwrap();
    let mut kills = 0;
    while !run_child(&task).await {
        kills += 1;
        assert!(kills <= 3, "{engine}: it kills for ever");
    }
    assert_eq!(kills, 3, "{engine}: as many as it has attempts");
    let keys = ["A", "B", "C", "D"].map(key);
    let rows = store.read(&terms("careful").consumer, &keys).await.unwrap();
    for (key, row) in keys.iter().zip(&rows) {
        match key.as_str() {
            "B" => assert!(matches!(row, RowState::Failed { record: Record { attempts: 3, .. }, .. }), "{row:?}"),
            _ => {
                assert!(matches!(row, RowState::Completed { record: Record { attempts: 1, .. }, .. }), "{key}: {row:?}")
            }
        }
    }
    let mut tx = store.begin().await.unwrap();
    // Each neighbour's effect once, and nothing of the one that kills.
    let once = "DELETE FROM effects WHERE id IN ('A', 'C', 'D')";
    assert_eq!(tx.execute(sql(once)).await.unwrap(), 3, "{engine}");
    assert_eq!(tx.execute(sql("DELETE FROM effects")).await.unwrap(), 0, "{engine}");
}

#[tokio::test]
async fn c2_a_message_that_kills_its_process_runs_out_of_attempts_on_sqlite() {
    let folder = Folder::new();
    a_killer_runs_out_of_attempts(Engine::Sqlite, &folder.url()).await;
}

#[tokio::test]
async fn c2_a_message_that_kills_its_process_runs_out_of_attempts_on_postgres() {
    let schema = Schema::new().await;
    a_killer_runs_out_of_attempts(Engine::Postgres, &schema.url).await;
}

// ---- attempts

async fn with_effects(bench: &Bench) {
    if bench.name != "memory" {
        let mut tx = bench.store.begin().await.unwrap();
        tx.execute(sql(EFFECTS)).await.unwrap();
        tx.into_inner().commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_run_that_is_dropped_has_counted_its_attempt() {
    let sqlite = memory().await;
    let world = World::default();
    let guarded = bind(Arc::clone(&sqlite.store), &world);
    let running = tokio::spawn({
        let guarded = guarded.clone();
        async move { run_one_with_care(&guarded, &order("A", "wait")).await }
    });
    world.has_begun(1).await;
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    assert_eq!(attempts(&row(&sqlite, "A").await), 1);
    assert!(matches!(row(&sqlite, "A").await, RowState::Processing { .. }));
    world.open_gate(1);
    sqlite.subject.pass(Duration::from_secs(1)).await;
    let outcome = run_one_with_care(&guarded, &order("A", "wait")).await;
    assert!(matches!(outcome, Outcome::Completed { attempt: 2, takeover: true, .. }), "{outcome:?}");
}

#[tokio::test]
async fn a_careful_run_is_a_run_like_others() {
    for bench in each_engine().await {
        with_effects(&bench).await;
        let world = World::default();
        let guarded = bind(Arc::clone(&bench.store), &world);
        let outcome = run_one_with_care(&guarded, &order("A", "")).await;
        assert!(is_completed(&outcome), "{}: {outcome:?}", bench.name);
        let kept = bench.store.result(&terms("careful").consumer, &key("A")).await.unwrap();
        assert_eq!(kept.as_deref(), Some(&b"1"[..]), "{}: its result is kept", bench.name);
        let again = run_one_with_care(&guarded, &order("A", "")).await;
        assert!(matches!(again, Outcome::Duplicate(_)), "{}: {again:?}", bench.name);
        assert_eq!(world.runs(), ["A"]);
    }
}

#[tokio::test]
async fn r2_a_failure_counts_once() {
    for bench in each_engine().await {
        with_effects(&bench).await;
        let guarded = bind(Arc::clone(&bench.store), &World::default());
        let mut tries = Vec::new();
        let error = loop {
            match run_one_with_care(&guarded, &order("A", "again")).await {
                Outcome::Failed { attempt, retry_in, .. } => tries.push((attempt, retry_in.is_some())),
                Outcome::NotDue { wait } => bench.subject.pass(wait).await,
                Outcome::Exhausted { attempts: 3, error } => break error,
                other => panic!("{}: {other:?}", bench.name),
            }
        };
        assert_eq!(tries, [(1, true), (2, true), (3, false)], "{}", bench.name);
        assert_eq!(error.as_deref(), Some("try again"), "{}", bench.name);
    }
}

#[tokio::test]
async fn a_careful_run_that_is_stopped_gives_its_claim_and_its_attempt_back() {
    for bench in each_engine().await {
        with_effects(&bench).await;
        let world = World::default();
        let guarded = bind(Arc::clone(&bench.store), &world);
        let stop = CancellationToken::new();
        let running = tokio::spawn({
            let (guarded, stop) = (guarded.clone(), stop.clone());
            async move { guarded.run_one(with_care(&guarded, &order("A", "wait")), &stop).await }
        });
        world.has_begun(1).await;
        stop.cancel();
        let outcome = running.await.unwrap();
        assert!(matches!(outcome, Outcome::Undecided(Undecided::Cancelled)), "{}: {outcome:?}", bench.name);
        let left = row(&bench, "A").await;
        assert!(matches!(left, RowState::Received(Record { attempts: 0, .. })), "{}: {left:?}", bench.name);
        // The next process need not wait for a lease.
        world.open_gate(1);
        let outcome = run_one_with_care(&guarded, &order("A", "wait")).await;
        assert!(matches!(outcome, Outcome::Completed { attempt: 1, .. }), "{}: {outcome:?}", bench.name);
    }
}

#[tokio::test]
async fn an_outage_costs_no_attempt() {
    let bench = memory().await;
    for (call, takes_effect) in [
        ("claim", false),
        ("claim", true),
        ("begin", false),
        ("tx.claim", false),
        ("tx.commit", false),
        ("tx.commit", true),
    ] {
        let what = format!("{call} {takes_effect}");
        let (store, line) = Watched::new(Arc::clone(&bench.store));
        let guarded = bind(store, &World::default());
        line.cut(call, 1, takes_effect);
        // The store stays away for as long as anybody asks whether it is back.
        line.cut("ping", 1, false);
        let mut decided = round(&guarded, vec![with_care(&guarded, &order(&what, ""))]).await;
        let (again, outcome) = decided.remove(0);
        assert!(matches!(outcome, Outcome::Undecided(Undecided::Unavailable(_))), "{what}: {outcome:?}");
        // For longer than the lease.
        bench.subject.pass(Duration::from_secs(60)).await;
        let ended = until_ended(&guarded, vec![again]).await;
        assert!(matches!(ended[&what], Outcome::Completed { attempt: 1, .. }), "{what}: {ended:?}");
        assert_eq!(attempts(&row(&bench, &what).await), 1, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn careful_messages_run_one_at_a_time_and_others_beside_them() {
    let postgres = subjects::postgres().await;
    bench::execute(&postgres, EFFECTS).await;
    let world = World::default();
    let guarded = bind(Arc::new(postgres.store.clone()), &world);
    let runs = (0..8).map(|task| {
        let guarded = guarded.clone();
        tokio::spawn(async move {
            let ids = (0..3).map(|number| format!("{task}-{number}"));
            let deliveries = ids.map(|id| with_care(&guarded, &order(&id, "rest"))).collect();
            for (id, outcome) in until_ended(&guarded, deliveries).await {
                assert!(is_completed(&outcome), "{id}: {outcome:?}");
            }
        })
    });
    for ended in futures_util::future::join_all(runs).await {
        ended.expect("no panic");
    }
    assert_eq!(world.runs().len(), 24);
    assert_eq!(world.most_inside(), 1);

    // A careful one that takes long holds up no message that is not.
    let waits = tokio::spawn({
        let guarded = guarded.clone();
        async move { run_one_with_care(&guarded, &order("long", "wait")).await }
    });
    world.has_begun(25).await;
    assert!(is_completed(&bench::run_one(&guarded, &order("other", "")).await));
    world.open_gate(1);
    assert!(is_completed(&waits.await.unwrap()));
}
