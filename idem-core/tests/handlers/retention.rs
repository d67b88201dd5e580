//! Rows that are kept long enough go; what may still be needed stays.

use std::sync::Arc;
use std::time::Duration;

use idem_core::store::contract::Subject;
use idem_core::store::retention::{self, Purged, Retention};
use idem_core::{Guard, Job, Outcome, State, idempotent};

use crate::bench::{Failed, Order, World, order, run, run_one};
use crate::subjects::{self, request, terms};

const HOUR: Duration = Duration::from_secs(3600);

#[idempotent(key = "id", consumer = "kept", attempts = 2, backoff = "1h..1h")]
async fn kept(event: Order, job: &Job, world: State<World>) -> Result<(), Failed> {
    world.begins(&event.id);
    match event.act.as_str() {
        "again" if job.attempt() == 1 => Err(Failed::Again),
        "never" => Err(Failed::Never),
        _ => Ok(()),
    }
}

#[tokio::test]
async fn what_ended_long_ago_goes_and_nothing_else_does() {
    let sqlite = subjects::sqlite().await;
    let (store, world) = (sqlite.store(), World::default());
    let guarded = Guard::new(Arc::clone(&store)).state(world.clone()).bind(kept).unwrap();
    let mut orders: Vec<_> = (0..25).map(|number| order(&format!("old-{number}"), "")).collect();
    orders.extend([order("failed", "never"), order("waits", "again")]);
    run(&guarded, &orders).await;
    // A worker holds one, and another consumer has ended one.
    store.claim(&terms("kept"), &[request("held", 1)]).await.expect("the store works");
    let elsewhere = terms("elsewhere");
    store.claim(&elsewhere, &[request("other", 2)]).await.expect("the store works");
    let operation = idem_core::machine::OperatorAction::Complete;
    sqlite.pass(2 * HOUR).await;
    store.operate(&elsewhere, &subjects::key("other"), operation, "").await.expect("the store works");
    sqlite.pass(3 * HOUR).await;
    run(&guarded, &[order("young", "")]).await;

    let retention = Retention::new(2 * HOUR, HOUR).unwrap().batch(10).pause(Duration::from_millis(1));
    let of_consumer = retention.clone().consumer(terms("kept").consumer);
    let purged = retention::purge(&*store, &of_consumer).await.expect("the store works");
    assert_eq!(purged, Purged { rows: 26, batches: 3 }, "25 completed and one that failed for good");
    let left: Vec<String> = sqlx::query_scalar("SELECT idempotency_key FROM processed_jobs ORDER BY idempotency_key")
        .fetch_all(sqlite.store.pool())
        .await
        .unwrap();
    assert_eq!(left, ["held", "other", "waits", "young"]);
    assert_eq!(retention::purge(&*store, &retention).await.expect("the store works"), Purged { rows: 1, batches: 1 });
    assert_eq!(retention::purge(&*store, &retention).await.expect("the store works"), Purged::default());

    // What stayed is what it was; what is gone guards nothing any more.
    assert!(matches!(run_one(&guarded, &order("young", "")).await, Outcome::Duplicate(_)));
    assert!(matches!(run_one(&guarded, &order("waits", "again")).await, Outcome::Completed { attempt: 2, .. }));
    let before = world.runs().len();
    assert!(matches!(run_one(&guarded, &order("old-0", "")).await, Outcome::Completed { attempt: 1, .. }));
    assert_eq!(world.runs().len(), before + 1);
}
