//! Each job of a claim has a deadline of its own (L2).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use idem_core::{Clock, Guard, Job, Outcome, State, SystemClock, Undecided, idempotent};
use tokio_util::sync::CancellationToken;

use crate::bench::{Failed, Order, World, delivery, is_completed, order, postgres_row, run_one, until_ended};
use crate::subjects;

const LEASE: Duration = Duration::from_millis(1500);

#[idempotent(key = "id", consumer = "renewed", lease = "1500ms", max_run = "60s")]
async fn renewed(event: Order, job: &Job, world: State<World>) -> Result<(), Failed> {
    world.begins(&event.id);
    if event.act == "wait" {
        tokio::select! {
            () = world.passes_gate() => {}
            () = job.cancelled() => {
                world.told.fetch_add(1, Ordering::SeqCst);
                std::future::pending().await
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn l2_a_job_that_cannot_be_renewed_is_dropped_in_time_and_the_others_go_on() {
    let postgres = subjects::postgres().await;
    let world = World::default();
    let guarded = Guard::new(Arc::new(postgres.store.clone())).state(world.clone()).bind(renewed).unwrap();
    let (decided, mut outcomes) = tokio::sync::mpsc::unbounded_channel();
    let running = tokio::spawn({
        let guarded = guarded.clone();
        async move {
            let clock = SystemClock;
            let deliveries = ["A", "B", "C"].map(|id| delivery(&guarded, &order(id, "wait"))).into();
            let since = clock.monotonic();
            let report = |delivery, outcome| drop(decided.send((clock.monotonic() - since, delivery, outcome)));
            guarded.run(deliveries, &CancellationToken::new(), &report).await;
        }
    });
    world.has_begun(3).await;
    // Somebody looks at one row, as an operator's statement would.
    let mut other = postgres.store.pool().begin().await.unwrap();
    sqlx::query("SELECT 1 FROM processed_jobs WHERE idempotency_key = 'B' FOR UPDATE")
        .execute(&mut *other)
        .await
        .unwrap();

    let (after, delivery, outcome) = outcomes.recv().await.expect("one is decided");
    assert_eq!(delivery.key().as_str(), "B");
    assert!(matches!(outcome, Outcome::Undecided(Undecided::Unavailable(_))), "{outcome:?}");
    // A renewal may have got through before the row was locked; then its lease counts from there.
    assert!(after < LEASE + LEASE / 3, "it is gone before its lease ends: {after:?}");
    assert_eq!(world.was_told(), 1, "only this one was told, and before it was dropped");

    // The others live on renewals: beyond their first leases.
    let long_after = SystemClock.monotonic() + LEASE;
    while SystemClock.monotonic() < long_after {
        for id in ["A", "C"] {
            let found = run_one(&guarded, &order(id, "wait")).await;
            assert!(matches!(found, Outcome::InProgress { .. }), "{id}: {found:?}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(outcomes.try_recv().is_err(), "nothing else is decided");
    assert_eq!(world.was_told(), 1);
    world.open_gate(2);
    running.await.unwrap();
    for _ in 0..2 {
        let (_, delivery, outcome) = outcomes.recv().await.expect("the others are decided");
        assert!(is_completed(&outcome), "{}: {outcome:?}", delivery.key());
    }

    // The row's own: its try did not count.
    other.rollback().await.unwrap();
    world.open_gate(1);
    let ended = until_ended(&guarded, vec![delivery]).await;
    assert!(matches!(ended["B"], Outcome::Completed { attempt: 1, .. }), "{ended:?}");
    assert_eq!(postgres_row(&postgres, "B").await.unwrap().1, 1);
}
