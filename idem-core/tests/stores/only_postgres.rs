//! What only a server can do to a store: other settings, other sessions, outages; and what handlers do on its connection.

use std::time::Duration;

use idem_core::machine::{Decision, OperatorAction, State, Token};
use idem_core::store::contract::{self, Subject, claim_in, commit, rollback};
use idem_core::store::{
    ClaimRequest, FailedTry, Fenced, PgStore, Renewal, Retry, Returned, Store, StoreErrorKind, StoreOptions, Terms, Tx,
    sql, unique_violation,
};
use idem_core::{ConsumerName, EventKey};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::subjects::{PostgresSubject, key, postgres, postgres_with, request, terms};

/// Limits that a test can wait for.
fn short() -> StoreOptions {
    StoreOptions::default()
        .acquire_timeout(Duration::from_secs(2))
        .call_timeout(Duration::from_secs(1))
        .lock_timeout(Duration::from_millis(500))
}

async fn run(store: &PgStore, text: &str) {
    sqlx::raw_sql(AssertSqlSafe(text.to_owned())).execute(store.pool()).await.expect("the statement works");
}

async fn count(store: &PgStore, table: &str) -> i64 {
    let text = format!("SELECT count(*) FROM {table}");
    sqlx::query_scalar(AssertSqlSafe(text)).fetch_one(store.pool()).await.expect("the table is there")
}

async fn claim(store: &PgStore, terms: &Terms, request: &ClaimRequest) -> Decision {
    let requests = std::slice::from_ref(request);
    store.claim(terms, requests).await.expect("the store works").remove(0).decision
}

async fn state(store: &PgStore, consumer: &ConsumerName, text: &str) -> State {
    store.read(consumer, &[key(text)]).await.expect("the store works")[0]
}

fn is_run(decision: Decision) -> bool {
    matches!(decision, Decision::Run(_))
}

/// A session of the store, as the server sees it.
pub struct Session {
    pub waits_for_lock: bool,
    pub for_seconds: f64,
    pub query: String,
}

/// Waits until the store's sessions that are at work are as asked.
pub async fn until(what: &str, store: &PgStore, are_so: impl Fn(&[Session]) -> bool) {
    let options = store.pool().connect_options();
    let name = options.get_application_name().expect("tests name their sessions");
    let watching = async {
        loop {
            let rows = sqlx::query(
                "SELECT coalesce(wait_event_type = 'Lock', false), query,
                        extract(epoch FROM clock_timestamp() - query_start)::float8
                 FROM pg_stat_activity WHERE application_name = $1 AND state = 'active' AND pid <> pg_backend_pid()",
            )
            .bind(name)
            .fetch_all(store.pool())
            .await
            .expect("PostgreSQL answers");
            let session =
                |row: &PgRow| Session { waits_for_lock: row.get(0), query: row.get(1), for_seconds: row.get(2) };
            if are_so(&rows.iter().map(session).collect::<Vec<_>>()) {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), watching).await.unwrap_or_else(|_| panic!("it never came to this: {what}"));
}

// ---- settings of the server, the database or the user

#[tokio::test(flavor = "multi_thread")]
async fn a_default_of_serializable_changes_nothing() {
    let subject = postgres_with(&StoreOptions::default(), |schema| {
        schema.url_with("default_transaction_isolation", "serializable")
    })
    .await;
    let default: String = sqlx::query_scalar("SHOW default_transaction_isolation")
        .fetch_one(subject.store.pool())
        .await
        .expect("PostgreSQL answers");
    assert_eq!(default, "serializable", "the setting has reached the server");
    contract::one_of_many_gets_a_new_job(&subject).await;
    contract::one_of_many_takes_over(&subject).await;
    contract::overlapping_batches_run_each_job_once(&subject).await;
    contract::overlapping_transactions_run_each_job_once(&subject).await;
    contract::a_claim_waits_for_the_transaction_before_it(&subject).await;
}

/// Neither the server's settings nor what an earlier handler did to its session reach a transaction.
#[tokio::test]
async fn a_transaction_has_the_guards_settings() {
    let options = StoreOptions::default().max_connections(1).idle_transaction_timeout(Duration::from_secs(77));
    let subject = postgres_with(&options, |schema| schema.url_with("synchronous_commit", "off")).await;
    let mut tx = subject.store.begin().await.expect("the store works");
    let spoil = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE";
    sqlx::query(spoil).execute(connection(&mut tx)).await.expect("PostgreSQL lets it");
    commit(tx).await.expect("the store works");
    let mut tx = subject.store.begin().await.expect("the store works");
    for (setting, value) in [
        ("default_transaction_isolation", "serializable"), // so it is the same session
        ("transaction_isolation", "read committed"),
        ("synchronous_commit", "on"),
        ("idle_in_transaction_session_timeout", "77s"),
        ("tcp_keepalives_idle", "30"),
        ("tcp_keepalives_interval", "10"),
        ("tcp_keepalives_count", "3"),
        ("client_connection_check_interval", "2s"),
    ] {
        let query = sqlx::query_scalar("SELECT current_setting($1)").bind(setting);
        let found: String = query.fetch_one(connection(&mut tx)).await.expect("PostgreSQL answers");
        assert_eq!(found, value, "{setting}");
    }
    rollback(tx).await.expect("the store works");
}

#[tokio::test]
async fn a_server_that_is_read_only_is_unavailable() {
    let subject = postgres().await;
    let url = subject.schema.url_with("default_transaction_read_only", "on");
    let store = PgStore::connect(&url, &StoreOptions::default()).await.expect("reading works");
    assert_eq!(store.ping().await.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    let claimed = store.claim(&terms("read-only"), &[request("a", 1)]).await;
    assert_eq!(claimed.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    store.migrate().await.expect("there is nothing to write");
}

// ---- handlers on the connection of their transaction

/// A transaction that has claimed a job, and an application's table beside the guard's.
async fn begun(subject: &PostgresSubject) -> (Terms, Tx) {
    run(&subject.store, "CREATE TABLE invoices (order_id text PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)").await;
    let terms = terms("invoice");
    let mut tx = subject.store.begin().await.expect("the store works");
    let answers = claim_in(&mut tx, &terms, &[request("order", 1)]).await.expect("the store works");
    assert!(is_run(answers[0].decision));
    (terms, tx)
}

fn connection(tx: &mut Tx) -> &mut PgConnection {
    tx.connection().expect("this is PostgreSQL")
}

const INVOICE: &str = "INSERT INTO invoices VALUES ('order')";

#[tokio::test]
async fn an_effect_commits_with_its_row_or_not_at_all() {
    let subject = postgres().await;
    let (terms, mut tx) = begun(&subject).await;
    sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("the statement works");
    rollback(tx).await.expect("the store works");
    assert_eq!(count(&subject.store, "invoices").await, 0);
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);

    let mut tx = subject.store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("order", 2)]).await.expect("the store works");
    assert_eq!(tx.execute(sql("INSERT INTO invoices VALUES ($1)").bind("order")).await.expect("it works"), 1);
    assert_eq!(count(&subject.store, "invoices").await, 0, "nobody sees it yet");
    commit(tx).await.expect("the store works");
    assert_eq!(count(&subject.store, "invoices").await, 1);
    assert!(matches!(state(&subject.store, &terms.consumer, "order").await, State::Completed { .. }));
}

#[tokio::test]
async fn values_of_every_kind_reach_the_server() {
    let subject = postgres().await;
    run(&subject.store, "CREATE TABLE kinds (b bool, i bigint, f float8, t text, y bytea, n text)").await;
    let mut tx = subject.store.begin().await.expect("the store works");
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
        "kinds WHERE b AND i = -9223372036854775808 AND f = 0.5 AND t = 'it''s' AND y = '\\x00ff' AND n IS NULL";
    assert_eq!(count(&subject.store, matching).await, 1);
}

#[tokio::test]
async fn what_a_handler_begins_on_its_connection_is_inside_the_transaction() {
    let subject = postgres().await;
    let (terms, mut tx) = begun(&subject).await;
    let mut inner = connection(&mut tx).begin().await.expect("a savepoint");
    sqlx::query(INVOICE).execute(&mut *inner).await.expect("the statement works");
    let mut innermost = inner.begin().await.expect("another");
    sqlx::query("INSERT INTO invoices VALUES ('other')").execute(&mut *innermost).await.expect("the statement works");
    innermost.rollback().await.expect("to the savepoint");
    inner.commit().await.expect("the savepoint only");
    assert_eq!(count(&subject.store, "invoices").await, 0, "the handler's commit is not the transaction's");
    // One that is forgotten is undone, and the transaction goes on.
    let mut dropped = connection(&mut tx).begin().await.expect("a savepoint");
    sqlx::query("INSERT INTO invoices VALUES ('dropped')").execute(&mut *dropped).await.expect("the statement works");
    drop(dropped);
    commit(tx).await.expect("the store works");
    assert_eq!(count(&subject.store, "invoices WHERE order_id = 'order'").await, 1);
    assert_eq!(count(&subject.store, "invoices").await, 1);
    assert!(matches!(state(&subject.store, &terms.consumer, "order").await, State::Completed { .. }));
}

#[tokio::test]
async fn an_error_that_a_handler_hides_is_found_at_the_commit() {
    let subject = postgres().await;
    let (terms, mut tx) = begun(&subject).await;
    sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("the statement works");
    sqlx::query("SELECT 1 / 0").execute(connection(&mut tx)).await.expect_err("it divides by zero");
    let error = commit(tx).await.expect_err("PostgreSQL would have answered COMMIT as if all were well");
    assert_eq!(error.kind(), StoreErrorKind::Broken);
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);
    assert_eq!(count(&subject.store, "invoices").await, 0);
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_itself_is_found_at_the_commit() {
    let subject = postgres().await;
    let (terms, mut tx) = begun(&subject).await;
    sqlx::raw_sql("ROLLBACK").execute(connection(&mut tx)).await.expect("PostgreSQL lets it");
    assert_eq!(commit(tx).await.map_err(|error| error.kind()), Err(StoreErrorKind::Broken));
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);
}

#[tokio::test]
async fn a_constraint_that_is_checked_at_the_commit_is_told() {
    let subject = postgres().await;
    let (terms, mut tx) = begun(&subject).await;
    run(&subject.store, INVOICE).await;
    sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("it is checked later");
    let error = commit(tx).await.expect_err("it is checked now");
    assert_eq!(unique_violation(&error).expect("it is one").constraint, "invoices_pkey");
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);
    assert!(is_run(claim(&subject.store, &terms, &request("order", 2)).await), "the store goes on");
}

// ---- other sessions that hold locks

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_a_lock_is_bounded() {
    let subject = postgres_with(&short(), |schema| schema.url.clone()).await;
    let terms = terms("locked");
    let mut tx = subject.store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
    let claimed = timeout(Duration::from_secs(5), subject.store.claim(&terms, &[request("a", 2)])).await;
    let claimed = claimed.expect("it ends in time").map(drop);
    assert_eq!(claimed.map_err(|error| error.kind()), Err(StoreErrorKind::Contention));
    commit(tx).await.expect("the store works");
    assert_eq!(claim(&subject.store, &terms, &request("a", 3)).await, Decision::Duplicate);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_waited_has_its_whole_lease() {
    let subject = postgres().await;
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
    let left: f64 =
        sqlx::query_scalar("SELECT extract(epoch FROM locked_until - clock_timestamp())::float8 FROM processed_jobs")
            .fetch_one(subject.store.pool())
            .await
            .expect("the row is there");
    assert!(left > 3.1, "the second of the wait is missing: {left} s are left");
    assert_eq!(state(&subject.store, &terms.consumer, "a").await, answer.state);
}

/// A transaction may be old when it claims: what counts is the clock at the claim.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_transaction_claims_by_the_clock() {
    let subject = postgres().await;
    let (store, terms) = (&subject.store, terms("old"));
    store.claim(&terms, &[request("a", 1)]).await.expect("the store works");
    let mut tx = store.begin().await.expect("the store works");
    claim_in(&mut tx, &terms, &[request("begun", 2)]).await.expect("the store works");
    // The lease ends now, which is after the transaction has begun.
    run(store, "UPDATE processed_jobs SET locked_until = clock_timestamp(), updated_at = clock_timestamp()").await;
    let ended: i64 = micros(store, "locked_until", "a").await;
    let answers = claim_in(&mut tx, &terms, &[request("a", 3), request("b", 4)]).await.expect("the store works");
    assert!(answers.iter().all(|answer| is_run(answer.decision)), "{answers:?}");
    commit(tx).await.expect("the store works");
    for (column, key) in [("updated_at", "a"), ("created_at", "b"), ("completed_at", "b")] {
        assert!(micros(store, column, key).await > ended, "{column} of {key} is from before the claim");
    }
}

async fn micros(store: &PgStore, column: &str, key: &str) -> i64 {
    let text = format!("SELECT (extract(epoch FROM {column}) * 1000000)::bigint FROM processed_jobs");
    let query = sqlx::query_scalar(AssertSqlSafe(format!("{text} WHERE idempotency_key = $1")));
    query.bind(key).fetch_one(store.pool()).await.expect("the row is there")
}

/// A holder's write that had to wait for somebody else's starts from what that one has left.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_waited_starts_from_the_row_as_it_is_then() {
    for (change, is_lost, left) in [
        ("token = '00000000-0000-0000-0000-000000000009'", true, "PROCESSING 1 1"),
        ("fence = 7", false, "FAILED 7 1"),
        ("attempts = 3", false, "FAILED 1 3"),
        ("status = 'COMPLETED', locked_until = NULL", true, "COMPLETED 1 1"),
        ("status = 'RECEIVED', locked_until = NULL, token = NULL", true, "RECEIVED 1 1"),
    ] {
        let subject = postgres().await;
        let (store, terms) = (subject.store.clone(), terms("waited-write"));
        store.claim(&terms, &[request("a", 1)]).await.expect("the store works");
        let mut other = store.pool().begin().await.expect("PostgreSQL answers");
        let text = format!("UPDATE processed_jobs SET {change}");
        sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *other).await.expect("the statement works");
        let failing = tokio::spawn({
            let store = store.clone();
            let (key, token) = (key("a"), Token(Uuid::from_u128(1)));
            async move { store.fail(&terms, &[FailedTry { key, token, retry: Retry::Never, error: String::new() }]).await }
        });
        until("the failure waits", &store, |sessions| sessions.iter().any(|session| session.waits_for_lock)).await;
        other.commit().await.expect("PostgreSQL answers");
        let written = failing.await.expect("no panic").expect("the store works");
        assert_eq!(written[0].fenced == Fenced::LeaseLost, is_lost, "{change}");
        let found: String = sqlx::query_scalar("SELECT concat_ws(' ', status, fence, attempts) FROM processed_jobs")
            .fetch_one(store.pool())
            .await
            .expect("the row is there");
        assert_eq!(found, left, "{change}");
    }
}

/// A person's action likewise, whatever the row was when the person looked.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_who_waited_sees_what_came_between() {
    for (before, change, action, refusal) in [
        (
            "locked_until = 'epoch'",
            "locked_until = clock_timestamp() + interval '1 hour'",
            OperatorAction::Release,
            "PROCESSING",
        ),
        (
            "status = 'RECEIVED', locked_until = NULL, token = NULL",
            "status = 'COMPLETED', completed_at = clock_timestamp()",
            OperatorAction::Fail,
            "COMPLETED",
        ),
    ] {
        let subject = postgres().await;
        let (store, terms) = (subject.store.clone(), terms("waited-operator"));
        store.claim(&terms, &[request("a", 1)]).await.expect("the store works");
        run(&store, &format!("UPDATE processed_jobs SET {before}")).await;
        let mut other = store.pool().begin().await.expect("PostgreSQL answers");
        let text = format!("UPDATE processed_jobs SET {change}");
        sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *other).await.expect("the statement works");
        let operating = tokio::spawn({
            let (store, terms) = (store.clone(), terms.clone());
            async move { store.operate(&terms, &key("a"), action, "tests").await }
        });
        until("the action waits", &store, |sessions| sessions.iter().any(|session| session.waits_for_lock)).await;
        other.commit().await.expect("PostgreSQL answers");
        let operated = operating.await.expect("no panic").expect("the store works");
        assert!(operated.refused.is_some(), "{change}: {operated:?}");
        assert_eq!(operated.after.kind().as_str(), refusal);
        assert_eq!(state(&store, &terms.consumer, "a").await, operated.after);
    }
}

/// A batch reads its rows together and writes them one by one. What comes between must be seen: here the first write is
/// held up while the second row changes.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_changes_between_reading_and_writing_is_looked_at_again() {
    let subject = postgres().await;
    let (store, terms) = (subject.store.clone(), terms("between"));
    run(
        &store,
        "CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM pg_advisory_xact_lock(hashtext(current_schema()));
             RETURN NEW;
         END $$;
         CREATE TRIGGER hold_up BEFORE UPDATE ON processed_jobs
         FOR EACH ROW WHEN (OLD.idempotency_key = 'a') EXECUTE FUNCTION hold_up()",
    )
    .await;
    store.claim(&terms, &[request("a", 1), request("b", 1)]).await.expect("the store works");

    const RECEIVED: &str = "status = 'RECEIVED', token = NULL, locked_until = NULL, fence = 1, attempts = 1,
                            next_attempt_at = NULL, failure_kind = NULL";
    const LAPSED: &str =
        "status = 'PROCESSING', token = '00000000-0000-0000-0000-000000000001', locked_until = 'epoch'";
    const DUE: &str = "status = 'FAILED', failure_kind = 'transient', next_attempt_at = 'epoch'";
    // The tries of the last are used up before and after; the row goes on naming the claim that used the last.
    const USED_UP: &str = "status = 'PROCESSING', token = '00000000-0000-0000-0000-000000000001',
                           locked_until = 'epoch', attempts = 5";
    for (number, (before, change, told)) in (10..).zip([
        (RECEIVED, "status = 'COMPLETED'", "Duplicate, by nobody"),
        (RECEIVED, "fence = 7", "try 2, claim 8"),
        (RECEIVED, "attempts = 3", "try 4, claim 2"),
        (RECEIVED, "payload_hash = payload_hash", "try 2, claim 2"),
        (LAPSED, "locked_until = clock_timestamp() + interval '1 hour'", "InProgress, by 1"),
        (USED_UP, "token = '00000000-0000-0000-0000-000000000008'", "Exhausted, by 8"),
        (DUE, "next_attempt_at = clock_timestamp() + interval '1 hour'", "NotDue, by nobody"),
        (DUE, "failure_kind = 'terminal', next_attempt_at = NULL", "Exhausted, by nobody"),
    ]) {
        run(&store, &format!("UPDATE processed_jobs SET {RECEIVED}")).await;
        run(&store, &format!("UPDATE processed_jobs SET {before} WHERE idempotency_key = 'b'")).await;
        let mut gate = store.pool().begin().await.expect("PostgreSQL answers");
        sqlx::query("SELECT pg_advisory_xact_lock(hashtext(current_schema()))")
            .execute(&mut *gate)
            .await
            .expect("nobody else has it");
        let claiming = tokio::spawn({
            let (store, terms) = (store.clone(), terms.clone());
            async move { store.claim(&terms, &[request("a", number), request("b", number + 100)]).await }
        });
        until("the claim is held up", &store, |sessions| sessions.iter().any(|session| session.waits_for_lock)).await;
        run(&store, &format!("UPDATE processed_jobs SET {change} WHERE idempotency_key = 'b'")).await;
        gate.rollback().await.expect("PostgreSQL answers");
        let answers = claiming.await.expect("no panic").expect("the store works");
        assert!(is_run(answers[0].decision));
        let found = match answers[1].decision {
            Decision::Run(run) => format!("try {}, claim {}", run.attempt, run.fence),
            other => {
                let name = format!("{other:?}").split(' ').next().unwrap_or_default().to_owned();
                let token = state(&store, &terms.consumer, "b").await.token();
                format!("{name}, by {}", token.map_or("nobody".to_owned(), |token| token.0.as_u128().to_string()))
            }
        };
        assert_eq!(found, told, "{change}");
    }
}

/// Each of two batches holds what the other wants next, unless both lock in one order.
#[tokio::test(flavor = "multi_thread")]
async fn batches_lock_in_the_order_of_their_keys() {
    let subject = postgres().await;
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
    let subject = postgres().await;
    let (store, terms) = (&subject.store, terms("row-locked"));
    let all: Vec<EventKey> = ["a", "b", "c"].map(key).to_vec();
    let requests =
        |first: u128| -> Vec<_> { ["a", "b", "c"].iter().zip(first..).map(|(k, n)| request(k, n)).collect() };
    store.claim(&terms, &requests(1)).await.expect("the store works");

    let mut locker = store.pool().begin().await.expect("PostgreSQL answers");
    sqlx::query("SELECT FROM processed_jobs WHERE idempotency_key = 'b' FOR UPDATE")
        .execute(&mut *locker)
        .await
        .expect("nobody else has it");
    let held: Vec<_> = all.iter().cloned().zip((1..).map(|number| Token(Uuid::from_u128(number)))).collect();
    let renewed = timeout(Duration::from_secs(5), store.renew(&terms, &held)).await.expect("it does not wait for long");
    assert_eq!(renewed.expect("the store works"), [Renewal::Renewed, Renewal::Unconfirmed, Renewal::Renewed]);

    sqlx::query(
        "UPDATE processed_jobs SET locked_until = locked_until - interval '2 hours' WHERE idempotency_key <> 'b'",
    )
    .execute(store.pool())
    .await
    .expect("the table is there");
    sqlx::query(
        "UPDATE processed_jobs SET locked_until = locked_until - interval '2 hours' WHERE idempotency_key = 'b'",
    )
    .execute(&mut *locker)
    .await
    .expect("the table is there");
    locker.commit().await.expect("PostgreSQL answers");
    let mut locker = store.pool().begin().await.expect("PostgreSQL answers");
    sqlx::query("SELECT FROM processed_jobs WHERE idempotency_key = 'b' FOR UPDATE")
        .execute(&mut *locker)
        .await
        .expect("nobody else has it");
    let answers = timeout(Duration::from_secs(2), store.claim(&terms, &requests(11))).await.expect("it does not wait");
    let answers = answers.expect("the store works");
    assert!(is_run(answers[0].decision) && is_run(answers[2].decision));
    assert!(matches!(answers[1].decision, Decision::InProgress { until } if until > answers[1].now), "come back later");
    locker.rollback().await.expect("PostgreSQL answers");
    assert!(is_run(claim(store, &terms, &request("b", 21)).await));
}

#[tokio::test]
async fn busy_handlers_do_not_hold_up_renewals() {
    let subject = postgres_with(&short().max_connections(1), |schema| schema.url.clone()).await;
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
    let subject = postgres_with(&StoreOptions::default().max_connections(1), |schema| schema.url.clone()).await;
    let terms = terms("dropped");
    let handler = tokio::spawn({
        let (store, terms) = (subject.store.clone(), terms.clone());
        async move {
            let mut tx = store.begin().await.expect("the store works");
            claim_in(&mut tx, &terms, &[request("a", 1)]).await.expect("the store works");
            sqlx::query("SELECT pg_sleep(3600)").execute(connection(&mut tx)).await
        }
    });
    until("the handler sleeps", &subject.store, |sessions| {
        sessions.iter().any(|session| session.query.contains("pg_sleep"))
    })
    .await;
    handler.abort();
    assert!(handler.await.is_err_and(|error| error.is_cancelled()));
    // The only connection is replaced, and the server notices within seconds that the other is gone.
    let claimed = timeout(Duration::from_secs(9), subject.store.claim(&terms, &[request("a", 2)])).await;
    assert!(is_run(claimed.expect("it ends in time").expect("the store works")[0].decision));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_while_it_waits_leaves_the_pool_whole() {
    let subject = postgres_with(&StoreOptions::default().max_connections(2), |schema| schema.url.clone()).await;
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
    rollback(tx).await.expect("the store works");
    // Those that were dropped may still get the key, since the server had their statements; nobody holds it for long then.
    let last = claim(store, &terms, &request("a", 9)).await;
    assert!(matches!(last, Decision::Run(_) | Decision::InProgress { .. }), "{last:?}");
    let open: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND state LIKE 'idle in transaction%'",
    )
    .bind(&subject.schema.name)
    .fetch_one(store.pool())
    .await
    .expect("PostgreSQL answers");
    assert_eq!(open, 0);
}

// ---- outages

/// Ends all sessions of the store at once, as a server does that restarts.
async fn end_sessions(subject: &PostgresSubject) {
    let name = &subject.schema.name;
    crate::subjects::run_on(
        &crate::subjects::postgres_url(),
        format!("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = '{name}'"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_break_cost_one_failed_call_at_most() {
    let subject = postgres().await;
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
    let subject = postgres().await;
    let (terms, mut tx) = begun(&subject).await;
    sqlx::query(INVOICE).execute(connection(&mut tx)).await.expect("the statement works");
    end_sessions(&subject).await;
    assert_eq!(commit(tx).await.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable));
    assert_eq!(state(&subject.store, &terms.consumer, "order").await, State::Absent);
    assert_eq!(count(&subject.store, "invoices").await, 0);
    assert!(is_run(claim(&subject.store, &terms, &request("order", 2)).await));
}

pub mod proxy {
    //! Between store and server, and able to play a network that has stopped.

    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::watch;

    pub struct Proxy {
        pub port: u16,
        stalled: watch::Sender<bool>,
    }

    impl Proxy {
        pub async fn to(host: String, port: u16) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
            let own = listener.local_addr().expect("it is bound").port();
            let (stalled, receiver) = watch::channel(false);
            tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    let server = TcpStream::connect((host.as_str(), port)).await.expect("the server answers");
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    tokio::spawn(pump(from_client, to_server, receiver.clone()));
                    tokio::spawn(pump(from_server, to_client, receiver.clone()));
                }
            });
            Self { port: own, stalled }
        }

        /// From now on nothing gets through, and nobody is told.
        pub fn stall(&self, stalled: bool) {
            self.stalled.send_replace(stalled);
        }
    }

    async fn pump(
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        mut stalled: watch::Receiver<bool>,
    ) {
        let mut buffer = [0; 4096];
        while let Ok(read) = from.read(&mut buffer).await
            && read > 0
            && stalled.wait_for(|stalled| !stalled).await.is_ok()
            && to.write_all(&buffer[..read]).await.is_ok()
        {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_stops_ends_every_call_in_time() {
    let url: sqlx::postgres::PgConnectOptions = crate::subjects::postgres_url().parse().expect("it is a URL");
    let proxy = proxy::Proxy::to(url.get_host().to_owned(), url.get_port()).await;
    let behind = |url: String, from: &sqlx::postgres::PgConnectOptions| {
        url.replacen(&format!("{}:{}", from.get_host(), from.get_port()), &format!("127.0.0.1:{}", proxy.port), 1)
    };
    let subject = postgres_with(&short(), |schema| behind(schema.url.clone(), &url)).await;
    let (store, terms) = (&subject.store, terms("stalled"));
    assert!(subject.store.pool().connect_options().get_port() == proxy.port, "the store is behind the proxy");
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
            async { store.migrate().await.map(drop) },
            async { store.ping().await },
            async { commit(tx).await },
        )
    };
    // Acquiring, then the call; only a migration may take longer, once it has a connection.
    let ended = timeout(Duration::from_secs(130), calls).await.expect("all calls end");
    let ended = [ended.0, ended.1, ended.2, ended.3, ended.4, ended.5, ended.6, ended.7, ended.8];
    for (number, result) in ended.into_iter().enumerate() {
        assert_eq!(result.map_err(|error| error.kind()), Err(StoreErrorKind::Unavailable), "call {number}");
    }

    proxy.stall(false);
    assert_eq!(claim(store, &terms, &request("b", 2)).await, Decision::Duplicate, "its commit got through after all");
    store.ping().await.expect("the pools have recovered");
}

// ---- plans

/// On a young table the planner likes to scan, and keeps such a plan while the table grows.
#[tokio::test]
async fn no_statement_scans_a_young_table() {
    let subject = postgres().await;
    let (store, terms) = (&subject.store, terms("plans"));
    for batch in 0..10 {
        let requests: Vec<_> = (0..100).map(|n| request(&format!("{batch}/{n}"), 1 + batch * 1000 + n)).collect();
        let answers = store.claim(&terms, &requests).await.expect("the store works");
        let held: Vec<_> = requests.iter().map(|request| (request.key.clone(), request.token)).collect();
        store.renew(&terms, &held).await.expect("the store works");
        let done: Vec<_> = requests
            .iter()
            .zip(&answers)
            .take(50)
            .map(|(request, answer)| match answer.decision {
                Decision::Run(run) => idem_core::store::Completion {
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
        let mut tx = store.begin().await.expect("the store works");
        claim_in(&mut tx, &terms, &again).await.expect("the store works");
        commit(tx).await.expect("the store works");
    }
    // Sessions report when they end.
    store.close().await;
    let watcher = PgStore::connect(&subject.schema.url, &StoreOptions::default()).await.expect("PostgreSQL answers");
    let reported = async {
        loop {
            let (scans, searches): (i64, i64) = sqlx::query_as(
                "SELECT seq_scan, idx_scan FROM pg_stat_user_tables
                 WHERE relname = 'processed_jobs' AND schemaname = current_schema()",
            )
            .fetch_one(watcher.pool())
            .await
            .expect("PostgreSQL answers");
            if searches > 0 {
                return (scans, searches);
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let (scans, searches) = timeout(Duration::from_secs(20), reported).await.expect("the sessions report");
    assert!(searches > 1000, "{searches} searches of the key");
    assert!(scans <= 2, "the whole table was read {scans} times; the building of its two indexes counts as two");
}

/// Renewals and counts began when the table was all but empty, and no one has looked at its statistics since. A plan of then
/// would read every row of the consumer for each key.
#[tokio::test]
async fn a_table_that_has_grown_is_not_read_by_plans_of_its_youth() {
    const GROWN: i64 = 20_000;
    let subject = postgres().await;
    let (store, terms) = (&subject.store, terms("plans"));
    run(store, "ALTER TABLE processed_jobs SET (autovacuum_enabled = off)").await;
    let requests: Vec<_> = (0..100).map(|n| request(&format!("held/{n}"), 1 + n)).collect();
    store.claim(&terms, &requests).await.expect("the store works");
    let held: Vec<_> = requests.iter().map(|request| (request.key.clone(), request.token)).collect();
    let counts: Vec<_> = requests.iter().map(|request| (request.key.clone(), 1)).collect();
    let renew_and_count = async |times: usize| {
        for _ in 0..times {
            let renewed = store.renew(&terms, &held).await.expect("the store works");
            assert!(renewed.iter().all(|renewal| *renewal == Renewal::Renewed), "{renewed:?}");
            store.count_duplicates(&terms.consumer, &counts).await.expect("the store works");
        }
    };
    // From the sixth time on the server may keep a plan.
    renew_and_count(10).await;
    let grow = format!(
        "INSERT INTO processed_jobs (consumer_name, idempotency_key, status, fence, attempts, created_at, updated_at)
         SELECT 'plans', 'grown/' || n, 'RECEIVED', 0, 0, now(), now() FROM generate_series(1, {GROWN}) AS n"
    );
    run(store, &grow).await;
    renew_and_count(10).await;
    // Sessions report when they end.
    store.close().await;
    let watcher = PgStore::connect(&subject.schema.url, &StoreOptions::default()).await.expect("PostgreSQL answers");
    let reported = async {
        loop {
            let entries: i64 = sqlx::query_scalar(
                "SELECT idx_tup_read FROM pg_stat_user_indexes
                 WHERE indexrelname = 'processed_jobs_pkey' AND schemaname = current_schema()",
            )
            .fetch_one(watcher.pool())
            .await
            .expect("PostgreSQL answers");
            if entries > 0 {
                return entries;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let entries = timeout(Duration::from_secs(20), reported).await.expect("the sessions report");
    // Twenty times each, two searches for each of a hundred keys; while it was small, a walk along all of it may have been
    // the cheaper way. One plan of its youth would read the grown rows ten times over.
    assert!(entries < 5 * GROWN, "{entries} entries of the index were read");
}

#[tokio::test]
async fn the_application_has_connections_of_its_own() {
    let subject = postgres_with(&short().max_connections(1), |schema| schema.url.clone()).await;
    let busy = subject.store.begin().await.expect("the store works");
    let mut own = subject.store.pool().begin().await.expect("it is not the guard's");
    sqlx::query("CREATE TABLE mine (id int)").execute(&mut *own).await.expect("the statement works");
    own.commit().await.expect("an ordinary transaction");
    assert_eq!(count(&subject.store, "mine").await, 0);
    drop(busy);
    let _ = subject.store();
}

#[tokio::test]
async fn locks_that_nobody_wanted_for_long_are_purged() {
    let subject = postgres().await;
    let name = idem_core::LockName::from_parts([("account", "7")]).expect("a name");
    subject.store.make_locks(std::slice::from_ref(&name)).await.expect("the store works");
    let purge = idem_core::store::Purge { consumer: None, older_than: Duration::from_secs(60), most: 10 };
    for (passed, left) in [(30, 1), (40, 0)] {
        subject.pass(Duration::from_secs(passed)).await;
        subject.store.purge(&purge).await.expect("the store works");
        assert_eq!(count(&subject.store, "job_locks").await, left);
    }
}

/// A purge that finds nothing must not read the whole table.
#[tokio::test]
async fn a_purge_searches_the_index_of_old_rows() {
    let subject = postgres().await;
    sqlx::raw_sql(
        "INSERT INTO processed_jobs (consumer_name, idempotency_key, status, fence, attempts, created_at, updated_at, completed_at)
         SELECT 'c', n::text, 'COMPLETED', 1, 1, now(), now(), now() FROM generate_series(1, 60000) AS n;
         ANALYZE processed_jobs",
    )
    .execute(subject.store.pool())
    .await
    .expect("the table is there");
    let blocks = "SELECT coalesce(pg_stat_get_tuples_returned('processed_jobs'::regclass), 0)";
    let purge = idem_core::store::Purge { consumer: None, older_than: Duration::from_secs(3600), most: 100 };
    let before: i64 = sqlx::query_scalar(blocks).fetch_one(subject.store.pool()).await.expect("PostgreSQL answers");
    assert_eq!(subject.store.purge(&purge).await.expect("the store works"), 0);
    // Sessions report when they end.
    subject.store.close().await;
    let watcher = PgStore::connect(&subject.schema.url, &StoreOptions::default()).await.expect("PostgreSQL answers");
    let by_index = async {
        let searches = "SELECT idx_scan FROM pg_stat_user_indexes
                        WHERE indexrelname = 'processed_jobs_created' AND schemaname = current_schema()";
        while sqlx::query_scalar::<_, i64>(searches).fetch_one(watcher.pool()).await.expect("PostgreSQL answers") == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(20), by_index).await.expect("the index was searched");
    let after: i64 = sqlx::query_scalar(blocks).fetch_one(watcher.pool()).await.expect("PostgreSQL answers");
    assert!(after - before < 60_000, "{} rows were read by scanning", after - before);
}
