//! Batch handlers in lease mode: one bad event costs its neighbours nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use idem_core::{AlreadyDone, FailureKind, Guard, Job, Outcome, State, idempotent};

use crate::bench::{Failed, Order, World, memory, order, run, sqlite_row};
use crate::subjects;

#[idempotent(key = "id", consumer = "all", backoff = "1ms..1ms", attempts = 5)]
async fn all(events: Vec<Order>, jobs: &[Job], calls: State<AtomicU32>) -> Result<(), Failed> {
    calls.fetch_add(1, Ordering::SeqCst);
    assert!(events.iter().zip(jobs).all(|(event, job)| event.id == job.key().as_str()), "each job with its event");
    for event in events {
        match event.act.as_str() {
            "never" => return Err(Failed::Never),
            "panic" => panic!("on purpose"),
            _ => {}
        }
    }
    Ok(())
}

#[tokio::test]
async fn r1_one_bad_event_of_many_fails_alone_after_few_calls() {
    for (act, kind) in [("never", FailureKind::Terminal), ("panic", FailureKind::Panicked)] {
        for place in [0, 20, 31] {
            let bench = memory().await;
            let guarded = bench.guard().state(AtomicU32::new(0)).bind(all).unwrap();
            let orders: Vec<_> =
                (0..32).map(|number| order(&format!("A-{number}"), if number == place { act } else { "" })).collect();
            let outcomes = run(&guarded, &orders).await;
            for (number, order) in orders.iter().enumerate() {
                match &outcomes[&order.id] {
                    Outcome::Completed { attempt: 1, takeover: false, .. } if number != place => {}
                    Outcome::Failed { attempt: 1, failure, .. } if number == place => assert_eq!(failure.kind, kind),
                    other => panic!("{act} {place}, {}: {other:?}", order.id),
                }
            }
        }
    }
}

#[tokio::test]
async fn calls_grow_with_the_logarithm_of_the_batch() {
    for (events, most) in [(1, 1), (2, 3), (64, 13), (512, 19)] {
        let bench = memory().await;
        let calls = State::new(AtomicU32::new(0));
        let guarded = bench.guard().state(CallsOf(calls.clone())).bind(counted).unwrap();
        let orders: Vec<_> = (0..events)
            .map(|number| order(&format!("A-{number}"), if number == events / 2 { "never" } else { "" }))
            .collect();
        let outcomes = run(&guarded, &orders).await;
        let failed = outcomes.values().filter(|outcome| matches!(outcome, Outcome::Failed { .. })).count();
        assert_eq!((failed, outcomes.len()), (1, events));
        assert_eq!(calls.load(Ordering::SeqCst), most, "of {events}");
    }
}

struct CallsOf(State<AtomicU32>);

#[idempotent(key = "id", consumer = "counted")]
async fn counted(events: Vec<Order>, jobs: &[Job], calls: State<CallsOf>) -> Result<(), Failed> {
    all::body(events, jobs, calls.0.clone()).await
}

#[tokio::test]
async fn several_bad_events_fail_and_nobody_else() {
    let bench = memory().await;
    let guarded = bench.guard().state(AtomicU32::new(0)).bind(all).unwrap();
    let act = |number: usize| match number {
        3 | 17 => "never",
        18 => "panic",
        _ => "",
    };
    let orders: Vec<_> = (0..40).map(|number| order(&format!("A-{number}"), act(number))).collect();
    let outcomes = run(&guarded, &orders).await;
    for (number, order) in orders.iter().enumerate() {
        let failed = matches!(outcomes[&order.id], Outcome::Failed { attempt: 1, .. });
        let completed = matches!(outcomes[&order.id], Outcome::Completed { attempt: 1, .. });
        assert_eq!((failed, completed), (!act(number).is_empty(), act(number).is_empty()), "{}", order.id);
    }
}

/// One transaction of its own for each call, as a batch handler in lease mode should have it.
#[idempotent(key = "id", consumer = "booked", domain_unique = "bookings.id")]
async fn booked(events: Vec<Order>, pool: State<sqlx::SqlitePool>, world: State<World>) -> Result<(), Failed> {
    let mut tx = pool.begin().await?;
    for event in &events {
        world.begins(&event.id);
        sqlx::query("INSERT INTO bookings (id) VALUES (?1)").bind(&event.id).execute(&mut *tx).await?;
    }
    tx.commit().await?;
    Ok(())
}

#[tokio::test]
async fn t3_the_domains_constraint_completes_the_one_that_was_done_already() {
    let sqlite = subjects::sqlite().await;
    let pool = sqlite.store.pool().clone();
    sqlx::raw_sql("CREATE TABLE bookings (id TEXT NOT NULL UNIQUE); INSERT INTO bookings VALUES ('A-5')")
        .execute(&pool)
        .await
        .unwrap();
    let guard = Guard::new(Arc::new(sqlite.store.clone())).state(pool.clone()).state(World::default());
    let guarded = guard.bind(booked).unwrap();
    let orders: Vec<_> = (0..8).map(|number| order(&format!("A-{number}"), "")).collect();
    let outcomes = run(&guarded, &orders).await;
    for order in &orders {
        let expected = (order.id == "A-5").then_some(AlreadyDone::Domain);
        match &outcomes[&order.id] {
            Outcome::Completed { attempt: 1, already_done, .. } => assert_eq!(*already_done, expected, "{}", order.id),
            other => panic!("{}: {other:?}", order.id),
        }
        assert_eq!(sqlite_row(&sqlite, &order.id).await, Some(("COMPLETED".to_owned(), 1, None)));
    }
    let bookings: i64 = sqlx::query_scalar("SELECT count(*) FROM bookings").fetch_one(&pool).await.unwrap();
    assert_eq!(bookings, 8);
}
