//! Duplicates: where they came from, and how they are counted.

use std::sync::Arc;
use std::time::Duration;

use idem_core::store::Tx;
use idem_core::{ConsumerName, DuplicateKind, Guard, Guarded, Outcome, idempotent};
use tokio_util::sync::CancellationToken;

use crate::bench::{Bench, Failed, Order, delivery_of, each_engine, memory, order, replay_of, run, run_one};
use crate::subjects::key;
use crate::watched::Watched;

#[idempotent(key = "id", consumer = "atomic")]
async fn atomic(_event: Order, _tx: &mut Tx) -> Result<(), Failed> {
    Ok(())
}

#[idempotent(key = "id", consumer = "lease")]
async fn lease(_event: Order) -> Result<(), Failed> {
    Ok(())
}

fn handlers(guard: &Guard) -> [Guarded; 2] {
    [guard.bind(atomic).unwrap(), guard.bind(lease).unwrap()]
}

async fn counted(bench: &Bench, consumer: &str, id: &str) -> u64 {
    bench.subject.duplicates(&ConsumerName::new(consumer).unwrap(), &key(id)).await
}

#[tokio::test]
async fn c4_a_duplicate_is_told_by_where_it_came_from_and_counted_on_its_row() {
    for bench in each_engine().await {
        let guard = bench.guard();
        for guarded in handlers(&guard) {
            let what = format!("{} {}", bench.name, guarded.spec().consumer);
            let a = order("A", "");
            let first = guarded.run_one(delivery_of(&guarded, &a, "orders/0/1"), &CancellationToken::new()).await;
            assert!(matches!(first, Outcome::Completed { .. }), "{what}: {first:?}");
            for (delivery, expected) in [
                (delivery_of(&guarded, &a, "orders/0/1"), DuplicateKind::Redelivery),
                (delivery_of(&guarded, &a, "orders/0/2"), DuplicateKind::Producer),
                (replay_of(&guarded, &a, "orders/0/3"), DuplicateKind::Replay),
                // Sent again by a person although it was the same place: that person wants to see it.
                (replay_of(&guarded, &a, "orders/0/1"), DuplicateKind::Replay),
            ] {
                let outcome = guarded.run_one(delivery, &CancellationToken::new()).await;
                assert!(
                    matches!(outcome, Outcome::Duplicate(kind) if kind == expected),
                    "{what}: {outcome:?}, expected {expected:?}"
                );
            }
            guard.flush().await.expect("the store works");
            assert_eq!(counted(&bench, guarded.spec().consumer, "A").await, 4, "{what}");
            guard.flush().await.expect("the store works");
            assert_eq!(counted(&bench, guarded.spec().consumer, "A").await, 4, "{what}: once each");
        }
    }
}

#[tokio::test]
async fn a_row_of_a_first_try_or_another_payload_counts_no_duplicate() {
    let bench = memory().await;
    let guard = bench.guard();
    for guarded in handlers(&guard) {
        run_one(&guarded, &order("A", "")).await;
        let conflict = run_one(&guarded, &order("A", "another payload")).await;
        assert!(matches!(conflict, Outcome::Conflict), "{conflict:?}");
        guard.flush().await.expect("the store works");
        assert_eq!(counted(&bench, guarded.spec().consumer, "A").await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn counts_are_written_by_themselves_within_about_a_second() {
    let bench = memory().await;
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    let guard = Guard::new(store);
    let [guarded, _] = handlers(&guard);
    run_one(&guarded, &order("A", "")).await;
    for second in 1..=2 {
        for _ in 0..50 {
            run_one(&guarded, &order("A", "")).await;
        }
        let before = 50 * (second - 1);
        assert_eq!(counted(&bench, "atomic", "A").await, before, "not with each of them");
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert_eq!(counted(&bench, "atomic", "A").await, before + 50, "in second {second}");
    }
    assert_eq!(line.count("count_duplicates"), 2, "one statement a second");
}

#[tokio::test(start_paused = true)]
async fn a_storm_of_duplicates_costs_one_bounded_statement() {
    let bench = memory().await;
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    let guard = Guard::new(store);
    let [guarded, _] = handlers(&guard);
    let orders: Vec<_> = (0..3000).map(|number| order(&format!("A-{number}"), "")).collect();
    for _ in 0..2 {
        run(&guarded, &orders).await;
    }
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(line.count("count_duplicates"), 1);
    let mut sum = 0;
    for order in &orders {
        sum += counted(&bench, "atomic", &order.id).await;
    }
    assert_eq!(sum, 1000, "a replayed topic must not write every row once more");
}

#[tokio::test(start_paused = true)]
async fn f3_counts_that_cannot_be_written_are_dropped_and_harm_nothing() {
    let bench = memory().await;
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    let guard = Guard::new(store);
    let [guarded, _] = handlers(&guard);
    run_one(&guarded, &order("A", "")).await;
    line.cut("count_duplicates", 1, false);
    for expected in [0, 1] {
        assert!(matches!(run_one(&guarded, &order("A", "")).await, Outcome::Duplicate(_)));
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert_eq!(counted(&bench, "atomic", "A").await, expected);
    }
}
