//! What a handler returns is kept with its job, and given to whoever asks for it again.

use std::sync::Arc;

use idem_core::store::{Tx, sql};
use idem_core::{ConsumerName, EventKey, Guard, MAX_RESULT_BYTES, Outcome, Ran, RunGuarded, idempotent};

use crate::bench::{Bench, Failed, Order, delivery, each_engine, memory, order, round, run, run_one, until_ended};
use crate::subjects;
use crate::watched::Watched;

const LONG: usize = MAX_RESULT_BYTES;

fn receipt(event: &Order, attempt: u32) -> Result<String, Failed> {
    match event.act.as_str() {
        // With its two quotation marks it is too long.
        "long" => Ok("x".repeat(LONG - 1)),
        "again" if attempt == 1 => Err(Failed::Again),
        "never" => Err(Failed::Never),
        _ => Ok(format!("receipt of {}", event.id)),
    }
}

#[idempotent(key = "id", consumer = "atomic-receipt", backoff = "1ms..1ms")]
async fn atomic_receipt(event: Order, _tx: &mut Tx, job: &idem_core::Job) -> Result<String, Failed> {
    receipt(&event, job.attempt())
}

#[idempotent(key = "id", consumer = "lease-receipt", backoff = "1ms..1ms")]
async fn lease_receipt(event: Order, job: &idem_core::Job) -> Result<String, Failed> {
    receipt(&event, job.attempt())
}

#[idempotent(key = "id", consumer = "atomic-silent")]
async fn atomic_silent(_event: Order, _tx: &mut Tx) -> Result<(), Failed> {
    Ok(())
}

#[idempotent(key = "id", consumer = "lease-silent")]
async fn lease_silent(_event: Order) -> Result<(), Failed> {
    Ok(())
}

#[idempotent(key = "id", consumer = "atomic-all")]
async fn atomic_all(events: Vec<Order>, _tx: &mut Tx) -> Result<Vec<String>, Failed> {
    Ok(events.into_iter().map(|event| event.id).collect())
}

#[idempotent(key = "id", consumer = "lease-all")]
async fn lease_all(events: Vec<Order>) -> Result<Vec<String>, Failed> {
    Ok(events.into_iter().map(|event| event.id).collect())
}

fn text(ran: &Ran) -> Option<String> {
    ran.returned().transpose().expect("a text")
}

async fn kept(bench: &Bench, consumer: &str, key: &str) -> Option<Vec<u8>> {
    let (consumer, key) = (ConsumerName::new(consumer).unwrap(), EventKey::from_parts([key]).unwrap());
    bench.store.result(&consumer, &key).await.expect("the store works")
}

/// Runs one order through either kind of handler.
async fn ran(guard: &Guard, consumer: &str, order: &Order) -> Ran {
    match consumer {
        "atomic-receipt" => atomic_receipt.run(guard, order.clone()).await,
        _ => lease_receipt.run(guard, order.clone()).await,
    }
    .expect("it can be asked for")
}

const RECEIPTS: [&str; 2] = ["atomic-receipt", "lease-receipt"];

#[tokio::test]
async fn s1_a_duplicates_caller_gets_what_the_first_one_got() {
    for bench in each_engine().await {
        for consumer in RECEIPTS {
            let what = format!("{} {consumer}", bench.name);
            let guard = bench.guard();
            let first = ran(&guard, consumer, &order("A", "")).await;
            assert!(matches!(*first, Outcome::Completed { attempt: 1, .. }), "{what}: {first:?}");
            assert_eq!(text(&first).as_deref(), Some("receipt of A"), "{what}");
            // Another process, which has only the row.
            let again = ran(&bench.guard(), consumer, &order("A", "")).await;
            assert!(matches!(*again, Outcome::Duplicate(_)), "{what}: {again:?}");
            assert_eq!(text(&again).as_deref(), Some("receipt of A"), "{what}");
            assert_eq!(kept(&bench, consumer, "A").await.as_deref(), Some(&br#""receipt of A""#[..]), "{what}");
        }
    }
}

#[tokio::test]
async fn only_a_completed_job_has_a_result() {
    for bench in each_engine().await {
        for consumer in RECEIPTS {
            let what = format!("{} {consumer}", bench.name);
            let failed = ran(&bench.guard(), consumer, &order("A", "never")).await;
            assert!(matches!(*failed, Outcome::Failed { retry_in: None, .. }), "{what}: {failed:?}");
            assert_eq!(text(&failed), None, "{what}");
            assert_eq!(kept(&bench, consumer, "A").await, None, "{what}");
        }
    }
}

#[tokio::test]
async fn a_try_that_follows_a_failed_one_keeps_its_result() {
    let bench = memory().await;
    for consumer in RECEIPTS {
        let guarded = match consumer {
            "atomic-receipt" => bench.guard().bind(atomic_receipt),
            _ => bench.guard().bind(lease_receipt),
        }
        .unwrap();
        assert!(matches!(run_one(&guarded, &order("A", "again")).await, Outcome::Failed { attempt: 1, .. }));
        bench.subject.pass(std::time::Duration::from_secs(1)).await;
        assert!(matches!(run_one(&guarded, &order("A", "again")).await, Outcome::Completed { attempt: 2, .. }));
        assert!(kept(&bench, consumer, "A").await.is_some(), "{consumer}");
    }
}

#[tokio::test]
async fn what_is_too_long_to_keep_is_returned_once_and_known_by_its_hash() {
    let sqlite = subjects::sqlite().await;
    let guard = Guard::new(Arc::new(sqlite.store.clone()));
    for consumer in RECEIPTS {
        let fresh = ran(&guard, consumer, &order("A", "long")).await;
        assert_eq!(text(&fresh).map(|text| text.len()), Some(LONG - 1), "{consumer}");
        let again = ran(&guard, consumer, &order("A", "long")).await;
        assert!(matches!(*again, Outcome::Duplicate(_)), "{consumer}: {again:?}");
        assert_eq!(text(&again), None, "{consumer}: half a value would be another value");
        let (result, hash): (Option<Vec<u8>>, Option<String>) =
            sqlx::query_as("SELECT result, result_hash FROM processed_jobs WHERE consumer_name = ?1")
                .bind(consumer)
                .fetch_one(sqlite.store.pool())
                .await
                .unwrap();
        assert_eq!(result, None, "{consumer}");
        assert!(hash.is_some_and(|hash| hash.starts_with("sha256:")), "{consumer}");
    }
}

#[tokio::test]
async fn nothing_is_written_for_nothing() {
    let sqlite = subjects::sqlite().await;
    let (store, line) = Watched::new(Arc::new(sqlite.store.clone()));
    let guard = Guard::new(store);
    let ran = atomic_silent.run(&guard, order("A", "")).await.unwrap();
    assert_eq!(ran.returned::<serde_json::Value>().transpose().unwrap(), None);
    assert_eq!(line.take_calls(), ["begin", "tx.claim", "tx.commit"], "and no statement was sent for it");
    // To compare: a value costs one more.
    atomic_receipt.run(&guard, order("A", "")).await.unwrap();
    assert_eq!(line.take_calls(), ["begin", "tx.claim", "tx.keep_results", "tx.commit"]);
    lease_silent.run(&guard, order("A", "")).await.unwrap();
    assert_eq!(line.take_calls(), ["claim", "complete"]);
    lease_receipt.run(&guard, order("A", "")).await.unwrap();
    assert_eq!(line.take_calls(), ["claim", "complete"], "in lease mode it goes with the completion");
    let nothing = "SELECT count(*) FROM processed_jobs WHERE result IS NULL AND result_hash IS NULL";
    let rows: i64 = sqlx::query_scalar(nothing).fetch_one(sqlite.store.pool()).await.unwrap();
    assert_eq!(rows, 2);
}

#[tokio::test]
async fn what_a_batch_returns_is_no_ones_result() {
    for bench in each_engine().await {
        let (atomic, lease) = (bench.guard().bind(atomic_all).unwrap(), bench.guard().bind(lease_all).unwrap());
        for (guarded, consumer) in [(atomic, "atomic-all"), (lease, "lease-all")] {
            // One alone is a batch too.
            for ids in [&["A"][..], &["B", "C"]] {
                let orders: Vec<_> = ids.iter().map(|id| order(id, "")).collect();
                for (id, outcome) in run(&guarded, &orders).await {
                    let Outcome::Completed { output, .. } = &outcome else { panic!("{consumer} {id}: {outcome:?}") };
                    assert_eq!(output.as_ref().and_then(|output| output.as_json()), None, "{consumer} {id}");
                    assert_eq!(kept(&bench, consumer, &id).await, None, "{} {consumer} {id}", bench.name);
                }
            }
        }
    }
}

#[idempotent(key = "id", consumer = "many-receipts")]
async fn many(event: Order, tx: &mut Tx) -> Result<String, Failed> {
    tx.execute(sql("SELECT 1")).await?;
    receipt(&event, 1)
}

#[tokio::test]
async fn r1_each_job_of_a_batch_keeps_its_own_result_also_where_others_fail() {
    for bench in each_engine().await.into_iter().filter(|bench| bench.name != "memory") {
        let guarded = bench.guard().bind(many).unwrap();
        let bad = |number: usize| number == 3 || number == 39;
        let order_at = |number: usize| order(&format!("A-{number}"), if bad(number) { "never" } else { "" });
        // Once without savepoints at first, and once with them from the beginning.
        for first in [0, 40] {
            let orders: Vec<_> =
                (0..40).map(|number| Order { id: format!("A-{}", first + number), ..order_at(number) }).collect();
            let outcomes = run(&guarded, &orders).await;
            for (number, order) in orders.iter().enumerate() {
                let what = format!("{} {}", bench.name, order.id);
                let expected = (!bad(number)).then(|| format!("\"receipt of {}\"", order.id).into_bytes());
                let returned = match &outcomes[&order.id] {
                    Outcome::Completed { output, .. } => output.as_ref().and_then(|output| output.as_json()),
                    Outcome::Failed { .. } => None,
                    other => panic!("{what}: {other:?}"),
                };
                assert_eq!(returned, expected.as_deref(), "{what}");
                assert_eq!(kept(&bench, "many-receipts", &order.id).await, expected, "{what}");
            }
        }
    }
}

#[tokio::test]
async fn c2_a_result_is_found_although_the_reply_to_its_commit_was_lost() {
    for bench in each_engine().await {
        for consumer in RECEIPTS {
            let write = if consumer == "atomic-receipt" { "tx.commit" } else { "complete" };
            for takes_effect in [false, true] {
                let what = format!("{} {consumer} {takes_effect}", bench.name);
                let (store, line) = Watched::new(Arc::clone(&bench.store));
                line.cut(write, 1, takes_effect);
                let id = format!("A-{takes_effect}");
                let ran = ran(&Guard::new(store), consumer, &order(&id, "")).await;
                assert!(matches!(*ran, Outcome::Completed { attempt: 1, .. }), "{what}: {ran:?}");
                assert_eq!(text(&ran), Some(format!("receipt of {id}")), "{what}");
                assert_eq!(line.count(write), 2, "{what}: it was asked again");
            }
        }
    }
}

#[tokio::test]
async fn a_result_that_cannot_be_read_does_not_change_the_outcome() {
    let bench = memory().await;
    lease_receipt.run(&bench.guard(), order("A", "")).await.unwrap();
    let (store, line) = Watched::new(Arc::clone(&bench.store));
    line.cut("result", 1, false);
    let ran = lease_receipt.run(&Guard::new(store), order("A", "")).await.unwrap();
    assert!(matches!(*ran, Outcome::Duplicate(_)), "{ran:?}");
    assert_eq!(text(&ran), None);
}

#[tokio::test]
async fn a_result_of_another_type_is_an_error_and_no_value() {
    let bench = memory().await;
    let guard = bench.guard();
    let ran = lease_receipt.run(&guard, order("A", "")).await.unwrap();
    assert!(ran.returned::<u32>().is_some_and(|value| value.is_err()));
    // Nobody's result is another consumer's (K3).
    assert_eq!(kept(&bench, "atomic-receipt", "A").await, None);
    let guarded = guard.bind(lease_receipt).unwrap();
    let ended = until_ended(&guarded, vec![delivery(&guarded, &order("A", ""))]).await;
    assert!(matches!(ended["A"], Outcome::Duplicate(_)));
    assert_eq!(round(&guarded, Vec::new()).await.len(), 0);
}
