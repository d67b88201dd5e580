//! The server dies under the store, and comes back.
//!
//! These tests need servers that they may kill: `IDEM_TEST_PG_CTL` and `IDEM_TEST_MARIADB_CTL` are the commands that do it,
//! as scripts/test sets them. Without one of them its tests are skipped, and counted as such.

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
use idem_core::store::contract::{Subject, claim_in, commit};
use idem_core::store::{Store, StoreErrorKind, sql};
use tokio::time::{sleep, timeout};

use crate::subjects::{key, mariadb, postgres, request, run_on, run_on_mariadb, terms};

type Test = (&'static str, Server, fn(Server) -> Pin<Box<dyn Future<Output = ()>>>);

const TESTS: [Test; 4] = [
    ("a_transaction_that_the_server_took_along_is_as_if_it_had_not_been_on_postgres", Server::Postgres, |server| {
        Box::pin(in_a_transaction(server))
    }),
    ("what_was_answered_is_there_after_the_crash_on_postgres", Server::Postgres, |server| {
        Box::pin(between_calls(server))
    }),
    ("a_transaction_that_the_server_took_along_is_as_if_it_had_not_been_on_mariadb", Server::Mariadb, |server| {
        Box::pin(in_a_transaction(server))
    }),
    ("what_was_answered_is_there_after_the_crash_on_mariadb", Server::Mariadb, |server| {
        Box::pin(between_calls(server))
    }),
];

const RECOVERY: Duration = Duration::from_secs(60);

/// A harness that can skip when it runs, which Rust's own cannot.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let chosen: Vec<&Test> = TESTS
        .iter()
        .filter(|(name, ..)| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())))
        .collect();
    if arguments.iter().any(|argument| argument == "--list") {
        chosen.iter().for_each(|(name, ..)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", chosen.len());
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, server, test) in &chosen {
        let verdict = if std::env::var(server.control()).is_err() {
            skipped += 1;
            format!("ignored: {}, by which a test kills and restarts its server, is not set", server.control())
        } else if passes(test(*server)) {
            passed += 1;
            "ok".to_owned()
        } else {
            failed += 1;
            "FAILED".to_owned()
        };
        println!("test {name} ... {verdict}");
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {failed} failed; {skipped} ignored; 0 measured; 0 filtered out\n"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn passes(test: Pin<Box<dyn Future<Output = ()>>>) -> bool {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    runtime.block_on(AssertUnwindSafe(test).catch_unwind()).is_ok()
}

#[derive(Clone, Copy)]
enum Server {
    Postgres,
    Mariadb,
}

/// How a server goes away.
#[derive(Clone, Copy)]
enum End {
    /// As in a power failure of its process: nothing is finished.
    Killed,
    /// In good order, as for an upgrade.
    Stopped,
}

impl Server {
    /// The variable with the command that controls it.
    fn control(self) -> &'static str {
        match self {
            Server::Postgres => "IDEM_TEST_PG_CTL",
            Server::Mariadb => "IDEM_TEST_MARIADB_CTL",
        }
    }

    /// A store with the guard's tables and `invoices`, and what keeps them.
    async fn store(self) -> (Arc<dyn Store>, Box<dyn Subject>) {
        let table = "CREATE TABLE invoices (order_id varchar(100) PRIMARY KEY)".to_owned();
        match self {
            Server::Postgres => {
                let subject = postgres().await;
                run_on(&subject.schema.url, table).await;
                (subject.store(), Box::new(subject))
            }
            Server::Mariadb => {
                let subject = mariadb().await;
                run_on_mariadb(&subject.database.url, table).await;
                (subject.store(), Box::new(subject))
            }
        }
    }

    /// Ends the server and starts it again.
    async fn restart(self, end: End) {
        let control = std::env::var(self.control()).expect("checked before");
        let arguments: &[&str] = match (self, end) {
            (Server::Postgres, End::Killed) => &["restart -m immediate"],
            (Server::Postgres, End::Stopped) => &["restart -m fast"],
            (Server::Mariadb, End::Killed) => &["kill", "start"],
            (Server::Mariadb, End::Stopped) => &["restart"],
        };
        let commands: Vec<String> = arguments.iter().map(|argument| format!("{control} {argument}")).collect();
        let restarted = tokio::task::spawn_blocking(move || {
            Command::new("sh").arg("-c").arg(commands.join(" && ")).output().expect("there is a shell")
        });
        let output = restarted.await.expect("no panic");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Repeats a claim that the store could not answer, as the runtime does.
async fn claim_again(store: &dyn Store, consumer: &str, text: &str, number: u128) -> Decision {
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

async fn in_a_transaction(server: Server) {
    let (store, _subject) = server.store().await;
    let terms = terms("invoice");
    for (number, end) in [(1, End::Killed), (2, End::Stopped)] {
        let order = format!("order {number}");
        let mut tx = store.begin().await.expect("the store works");
        claim_in(&mut tx, &terms, &[request(&order, number)]).await.expect("the store works");
        tx.execute(sql("INSERT INTO invoices VALUES ($1)").bind(&order)).await.expect("the store works");
        server.restart(end).await;
        assert_eq!(commit(tx).await.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
        let decision = claim_again(&*store, "invoice", &order, number).await;
        assert!(matches!(decision, Decision::Run(run) if run.attempt == 1), "{decision:?}");
        let mut tx = store.begin().await.expect("the store works");
        let invoices = tx.execute(sql("DELETE FROM invoices")).await.expect("the store works");
        commit(tx).await.expect("the store works");
        assert_eq!(invoices, 0);
    }
}

async fn between_calls(server: Server) {
    let (store, _subject) = server.store().await;
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
                    let decision = claim_again(&*store, "load", &text, number).await;
                    assert!(matches!(decision, Decision::Run(_)), "the same token gets the same answer: {decision:?}");
                    keys.push(key(&text));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                keys
            })
        })
        .collect();
    for end in [Some(End::Killed), Some(End::Killed), Some(End::Stopped), None] {
        let before = answered.load(Ordering::Relaxed);
        let working = async {
            while answered.load(Ordering::Relaxed) < before + 100 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(RECOVERY, working).await.expect("the workers work");
        if let Some(end) = end {
            server.restart(end).await;
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
