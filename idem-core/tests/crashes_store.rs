//! PostgreSQL dies under the store, and comes back.
//!
//! These tests need a server that they may kill: `IDEM_TEST_PG_CTL` is the command that does it, as scripts/test sets it.
//! Without it they are skipped, and counted as such.

#[path = "stores/subjects.rs"]
mod subjects;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use idem_core::machine::{Decision, State};
use idem_core::store::contract::{claim_in, commit};
use idem_core::store::{PgStore, Store, StoreErrorKind, sql};
use sqlx::AssertSqlSafe;
use tokio::time::{sleep, timeout};

use crate::subjects::{key, postgres, postgres_url, request, terms};

type Test = (&'static str, fn() -> Pin<Box<dyn Future<Output = ()>>>);

const TESTS: [Test; 2] = [
    ("a_transaction_that_the_server_took_along_is_as_if_it_had_not_been", || Box::pin(in_a_transaction())),
    ("what_was_answered_is_there_after_the_crash", || Box::pin(between_calls())),
];

const RECOVERY: Duration = Duration::from_secs(60);

/// A harness that can skip when it runs, which Rust's own cannot.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let chosen: Vec<&Test> = TESTS
        .iter()
        .filter(|(name, _)| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())))
        .collect();
    if arguments.iter().any(|argument| argument == "--list") {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", chosen.len());
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, test) in &chosen {
        let verdict = if std::env::var("IDEM_TEST_PG_CTL").is_err() {
            skipped += 1;
            "ignored: IDEM_TEST_PG_CTL, by which a test restarts its PostgreSQL, is not set"
        } else if passes(*test) {
            passed += 1;
            "ok"
        } else {
            failed += 1;
            "FAILED"
        };
        println!("test {name} ... {verdict}");
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {failed} failed; {skipped} ignored; 0 measured; 0 filtered out\n"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn passes(test: fn() -> Pin<Box<dyn Future<Output = ()>>>) -> bool {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    runtime.block_on(AssertUnwindSafe(test()).catch_unwind()).is_ok()
}

/// Kills the server as a power failure does, and starts it again.
async fn restart() {
    let control = std::env::var("IDEM_TEST_PG_CTL").expect("checked before");
    let restarted = tokio::task::spawn_blocking(move || {
        Command::new("sh").arg("-c").arg(format!("{control} restart -m immediate")).output().expect("there is a shell")
    });
    let output = restarted.await.expect("no panic");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Repeats a claim that the store could not answer, as the runtime does.
async fn claim_again(store: &PgStore, consumer: &str, text: &str, number: u128) -> Decision {
    let asking = async {
        loop {
            match store.claim(&terms(consumer), &[request(text, number)]).await {
                Ok(answers) => return answers[0].decision,
                Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}"),
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(RECOVERY, asking).await.expect("the store recovers")
}

async fn in_a_transaction() {
    assert!(!postgres_url().is_empty());
    let subject = postgres().await;
    let store = &subject.store;
    sqlx::raw_sql("CREATE TABLE invoices (order_id text PRIMARY KEY)").execute(store.pool()).await.expect("it works");
    let terms = terms("invoice");
    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("order", 1)]).await.expect("the store works");
    tx.execute(sql("INSERT INTO invoices VALUES ('order')")).await.expect("the store works");
    restart().await;
    assert_eq!(commit(tx).await.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    let decision = claim_again(store, "invoice", "order", 1).await;
    assert!(matches!(decision, Decision::Run(run) if run.attempt == 1), "{decision:?}");
    let invoices: i64 = sqlx::query_scalar(AssertSqlSafe("SELECT count(*) FROM invoices"))
        .fetch_one(store.pool())
        .await
        .expect("the store works");
    assert_eq!(invoices, 0);
}

async fn between_calls() {
    let subject = postgres().await;
    let store = &subject.store;
    let answered = Arc::new(AtomicUsize::new(0));
    let enough = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..4_u128)
        .map(|worker| {
            let (store, answered, enough) = (store.clone(), Arc::clone(&answered), Arc::clone(&enough));
            tokio::spawn(async move {
                let mut keys = Vec::new();
                while !enough.load(Ordering::Relaxed) {
                    let text = format!("{worker}/{}", keys.len());
                    let number = 1 + worker * 1_000_000 + keys.len() as u128;
                    let decision = claim_again(&store, "load", &text, number).await;
                    assert!(matches!(decision, Decision::Run(_)), "the same token gets the same answer: {decision:?}");
                    keys.push(key(&text));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                keys
            })
        })
        .collect();
    for crashes in 0..=2 {
        let before = answered.load(Ordering::Relaxed);
        let working = async {
            while answered.load(Ordering::Relaxed) < before + 100 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(RECOVERY, working).await.expect("the workers work");
        if crashes < 2 {
            restart().await;
        }
    }
    enough.store(true, Ordering::Relaxed);
    for worker in workers {
        let keys = worker.await.expect("no panic");
        let states = store.read(&terms("load").consumer, &keys).await.expect("the store works");
        assert!(states.iter().all(|state| matches!(state, State::Processing { .. })), "an answered claim is gone");
    }
    store.ping().await.expect("renewals have recovered too");
}
