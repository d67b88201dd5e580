//! What is particular to MariaDB and MySQL: how they compare, count, lock and commit; and what handlers do on their connection.

use std::time::Duration;

use futures_util::future::join_all;
use idem_core::machine::{Decision, State, Token};
use idem_core::store::contract::{Subject, claim_in, commit, rollback};
use idem_core::store::{
    ClaimRequest, Completion, FailedTry, MysqlStore, Renewal, Retry, Returned, Store, StoreErrorKind, StoreOptions,
    Terms, Tx, sql, unique_violation,
};
use idem_core::{ConsumerName, EventKey};
use sqlx::mysql::{MySqlDatabaseError, MySqlRow};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::only_postgres::proxy::Proxy;
use crate::subjects::{MariadbSubject, key, mariadb, mariadb_url, mariadb_with, request, terms};

/// Limits that a test can wait for.
fn short() -> StoreOptions {
    StoreOptions::default()
        .acquire_timeout(Duration::from_secs(2))
        .call_timeout(Duration::from_secs(3))
        .lock_timeout(Duration::from_secs(1))
}

async fn run(store: &MysqlStore, text: &str) {
    sqlx::raw_sql(AssertSqlSafe(text.to_owned())).execute(store.pool()).await.expect("the statement works");
}

async fn count(store: &MysqlStore, table: &str) -> i64 {
    let text = format!("SELECT count(*) FROM {table}");
    sqlx::query_scalar(AssertSqlSafe(text)).fetch_one(store.pool()).await.expect("the table is there")
}

async fn claim(store: &MysqlStore, terms: &Terms, request: &ClaimRequest) -> Decision {
    let requests = std::slice::from_ref(request);
    store.claim(terms, requests).await.expect("the store works").remove(0).decision
}

async fn state(store: &MysqlStore, consumer: &ConsumerName, text: &str) -> State {
    store.read(consumer, &[key(text)]).await.expect("the store works")[0]
}

fn is_run(decision: Decision) -> bool {
    matches!(decision, Decision::Run(_))
}

fn number(error: &sqlx::Error) -> u16 {
    error.as_database_error().expect("the server says so").downcast_ref::<MySqlDatabaseError>().number()
}

/// A session in the database of the test, as the server sees it.
pub struct Session {
    pub waits_for_lock: bool,
    pub for_seconds: f64,
    pub query: String,
}

/// Waits until the sessions that are at work in the test's database are as asked.
pub async fn until(what: &str, store: &MysqlStore, are_so: impl Fn(&[Session]) -> bool) {
    let watching = async {
        loop {
            let waiting = threads_that_wait(store).await;
            let rows = sqlx::query(
                "SELECT id, time_ms / 1000e0, coalesce(info, '') FROM information_schema.processlist
                 WHERE db = DATABASE() AND command <> 'Sleep' AND id <> CONNECTION_ID()",
            )
            .fetch_all(store.pool())
            .await
            .expect("MariaDB answers");
            let session = |row: &MySqlRow| Session {
                waits_for_lock: waiting.contains(&row.get(0)),
                for_seconds: row.get(1),
                query: row.get(2),
            };
            if are_so(&rows.iter().map(session).collect::<Vec<_>>()) {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(20), watching).await.unwrap_or_else(|_| panic!("it never came to this: {what}"));
}

/// As InnoDB tells people. Its table of transactions is a copy that is made anew only when nobody has asked for a while.
async fn threads_that_wait(store: &MysqlStore) -> Vec<i64> {
    let report: String =
        sqlx::query("SHOW ENGINE INNODB STATUS").fetch_one(store.pool()).await.expect("MariaDB answers").get("Status");
    let transactions = report.split("---TRANSACTION ").filter(|transaction| transaction.contains("\nLOCK WAIT "));
    let thread = |transaction: &str| {
        let (_, rest) = transaction.split_once(" thread id ")?;
        rest.split(',').next()?.parse().ok()
    };
    transactions.filter_map(thread).collect()
}

// ---- how they compare and count

/// S3, K4: neither case nor accents nor blanks at the end make two keys one, in a database whose own character set is another.
#[tokio::test]
async fn no_collation_makes_two_keys_one() {
    let subject = mariadb().await;
    let texts =
        ["a", "a ", "a  ", "A", "\u{e1}", "a\u{301}", "\u{e1} ", "a\t", "\u{df}", "ss", "a\u{ff9e}", "\u{1f980}"];
    for consumer in ["shop", "Shop"].map(terms) {
        for (text, number) in texts.iter().zip(1..) {
            assert!(is_run(claim(&subject.store, &consumer, &request(text, number)).await), "{text:?}");
        }
    }
    assert_eq!(count(&subject.store, "processed_jobs").await, 2 * texts.len() as i64);
    let readable: String = sqlx::query_scalar(
        "SELECT CONVERT(idempotency_key USING utf8mb4) FROM processed_jobs
         WHERE consumer_name = 'shop' AND idempotency_key = '\u{1f980}'",
    )
    .fetch_one(subject.store.pool())
    .await
    .expect("a person finds it as it is written");
    assert_eq!(readable, "\u{1f980}");
}

/// A write that changes nothing has still found its row. The driver asks for that when it connects; if it did not, a
/// holder would be told that it had lost its lease.
#[tokio::test]
async fn a_row_that_is_found_counts_though_nothing_changes() {
    let subject = mariadb().await;
    let terms = terms("found");
    assert!(is_run(claim(&subject.store, &terms, &request("a", 1)).await));
    let mut tx = subject.store.begin().await.expect("the store works");
    let same = || sql("UPDATE processed_jobs SET fence = fence WHERE idempotency_key = $1");
    assert_eq!(tx.execute(same().bind("a")).await.expect("it works"), 1);
    assert_eq!(tx.execute(same().bind("b")).await.expect("it works"), 0);
    rollback(tx).await.expect("the store works");
}

#[tokio::test]
async fn the_clock_is_the_servers_in_utc_whatever_zone_the_session_has() {
    let subject =
        mariadb_with(&StoreOptions::default(), |database| format!("{}?timezone=%2B05:45", database.url)).await;
    let zone: String =
        sqlx::query_scalar("SELECT @@time_zone").fetch_one(subject.store.pool()).await.expect("MariaDB answers");
    assert_eq!(zone, "+05:45", "the setting has reached the server");
    let answer = subject.store.claim(&terms("zone"), &[request("a", 1)]).await.expect("the store works").remove(0);
    let (left, created): (i64, i64) = sqlx::query_as(
        "SELECT TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(), locked_until), TIMESTAMPDIFF(SECOND, created_at, UTC_TIMESTAMP())
         FROM processed_jobs",
    )
    .fetch_one(subject.store.pool())
    .await
    .expect("the row is there");
    assert!((3500..=3600).contains(&left) && (0..60).contains(&created), "{left} {created}");
    assert_eq!(state(&subject.store, &terms("zone").consumer, "a").await, answer.state, "to the microsecond");
}

#[tokio::test]
async fn a_value_that_does_not_fit_is_refused_and_not_cut() {
    let subject = mariadb().await;
    run(&subject.store, "CREATE TABLE narrow (text VARCHAR(3), number TINYINT)").await;
    let mut tx = subject.store.begin().await.expect("the store works");
    for statement in ["INSERT INTO narrow (text) VALUES ('four')", "INSERT INTO narrow (number) VALUES (1000)"] {
        tx.execute(sql(statement)).await.expect_err("the guard's sessions are strict");
    }
    rollback(tx).await.expect("the store works");
}

// ---- settings of the session

#[tokio::test]
async fn the_guards_sessions_have_its_settings_and_not_the_servers() {
    let subject = mariadb_with(&StoreOptions::default().max_connections(1), |database| database.url.clone()).await;
    let mut tx = subject.store.begin().await.expect("the store works");
    let row = sqlx::query(
        "SELECT @@tx_isolation, @@tx_read_only, @@completion_type, @@unique_checks, @@innodb_lock_wait_timeout,
                @@lock_wait_timeout, @@wait_timeout, @@lc_messages, @@sql_mode, @@autocommit",
    )
    .fetch_one(connection(&mut tx))
    .await
    .expect("MariaDB answers");
    let text = |index: usize| row.get::<String, _>(index);
    assert_eq!((text(0), text(2), text(7)), ("READ-COMMITTED".into(), "NO_CHAIN".into(), "en_US".into()));
    assert_eq!((row.get::<bool, _>(1), row.get::<bool, _>(3)), (false, true));
    assert_eq!((row.get::<u64, _>(4), row.get::<u64, _>(5), row.get::<u64, _>(6)), (10, 10, 900));
    assert!(text(8).contains("STRICT_ALL_TABLES") && !text(8).contains("ANSI_QUOTES"), "{}", text(8));
    assert!(!row.get::<bool, _>(9), "what follows a transaction that the engine ended must not commit itself");
    commit(tx).await.expect("the store works");

    // And outside of a transaction what is answered is committed.
    assert!(is_run(claim(&subject.store, &terms("after"), &request("a", 1)).await));
    assert_eq!(count(&subject.store, "processed_jobs").await, 1);
}

/// READ COMMITTED is named at each beginning, so a session that a handler has set otherwise does not change the next one.
#[tokio::test]
async fn an_isolation_that_a_handler_leaves_behind_changes_nothing() {
    for isolation in ["REPEATABLE READ", "SERIALIZABLE"] {
        let subject = mariadb_with(&StoreOptions::default().max_connections(1), |database| database.url.clone()).await;
        let (store, terms) = (&subject.store, terms("isolation"));
        run(store, "CREATE TABLE seen (id INT)").await;
        let mut tx = store.begin().await.expect("the store works");
        let session = format!("SET SESSION TRANSACTION ISOLATION LEVEL {isolation}");
        sqlx::raw_sql(AssertSqlSafe(session)).execute(connection(&mut tx)).await.expect("MariaDB lets it");
        commit(tx).await.expect("the store works");

        let mut tx = store.begin().await.expect("it is the same connection");
        for expected in 0..3_i64 {
            let seen: i64 = sqlx::query_scalar("SELECT count(*) FROM seen")
                .fetch_one(connection(&mut tx))
                .await
                .expect("MariaDB answers");
            assert_eq!(seen, expected, "{isolation}");
            run(store, "INSERT INTO seen VALUES (1)").await;
        }
        claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
        rollback(tx).await.expect("the store works");
        assert!(is_run(claim(store, &terms, &request("a", 2)).await));
        assert!(matches!(claim(store, &terms, &request("a", 3)).await, Decision::InProgress { .. }));
    }
}

/// Some users are exempt from `read_only`, as is the one of these tests, so a user of its own asks.
#[tokio::test]
async fn a_server_that_is_read_only_is_unavailable() {
    let subject = mariadb().await;
    let (store, name) = (&subject.store, &subject.database.name);
    let user = &name[..30];
    run(store, &format!("CREATE USER {user}@'%'; GRANT SELECT, INSERT, UPDATE ON {name}.* TO {user}@'%'")).await;
    let url = subject.database.url.replacen("root@", &format!("{user}@"), 1);
    let own = MysqlStore::connect(&url, &StoreOptions::default()).await.expect("reading works");
    own.ping().await.expect("the server can be written to");
    run(store, "SET GLOBAL read_only = 1").await;
    let pinged = own.ping().await;
    let claimed = own.claim(&terms("read-only"), &[request("a", 1)]).await;
    let migrated = own.migrate().await;
    run(store, "SET GLOBAL read_only = 0").await;
    assert_eq!(pinged.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    assert_eq!(claimed.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    migrated.expect("there is nothing to write");
    run(store, &format!("DROP USER {user}@'%'")).await;
}

// ---- handlers on the connection of their transaction

/// A transaction that has claimed a job, and an application's table beside the guard's.
async fn begun(subject: &MariadbSubject) -> (Terms, Tx) {
    run(
        &subject.store,
        "CREATE TABLE invoices (id BIGINT AUTO_INCREMENT PRIMARY KEY, order_id VARCHAR(100) NOT NULL,
                                line INT NOT NULL DEFAULT 1, UNIQUE KEY invoices_order (order_id)) ENGINE = InnoDB",
    )
    .await;
    let terms = terms("invoice");
    let mut tx = subject.store.begin().await.expect("the store works");
    let answers = claim_in(&mut tx, &terms, &[request("order", 1)]).await.expect("the store works");
    assert!(is_run(answers[0].decision));
    (terms, tx)
}

fn connection(tx: &mut Tx) -> &mut MySqlConnection {
    tx.connection().expect("this is MySQL")
}

const INVOICE: &str = "INSERT INTO invoices (order_id) VALUES ('order')";

/// T1.
#[tokio::test]
async fn an_effect_commits_with_its_row_or_not_at_all() {
    let subject = mariadb().await;
    let (terms, mut tx) = begun(&subject).await;
    sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("the statement works");
    rollback(tx).await.expect("the store works");
    assert_eq!(count(&subject.store, "invoices").await, 0);
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);

    let mut tx = subject.store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("order", 2)]).await.expect("the store works");
    let invoice = sql("INSERT INTO invoices (line, order_id) VALUES ($2, $1)").bind("order").bind(7);
    assert_eq!(tx.execute(invoice).await.expect("it works"), 1);
    assert_eq!(count(&subject.store, "invoices").await, 0, "nobody sees it yet");
    commit(tx).await.expect("the store works");
    assert_eq!(count(&subject.store, "invoices WHERE order_id = 'order' AND line = 7").await, 1);
    assert!(matches!(state(&subject.store, &terms.consumer, "order").await, State::Completed { .. }));
}

#[tokio::test]
async fn values_of_every_kind_reach_the_server() {
    let subject = mariadb().await;
    run(
        &subject.store,
        "CREATE TABLE kinds (b BOOLEAN, i BIGINT, f DOUBLE, t TEXT, y BLOB, n TEXT, u TEXT)
                          CHARACTER SET utf8mb4",
    )
    .await;
    let mut tx = subject.store.begin().await.expect("the store works");
    let statement =
        sql("INSERT INTO kinds VALUES ($1, $2, $3, $4, $5, $6, CONCAT($4, ' $4 \\' ', $4)) -- $7, it's over")
            .bind(true)
            .bind(i64::MIN)
            .bind(0.5)
            .bind("it's \u{1f980}")
            .bind(&b"\0\xff"[..])
            .bind(None::<String>);
    tx.execute(statement).await.expect("it works");
    let refused = tx.execute(sql("INSERT INTO kinds (t) VALUES ($2)").bind("x")).await.expect_err("it has one value");
    assert!(refused.to_string().contains("placeholder $2"), "{refused}");
    commit(tx).await.expect("the store works");
    let matching =
        "kinds WHERE b = 1 AND i = -9223372036854775808 AND f = 0.5 AND t = 'it''s \u{1f980}' AND y = x'00ff'
                    AND n IS NULL AND u = 'it''s \u{1f980} $4 '' it''s \u{1f980}'";
    assert_eq!(count(&subject.store, matching).await, 1);
}

#[tokio::test]
async fn what_a_handler_begins_on_its_connection_is_inside_the_transaction() {
    let subject = mariadb().await;
    let (terms, mut tx) = begun(&subject).await;
    let mut inner = connection(&mut tx).begin().await.expect("a savepoint");
    sqlx::query(INVOICE).execute(&mut *inner).await.expect("the statement works");
    let mut innermost = inner.begin().await.expect("another");
    sqlx::query("INSERT INTO invoices (order_id) VALUES ('other')").execute(&mut *innermost).await.expect("it works");
    innermost.rollback().await.expect("to the savepoint");
    inner.commit().await.expect("the savepoint only");
    assert_eq!(count(&subject.store, "invoices").await, 0, "the handler's commit is not the transaction's");
    // One that is forgotten is undone, and the transaction goes on.
    let mut dropped = connection(&mut tx).begin().await.expect("a savepoint");
    sqlx::query("INSERT INTO invoices (order_id) VALUES ('dropped')").execute(&mut *dropped).await.expect("it works");
    drop(dropped);
    commit(tx).await.expect("the store works");
    assert_eq!(count(&subject.store, "invoices WHERE order_id = 'order'").await, 1);
    assert_eq!(count(&subject.store, "invoices").await, 1);
    assert!(matches!(state(&subject.store, &terms.consumer, "order").await, State::Completed { .. }));
}

/// T3: the name of the index, whatever the value looks like and whatever language the server speaks.
#[tokio::test]
async fn a_unique_violation_names_its_index() {
    let subject = mariadb().await;
    let (_, mut tx) = begun(&subject).await;
    run(&subject.store, "CREATE TABLE only_primary (id VARCHAR(50) PRIMARY KEY)").await;
    let value = "x' for key 'other";
    for (table, index) in [("invoices (order_id)", "invoices_order"), ("only_primary (id)", "PRIMARY")] {
        let insert = format!("INSERT INTO {table} VALUES (?)"); // the value looks like the end of the message
        let insert = || sqlx::query(AssertSqlSafe(insert.clone())).bind(value);
        insert().execute(connection(&mut tx)).await.expect("it is the first");
        let error = insert().execute(connection(&mut tx)).await.expect_err("it is there");
        assert_eq!(unique_violation(&error).expect("it is one").constraint, index);
    }
    let error = sqlx::query("INSERT INTO invoices (line) VALUES (1)").execute(connection(&mut tx)).await;
    assert_eq!(unique_violation(&error.expect_err("a value is missing")), None);
    commit(tx).await.expect("only the statements were undone");
    assert_eq!(count(&subject.store, "invoices").await, 1);
}

// ---- transactions that end before their commit

#[tokio::test]
async fn a_handler_that_ends_the_transaction_itself_is_found_at_the_commit() {
    for (end, kept) in [("ROLLBACK", false), ("COMMIT", true), ("START TRANSACTION", true)] {
        let subject = mariadb().await;
        let (terms, mut tx) = begun(&subject).await;
        sqlx::raw_sql(end).execute(connection(&mut tx)).await.expect("MariaDB lets it");
        sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("the statement works");
        let error = commit(tx).await.expect_err("it is not the guard's transaction any more");
        assert_eq!(error.kind(), StoreErrorKind::Broken, "{end}");
        assert!(error.to_string().contains("had ended before"), "{error}");
        assert_eq!(count(&subject.store, "invoices").await, 0, "what came after {end} is not kept");
        let row = state(&subject.store, &terms.consumer, "order").await;
        assert_eq!(matches!(row, State::Completed { .. }), kept, "{end} itself cannot be undone: {row:?}");
        assert!(is_run(claim(&subject.store, &terms, &request("other", 2)).await), "the store goes on");
    }
}

/// DDL commits what came before it. Nobody can undo that, but it is said, and nothing more is kept.
#[tokio::test]
async fn ddl_in_a_handler_is_found_at_the_commit() {
    let subject = mariadb().await;
    let (_, mut tx) = begun(&subject).await;
    tx.execute(sql(INVOICE)).await.expect("it works");
    tx.execute(sql("CREATE TABLE surprise (id INT)")).await.expect("MariaDB lets it");
    tx.execute(sql("INSERT INTO invoices (order_id) VALUES ('after')")).await.expect("it works");
    let error = commit(tx).await.expect_err("it is not the guard's transaction any more");
    assert_eq!(error.kind(), StoreErrorKind::Broken);
    assert!(error.to_string().contains("DDL"), "{error}");
    assert_eq!(count(&subject.store, "invoices WHERE order_id = 'after'").await, 0);

    let mut tx = subject.store.begin().await.expect("the store goes on").into_inner();
    tx.savepoint().await.expect("the store works");
    tx.execute(sql("DROP TABLE surprise")).await.expect("MariaDB lets it");
    let back = tx.rollback_to_savepoint().await;
    assert_eq!(back.map_err(|error| error.kind()), Err(StoreErrorKind::Broken), "the savepoint is gone as well");
}

/// Two rows that a handler and another session lock crosswise, so that the engine breaks the handler off: it has changed
/// less. The other one is answered and rolled back.
async fn deadlock<T>(subject: &MariadbSubject, tx: &mut Tx, handler: impl AsyncFnOnce(&mut Tx) -> T) -> T {
    let lock = |id: u32| AssertSqlSafe(format!("UPDATE crossing SET touched = touched + 1 WHERE id = {id}"));
    run(
        &subject.store,
        "CREATE TABLE crossing (id INT PRIMARY KEY, touched INT NOT NULL DEFAULT 0) ENGINE = InnoDB;
         INSERT INTO crossing (id) VALUES (1), (2), (3), (4), (5), (6), (7), (8), (9)",
    )
    .await;
    sqlx::query(lock(1)).execute(connection(tx)).await.expect("nobody has it");
    let mut other = subject.store.pool().begin().await.expect("MariaDB answers");
    for id in 2..=9 {
        sqlx::query(lock(id)).execute(&mut *other).await.expect("nobody has it");
    }
    let waiting = tokio::spawn(async move {
        let done = sqlx::query(lock(1)).execute(&mut *other).await;
        (done, other)
    });
    until("the other session waits", &subject.store, |sessions| sessions.iter().any(|session| session.waits_for_lock))
        .await;
    let result = handler(tx).await;
    let (done, other) = waiting.await.expect("no panic");
    done.expect("it was not the one to be broken off");
    other.rollback().await.expect("MariaDB answers");
    result
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_ends_the_transaction_and_nothing_more_is_kept() {
    let subject = mariadb().await;
    let (terms, mut tx) = begun(&subject).await;
    let error = deadlock(&subject, &mut tx, async |tx| {
        tx.execute(sql("UPDATE crossing SET touched = touched + 1 WHERE id = $1").bind(2))
            .await
            .expect_err("a deadlock")
    })
    .await;
    assert_eq!(number(&error), 1213);
    tx.execute(sql(INVOICE)).await.expect_err("it would not be the same transaction");
    let again = claim_in(&mut tx, &terms, &[request("another", 2)]).await;
    assert_eq!(again.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Contention));
    let mut tx = tx.into_inner();
    assert_eq!(tx.savepoint().await.map_err(|error| error.kind()), Err(StoreErrorKind::Contention));
    assert_eq!(tx.commit().await.map_err(|error| error.kind()), Err(StoreErrorKind::Contention), "ask again");
    assert_eq!(count(&subject.store, "invoices").await, 0);
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);
    assert!(is_run(claim(&subject.store, &terms, &request("order", 3)).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_that_a_handler_hides_is_found_at_the_commit() {
    let subject = mariadb().await;
    let (terms, mut tx) = begun(&subject).await;
    deadlock(&subject, &mut tx, async |tx| {
        let update = sqlx::query("UPDATE crossing SET touched = touched + 1 WHERE id = 2");
        let error = update.execute(connection(tx)).await.expect_err("a deadlock");
        assert_eq!(number(&error), 1213);
        // As if nothing had happened. Each would be committed by itself if the session were left to its defaults.
        sqlx::query(INVOICE).execute(connection(tx)).await.expect("the statement works");
    })
    .await;
    let error = commit(tx).await.expect_err("the claim was rolled back");
    assert_eq!(error.kind(), StoreErrorKind::Broken, "{error}");
    assert_eq!(count(&subject.store, "invoices").await, 0, "an effect without its row would be done twice");
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);
}

/// Only the statement is undone, so a handler may go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_a_lock_that_is_too_long_leaves_the_transaction() {
    let subject = mariadb_with(&short(), |database| database.url.clone()).await;
    let (terms, mut tx) = begun(&subject).await;
    run(
        &subject.store,
        "CREATE TABLE counters (id INT PRIMARY KEY, n INT) ENGINE = InnoDB; INSERT INTO counters VALUES (1, 0)",
    )
    .await;
    let mut other = subject.store.pool().begin().await.expect("MariaDB answers");
    let locked = "UPDATE counters SET n = n + 1 WHERE id = 1";
    sqlx::query(locked).execute(&mut *other).await.expect("nobody has it");
    sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("the statement works");
    let error = sqlx::query(locked).execute(connection(&mut tx)).await.expect_err("the other session has it");
    assert_eq!(number(&error), 1205);
    commit(tx).await.expect("the transaction lives");
    assert_eq!(count(&subject.store, "invoices WHERE order_id = 'order'").await, 1);
    assert!(matches!(state(&subject.store, &terms.consumer, "order").await, State::Completed { .. }));
    other.rollback().await.expect("MariaDB answers");
}

// ---- other sessions that hold locks

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_a_claim_is_bounded() {
    let subject = mariadb_with(&short(), |database| database.url.clone()).await;
    let terms = terms("locked");
    let mut tx = subject.store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
    let claimed = timeout(Duration::from_secs(8), subject.store.claim(&terms, &[request("a", 2)])).await;
    let claimed = claimed.expect("it ends in time").map(drop);
    assert_eq!(claimed.map_err(|error| error.kind()), Err(StoreErrorKind::Contention));
    commit(tx).await.expect("the store works");
    assert_eq!(claim(&subject.store, &terms, &request("a", 3)).await, Decision::Duplicate);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_waited_has_its_whole_lease() {
    let subject = mariadb().await;
    let terms = Terms { lease: Duration::from_secs(4), ..terms("waited") };
    let mut tx = subject.store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
    let second = tokio::spawn({
        let (store, terms) = (subject.store.clone(), terms.clone());
        async move { store.claim(&terms, &[request("a", 2)]).await }
    });
    until("the claim waits for a second", &subject.store, |sessions| {
        sessions.iter().any(|session| session.waits_for_lock && session.for_seconds > 1.0)
    })
    .await;
    rollback(tx).await.expect("the store works");
    let answer = second.await.expect("no panic").expect("the store works").remove(0);
    assert!(is_run(answer.decision));
    let left: i64 =
        sqlx::query_scalar("SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locked_until) FROM processed_jobs")
            .fetch_one(subject.store.pool())
            .await
            .expect("the row is there");
    assert!(left > 3_100_000, "the second of the wait is missing: {left} µs are left");
    assert_eq!(state(&subject.store, &terms.consumer, "a").await, answer.state);
}

/// Several wait for one insert, which is rolled back: InnoDB lets only one of them go on, and breaks off the others.
#[tokio::test(flavor = "multi_thread")]
async fn those_that_wait_for_one_insert_do_not_fail_each_other() {
    let subject = mariadb_with(&StoreOptions::default().max_connections(20), |database| database.url.clone()).await;
    let (store, terms) = (&subject.store, terms("queue"));
    let mut first = store.begin().await.expect("the store works");
    claim_in(&mut first, &terms, &[request("a", 1), request("b", 2)]).await.expect("the store works");
    let waiting = (1..=12_u128).map(|number| {
        let (store, terms) = (store.clone(), terms.clone());
        let requests = [request("a", 10 * number), request("b", 10 * number + 1)];
        tokio::spawn(async move {
            if number % 2 == 0 {
                return store.claim(&terms, &requests).await.expect("it is asked again").len();
            }
            let mut tx = store.begin().await.expect("the store works");
            let answers = claim_in(&mut tx, &terms, &requests).await.expect("it begins again");
            if number % 3 == 0 { rollback(tx).await } else { commit(tx).await }.expect("the store works");
            answers.len()
        })
    });
    let waiting: Vec<_> = waiting.collect();
    until("all wait", store, |sessions| sessions.iter().filter(|session| session.waits_for_lock).count() == 12).await;
    rollback(first).await.expect("the store works");
    for answered in join_all(waiting).await {
        assert_eq!(answered.expect("no panic"), 2);
    }
    assert_eq!(count(store, "processed_jobs").await, 2);
}

/// Each of two batches holds what the other wants next, unless both lock in one order.
#[tokio::test(flavor = "multi_thread")]
async fn batches_lock_in_the_order_of_their_keys() {
    let subject = mariadb().await;
    let (store, terms) = (&subject.store, terms("crossing"));
    let mut middle = store.begin().await.expect("the store works");
    claim_in(&mut middle, &terms, &[request("m", 1)]).await.expect("the store works");
    let mut waiting = Vec::new();
    for (number, keys) in [(10, ["a", "m", "z"]), (20, ["z", "m", "a"])] {
        let (store, terms) = (store.clone(), terms.clone());
        let requests: Vec<_> = keys.iter().zip(number..).map(|(key, number)| request(key, number)).collect();
        waiting.push(tokio::spawn(async move { store.claim(&terms, &requests).await }));
        until("one batch waits, then both", &subject.store, |sessions| {
            sessions.iter().filter(|session| session.waits_for_lock).count() == waiting.len()
        })
        .await;
    }
    rollback(middle).await.expect("the store works");
    let mut runs = 0;
    for batch in waiting {
        let answers = batch.await.expect("no panic").expect("there is no deadlock");
        runs += answers.iter().filter(|answer| is_run(answer.decision)).count();
    }
    assert_eq!(runs, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_does_not_hold_up_the_others_of_its_batch() {
    let subject = mariadb().await;
    let (store, terms) = (&subject.store, terms("row-locked"));
    let all: Vec<EventKey> = ["a", "b", "c"].map(key).to_vec();
    let requests =
        |first: u128| -> Vec<_> { ["a", "b", "c"].iter().zip(first..).map(|(k, n)| request(k, n)).collect() };
    store.claim(&terms, &requests(1)).await.expect("the store works");

    let lock = "SELECT 1 FROM processed_jobs WHERE consumer_name = 'row-locked' AND idempotency_key = 'b' FOR UPDATE";
    let mut locker = store.pool().begin().await.expect("MariaDB answers");
    sqlx::query(lock).execute(&mut *locker).await.expect("nobody else has it");
    let held: Vec<_> = all.iter().cloned().zip((1..).map(|number| Token(Uuid::from_u128(number)))).collect();
    let renewed = timeout(Duration::from_secs(8), store.renew(&terms, &held)).await.expect("it ends in time");
    let (renewed_it, locked) = (Renewal::Renewed, Renewal::Unconfirmed);
    assert_eq!(renewed.expect("the store works"), [renewed_it, locked, renewed_it], "the other leases are extended");
    locker.rollback().await.expect("MariaDB answers");

    subject.pass(crate::subjects::LEASE).await;
    let mut locker = store.pool().begin().await.expect("MariaDB answers");
    sqlx::query(lock).execute(&mut *locker).await.expect("nobody else has it");
    let answers = timeout(Duration::from_secs(2), store.claim(&terms, &requests(11))).await.expect("it does not wait");
    let answers = answers.expect("the store works");
    assert!(is_run(answers[0].decision) && is_run(answers[2].decision));
    assert!(matches!(answers[1].decision, Decision::InProgress { until } if until > answers[1].now), "come back later");
    locker.rollback().await.expect("MariaDB answers");
    assert!(is_run(claim(store, &terms, &request("b", 21)).await));
}

/// L2.
#[tokio::test]
async fn busy_handlers_do_not_hold_up_renewals() {
    let subject = mariadb_with(&short().max_connections(1), |database| database.url.clone()).await;
    let terms = terms("busy");
    assert!(is_run(claim(&subject.store, &terms, &request("lease", 1)).await));
    let tx = subject.store.begin().await.expect("the store works");
    let claimed = subject.store.claim(&terms, &[request("other", 2)]).await;
    assert_eq!(claimed.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable), "all are in use");
    let renewed = subject.store.renew(&terms, &[(key("lease"), Token(Uuid::from_u128(1)))]).await;
    assert_eq!(renewed.expect("renewals have their own"), [Renewal::Renewed]);
    subject.store.ping().await.expect("so has the health check");
    drop(tx);
}

// ---- futures that are dropped

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_is_dropped_in_a_statement_frees_its_key_and_its_connection() {
    let subject = mariadb_with(&StoreOptions::default().max_connections(1), |database| database.url.clone()).await;
    let terms = terms("dropped");
    let handler = tokio::spawn({
        let (store, terms) = (subject.store.clone(), terms.clone());
        async move {
            let mut tx = store.begin().await.expect("the store works");
            claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
            sqlx::query("SELECT SLEEP(3600)").execute(connection(&mut tx)).await
        }
    });
    until("the handler sleeps", &subject.store, |sessions| {
        sessions.iter().any(|session| session.query.contains("SLEEP"))
    })
    .await;
    handler.abort();
    assert!(handler.await.is_err_and(|error| error.is_cancelled()));
    // MySQL lets a statement go on whose client has gone, with the locks of its transaction, unless somebody ends it.
    let claimed = timeout(Duration::from_secs(9), subject.store.claim(&terms, &[request("a", 2)])).await;
    assert!(is_run(claimed.expect("it ends in time").expect("the store works")[0].decision));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_while_it_waits_leaves_the_pool_whole() {
    let subject = mariadb_with(&short().max_connections(2), |database| database.url.clone()).await;
    let (store, terms) = (&subject.store, terms("dropped"));
    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
    for number in 2..6 {
        let waiting = tokio::spawn({
            let (store, terms) = (store.clone(), terms.clone());
            async move { store.claim(&terms, &[request("a", number)]).await }
        });
        until("the claim waits", store, |sessions| sessions.iter().any(|session| session.waits_for_lock)).await;
        waiting.abort();
        assert!(waiting.await.is_err_and(|error| error.is_cancelled()));
        assert!(is_run(claim(store, &terms, &request(&format!("b{number}"), number)).await));
    }
    // MySQL ends a wait whose client has gone only when its time is up.
    until("nobody waits any more", store, |sessions| !sessions.iter().any(|session| session.waits_for_lock)).await;
    rollback(tx).await.expect("the store works");
    assert!(is_run(claim(store, &terms, &request("a", 9)).await));
    let open = "information_schema.innodb_trx AS t JOIN information_schema.processlist AS p
                ON p.id = t.trx_mysql_thread_id WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()";
    assert_eq!(count(store, open).await, 0);
}

// ---- outages

/// Ends all sessions of the test's database at once, as a server does that restarts.
async fn end_sessions(subject: &MariadbSubject) {
    let name = &subject.database.name;
    let pool = sqlx::MySqlPool::connect(&mariadb_url()).await.expect("MariaDB answers");
    let sessions = "SELECT id FROM information_schema.processlist WHERE db = ?";
    let ending = async {
        loop {
            let ids: Vec<i64> =
                sqlx::query_scalar(sessions).bind(name).fetch_all(&pool).await.expect("MariaDB answers");
            if ids.is_empty() {
                return;
            }
            for id in ids {
                // It may have ended meanwhile.
                let _ = sqlx::raw_sql(AssertSqlSafe(format!("KILL {id}"))).execute(&pool).await;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(10), ending).await.expect("they end");
    pool.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_break_cost_one_failed_call_at_most() {
    let subject = mariadb().await;
    let (store, terms) = (&subject.store, terms("broken"));
    // Eight connections of the pool are open and idle.
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(store.begin().await.expect("the store works"));
    }
    for tx in open {
        rollback(tx).await.expect("the store works");
    }
    end_sessions(&subject).await;
    let mut failed = 0;
    for number in 1..=20 {
        match store.claim(&terms, &[request(&number.to_string(), number)]).await {
            Ok(answers) => assert!(is_run(answers[0].decision)),
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
                failed += 1;
            }
        }
    }
    assert!(failed <= 1, "{failed} calls failed");
    store.ping().await.expect("the other pool has found out too");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_breaks_in_a_transaction_leaves_nothing() {
    let subject = mariadb().await;
    let (terms, mut tx) = begun(&subject).await;
    sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("the statement works");
    end_sessions(&subject).await;
    assert_eq!(commit(tx).await.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    let fresh = MysqlStore::connect(&subject.database.url, &StoreOptions::default()).await.expect("MariaDB answers");
    assert_eq!(state(&fresh, &terms.consumer, "order").await, State::Absent);
    assert_eq!(count(&fresh, "invoices").await, 0);
    assert!(is_run(claim(&fresh, &terms, &request("order", 2)).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_stops_ends_every_call_in_time() {
    let url: sqlx::mysql::MySqlConnectOptions = mariadb_url().parse().expect("it is a URL");
    let address = format!("{}:{}", url.get_host(), url.get_port());
    let proxy = Proxy::to(url.get_host().to_owned(), url.get_port()).await;
    let subject =
        mariadb_with(&short(), |database| database.url.replacen(&address, &format!("127.0.0.1:{}", proxy.port), 1))
            .await;
    let (store, terms) = (&subject.store, terms("stalled"));
    assert!(store.pool().connect_options().get_port() == proxy.port, "the store is behind the proxy");
    assert!(is_run(claim(store, &terms, &request("a", 1)).await));
    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("b", 2)]).await.expect("the store works");
    store.ping().await.expect("the store works");

    proxy.stall(true);
    let held = [(key("a"), Token(Uuid::from_u128(1)))];
    let failed =
        [FailedTry { key: key("a"), token: Token(Uuid::from_u128(1)), retry: Retry::Never, error: "x".to_owned() }];
    let calls = async {
        tokio::join!(
            async { store.claim(&terms, &[request("c", 3)]).await.map(drop) },
            async { store.renew(&terms, &held).await.map(drop) },
            async { store.fail(&terms, &failed).await.map(drop) },
            async { store.release(&terms, &held).await.map(drop) },
            async { store.read(&terms.consumer, &[key("a")]).await.map(drop) },
            async { store.begin().await.map(drop) },
            async { store.ping().await },
            async { commit(tx).await },
        )
    };
    let ended = timeout(Duration::from_secs(30), calls).await.expect("all calls end");
    let ended = [ended.0, ended.1, ended.2, ended.3, ended.4, ended.5, ended.6, ended.7];
    for (number, result) in ended.into_iter().enumerate() {
        assert_eq!(result.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable), "call {number}");
    }

    proxy.stall(false);
    assert_eq!(claim(store, &terms, &request("b", 2)).await, Decision::Duplicate, "its commit got through after all");
    store.ping().await.expect("the pools have recovered");
}

// ---- plans

/// A search for each key, also on a young table. Where a statement reads others' rows in passing, it locks them, too.
#[tokio::test]
async fn no_statement_scans_a_young_table() {
    let subject = mariadb_with(&StoreOptions::default().max_connections(1), |database| database.url.clone()).await;
    let (store, terms) = (&subject.store, terms("plans"));
    for batch in 0..10 {
        let requests: Vec<_> = (0..100).map(|n| request(&format!("{batch}/{n}"), 1 + batch * 1000 + n)).collect();
        let answers = store.claim(&terms, &requests).await.expect("the store works");
        let held: Vec<_> = requests.iter().map(|request| (request.key.clone(), request.token)).collect();
        let done: Vec<_> = requests
            .iter()
            .zip(&answers)
            .take(50)
            .map(|(request, answer)| match answer.decision {
                Decision::Run(run) => Completion {
                    request: request.clone(),
                    attempt: run.attempt,
                    fence: run.fence,
                    returned: Returned::default(),
                },
                other => panic!("{other:?}"),
            })
            .collect();
        store.complete(&terms, &done).await.expect("the store works");
        let failed: Vec<_> = requests[50..90]
            .iter()
            .map(|request| FailedTry {
                key: request.key.clone(),
                token: request.token,
                retry: Retry::After(Duration::ZERO),
                error: "x".to_owned(),
            })
            .collect();
        store.fail(&terms, &failed).await.expect("the store works");
        store.release(&terms, &held[90..]).await.expect("the store works");
        let again: Vec<_> = (0..100).map(|n| request(&format!("{batch}/{n}"), 501 + batch * 1000 + n)).collect();
        store.claim(&terms, &again).await.expect("the store works");
    }
    let mut tx = store.begin().await.expect("it is the connection of all that");
    let counters: Vec<(String, String)> = sqlx::query_as("SHOW SESSION STATUS LIKE 'Handler_read%'")
        .fetch_all(connection(&mut tx))
        .await
        .expect("MariaDB answers");
    let counter = |name: &str| {
        let (_, value) = counters.iter().find(|(found, _)| found == name).expect("it is counted");
        value.parse::<u64>().expect("it is a number")
    };
    let (searches, rows) =
        (counter("Handler_read_key"), counter("Handler_read_next") + counter("Handler_read_rnd_next"));
    assert!(searches > 3000, "{searches} searches of the key");
    assert!(rows < searches, "{rows} rows were read in passing, with {searches} searches");
    rollback(tx).await.expect("the store works");
}

#[tokio::test]
async fn the_application_has_connections_of_its_own() {
    let subject = mariadb_with(&short().max_connections(1), |database| database.url.clone()).await;
    let busy = subject.store.begin().await.expect("the store works");
    let mut own = subject.store.pool().begin().await.expect("it is not the guard's");
    sqlx::query("CREATE TABLE mine (id int)").execute(&mut *own).await.expect("the statement works");
    own.commit().await.expect("an ordinary transaction");
    assert_eq!(count(&subject.store, "mine").await, 0);
    drop(busy);
}
