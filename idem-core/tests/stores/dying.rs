//! A worker's process dies: what it had committed stays, what it had not is gone, and nothing is locked.

use std::process::Command;
use std::time::Duration;

use idem_core::machine::{Decision, State};
use idem_core::store::contract::claim_in;
use idem_core::store::{Store, StoreOptions, connect};
use tokio::time::timeout;

use crate::subjects::{key, mariadb, postgres, request, sqlite, terms};

/// Set for the process that is to die: the URL of the store.
const DIES_ON: &str = "IDEM_TEST_DIES_ON";

/// Runs `test` once more in a process of its own, which dies in [`die`].
fn let_a_worker_die(test: &str, url: &str) {
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(program)
        .args(["--exact", test, "--nocapture"])
        .env(DIES_ON, url)
        .output()
        .expect("this program can be run again");
    assert!(!output.status.success(), "the worker should have died");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("both claimed"), "it died too early: {said} {}", String::from_utf8_lossy(&output.stderr));
}

/// A worker with a lease and an open transaction, up to its end.
async fn die(url: &str) -> ! {
    let store = connect(url, &StoreOptions::default()).await.expect("the store works");
    store.claim(&terms("dying"), &[request("lease", 1)]).await.expect("the store works");
    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms("dying"), &[request("atomic", 2)]).await.expect("the store works");
    println!("both claimed");
    std::process::abort();
}

async fn is_as_committed(store: &dyn Store) {
    let keys = [key("lease"), key("atomic")];
    let states = store.read(&terms("dying").consumer, &keys).await.expect("the store works");
    assert!(matches!(states[0], State::Processing { .. }), "its lease holds until it runs out: {:?}", states[0]);
    assert_eq!(states[1], State::Absent);
    let claim = [request("lease", 3), request("atomic", 4)];
    let answers = timeout(Duration::from_secs(8), store.claim(&terms("dying"), &claim)).await;
    let answers = answers.expect("nothing is locked for long").expect("the store works");
    assert!(matches!(answers[0].decision, Decision::InProgress { .. }));
    assert!(matches!(answers[1].decision, Decision::Run(run) if run.attempt == 1));
}

#[tokio::test]
async fn a_worker_dies_on_postgres() {
    if let Ok(url) = std::env::var(DIES_ON) {
        die(&url).await;
    }
    let subject = postgres().await;
    let_a_worker_die("dying::a_worker_dies_on_postgres", &subject.schema.url);
    is_as_committed(&subject.store).await;
}

#[tokio::test]
async fn a_worker_dies_on_mariadb() {
    if let Ok(url) = std::env::var(DIES_ON) {
        die(&url).await;
    }
    let subject = mariadb().await;
    let_a_worker_die("dying::a_worker_dies_on_mariadb", &subject.database.url);
    is_as_committed(&subject.store).await;
}

#[tokio::test]
async fn a_worker_dies_on_sqlite() {
    if let Ok(url) = std::env::var(DIES_ON) {
        die(&url).await;
    }
    let subject = sqlite().await;
    let_a_worker_die("dying::a_worker_dies_on_sqlite", &subject.folder.url());
    is_as_committed(&subject.store).await;
}
