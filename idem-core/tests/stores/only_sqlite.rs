//! What only a file can do to a store: one writer for everybody, and other processes that have it.

use std::time::Duration;

use futures_util::future::join_all;
use idem_core::machine::{Decision, State, Token};
use idem_core::store::contract::{claim_in, commit, rollback};
use idem_core::store::{Renewal, SqliteStore, Store, StoreErrorKind, StoreOptions, Tx, sql};
use idem_core::{Clock, SystemClock};
use sqlx::{AssertSqlSafe, Connection, SqliteConnection};
use tokio::time::timeout;
use uuid::Uuid;

use crate::subjects::{SqliteSubject, key, request, sqlite, sqlite_with, terms};

async fn run(store: &SqliteStore, text: &str) {
    sqlx::raw_sql(AssertSqlSafe(text.to_owned())).execute(store.pool()).await.expect("the statement works");
}

async fn count(store: &SqliteStore, table: &str) -> i64 {
    let text = format!("SELECT count(*) FROM {table}");
    sqlx::query_scalar(AssertSqlSafe(text)).fetch_one(store.pool()).await.expect("the table is there")
}

fn connection(tx: &mut Tx) -> &mut SqliteConnection {
    tx.connection().expect("this is SQLite")
}

/// A connection as another process has it.
async fn other_process(subject: &SqliteSubject) -> SqliteConnection {
    SqliteConnection::connect(&subject.folder.url()).await.expect("the file is there")
}

#[tokio::test]
async fn an_effect_commits_with_its_row_or_not_at_all() {
    let SqliteSubject { store, folder: _folder } = sqlite().await;
    run(&store, "CREATE TABLE invoices (order_id TEXT PRIMARY KEY) STRICT").await;
    let terms = terms("invoice");
    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("order", 1)]).await.expect("the store works");
    sqlx::query("INSERT INTO invoices VALUES ('order')").execute(connection(&mut tx)).await.expect("it works");
    rollback(tx).await.expect("the store works");
    assert_eq!(count(&store, "invoices").await, 0);

    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("order", 2)]).await.expect("the store works");
    assert_eq!(tx.execute(sql("INSERT INTO invoices VALUES ($1)").bind("order")).await.expect("it works"), 1);
    let mut inner = connection(&mut tx).begin().await.expect("a savepoint");
    sqlx::query("INSERT INTO invoices VALUES ('inner')").execute(&mut *inner).await.expect("it works");
    inner.commit().await.expect("the savepoint only");
    assert_eq!(count(&store, "invoices").await, 0, "nobody sees it yet");
    commit(tx).await.expect("the store works");
    assert_eq!(count(&store, "invoices").await, 2);
    let states = store.read(&terms.consumer, &[key("order")]).await.expect("the store works");
    assert!(matches!(states[0], State::Completed { .. }));
}

#[tokio::test]
async fn values_of_every_kind_reach_the_file() {
    let SqliteSubject { store, folder: _folder } = sqlite().await;
    run(&store, "CREATE TABLE kinds (b INTEGER, i INTEGER, f REAL, t TEXT, y BLOB, n TEXT) STRICT").await;
    let mut tx = store.begin().await.expect("the store works");
    let statement = sql("INSERT INTO kinds VALUES ($1, $2, $3, $4, $5, $6)")
        .bind(true)
        .bind(i64::MIN)
        .bind(0.5)
        .bind("it's")
        .bind(&b"\0\xff"[..])
        .bind(None::<String>);
    tx.execute(statement).await.expect("it works");
    commit(tx).await.expect("the store works");
    let matching =
        "kinds WHERE b = 1 AND i = -9223372036854775808 AND f = 0.5 AND t = 'it''s' AND y = x'00ff' AND n IS NULL";
    assert_eq!(count(&store, matching).await, 1);
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_itself_is_found_at_the_commit() {
    let SqliteSubject { store, folder: _folder } = sqlite().await;
    let terms = terms("ended");
    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
    sqlx::raw_sql("ROLLBACK").execute(connection(&mut tx)).await.expect("SQLite lets it");
    assert_eq!(commit(tx).await.map_err(|error| error.kind()), Err(StoreErrorKind::Broken));
    let answers = store.claim(&terms, &[request("a", 2)]).await.expect("the store goes on");
    assert!(matches!(answers[0].decision, Decision::Run(_)));
}

#[tokio::test]
async fn what_was_answered_survives_a_power_failure() {
    let subject = sqlite().await;
    let mut tx = subject.store.begin().await.expect("the store works");
    let journal: String =
        sqlx::query_scalar("PRAGMA journal_mode").fetch_one(connection(&mut tx)).await.expect("SQLite answers");
    let synchronous: i64 =
        sqlx::query_scalar("PRAGMA synchronous").fetch_one(connection(&mut tx)).await.expect("SQLite answers");
    assert_eq!((journal.as_str(), synchronous), ("wal", 2), "FULL is 2");
}

#[tokio::test]
async fn the_clock_is_the_machines_to_the_millisecond() {
    let subject = sqlite().await;
    let before = SystemClock.timestamp();
    let answers = subject.store.claim(&terms("clock"), &[request("a", 1)]).await.expect("the store works");
    let after = SystemClock.timestamp();
    let now = answers[0].now;
    let millisecond = Duration::from_millis(1);
    assert!(now.plus(millisecond) >= before && now <= after.plus(millisecond), "{before:?} {now:?} {after:?}");
    assert_eq!(now.as_micros() % 1000, 0);
}

#[tokio::test]
async fn a_file_that_another_process_writes_is_contention_and_ends_in_time() {
    let options = StoreOptions::default().lock_timeout(Duration::from_millis(800));
    let subject = sqlite_with(&options).await;
    let (store, terms) = (&subject.store, terms("busy"));
    store.claim(&terms, &[request("lease", 1)]).await.expect("the store works");
    let mut other = other_process(&subject).await;
    let writing = other.begin_with("BEGIN IMMEDIATE").await.expect("nobody else writes");
    let held = [(key("lease"), Token(Uuid::from_u128(1)))];
    let calls = async {
        tokio::join!(
            async { store.claim(&terms, &[request("a", 2)]).await.map(drop) },
            async { store.renew(&terms, &held).await.map(drop) },
            async { store.begin().await.map(drop) },
        )
    };
    let ended = timeout(Duration::from_secs(10), calls).await.expect("all calls end");
    for result in [ended.0, ended.1, ended.2] {
        assert_eq!(result.map_err(|error| error.kind()), Err(StoreErrorKind::Contention));
    }
    store.read(&terms.consumer, &[key("lease")]).await.expect("reading waits for nobody");
    store.ping().await.expect("a file that is being written can be written");
    writing.rollback().await.expect("SQLite answers");
    assert_eq!(store.renew(&terms, &held).await.expect("it is free"), [Renewal::Renewed]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_waits_for_another_process() {
    let subject = sqlite().await;
    let mut other = other_process(&subject).await;
    let writing = other.begin_with("BEGIN IMMEDIATE").await.expect("nobody else writes");
    let waiting = tokio::spawn({
        let store = subject.store.clone();
        async move { store.claim(&terms("waits"), &[request("a", 1)]).await }
    });
    tokio::task::yield_now().await;
    writing.rollback().await.expect("SQLite answers");
    let answers = waiting.await.expect("no panic").expect("it is its turn");
    assert!(matches!(answers[0].decision, Decision::Run(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_share_the_file_run_each_job_once() {
    let subject = sqlite().await;
    let workers = (0..4_u128).map(|worker| {
        let url = subject.folder.url();
        tokio::spawn(async move {
            let store = SqliteStore::connect(&url, &StoreOptions::default()).await.expect("the file is there");
            let mut ran = Vec::new();
            for round in 0..20_u128 {
                let requests: Vec<_> = (0..5)
                    .map(|n| request(&format!("{}", round * 5 + (n + worker) % 5), 1 + worker * 1000 + round * 10 + n))
                    .collect();
                let answers = store.claim(&terms("shared"), &requests).await.expect("whoever comes later waits");
                let runs =
                    requests.iter().zip(&answers).filter(|(_, answer)| matches!(answer.decision, Decision::Run(_)));
                ran.extend(runs.map(|(request, _)| request.key.clone()));
            }
            ran
        })
    });
    let mut ran: Vec<_> = join_all(workers).await.into_iter().flat_map(|ran| ran.expect("no panic")).collect();
    ran.sort();
    let all = ran.len();
    ran.dedup();
    assert_eq!((ran.len(), all), (100, 100));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_while_it_waits_leaves_the_writer_free() {
    let subject = sqlite().await;
    let (store, terms) = (&subject.store, terms("dropped"));
    for number in 1..20 {
        let mut tx = store.begin().await.expect("the writer is free");
        claim_in(&mut tx, &terms, &[request("a", number)]).await.expect("the store works");
        // One is dropped while it waits for the writer, the other inside its transaction.
        let waiting = timeout(Duration::from_millis(1), store.claim(&terms, &[request("b", number)])).await;
        assert!(waiting.is_err(), "the writer is in use");
        drop(tx);
    }
    let answers = store.claim(&terms, &[request("a", 99), request("b", 100)]).await.expect("the writer is free");
    assert!(answers.iter().all(|answer| matches!(answer.decision, Decision::Run(_))), "{answers:?}");
}
