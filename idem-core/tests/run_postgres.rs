//! From delivery to outcome on PostgreSQL, where a failed statement takes its transaction along.
//!
//! The address comes from `IDEM_TEST_POSTGRES_URL`; `scripts/test` sets it. Every test has a schema of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use idem_core::store::{StoreOptions, connect};
use idem_core::{AlreadyDone, Classify, Delivery, FailureKind, Guard, Guarded, Outcome, idempotent};
use serde_json::json;
use sqlx::PgConnection;
use tokio_util::sync::CancellationToken;

#[derive(serde::Deserialize)]
struct Order {
    order_id: String,
    #[serde(default)]
    act: String,
}

#[derive(Debug, thiserror::Error, Classify)]
#[error(transparent)]
#[classify(inner)]
struct Failed(#[from] sqlx::Error);

#[idempotent(
    key = "order_id",
    consumer = "invoice",
    attempts = 2,
    backoff = "1ms..1ms",
    max_run = "300ms",
    domain_unique = "uq_invoices_order_id"
)]
async fn invoice(event: Order, tx: &mut PgConnection) -> Result<(), Failed> {
    sqlx::query("INSERT INTO invoices (order_id) VALUES ($1)").bind(&event.order_id).execute(&mut *tx).await?;
    let statement = match event.act.as_str() {
        "hide" => "SELECT 1 / 0",
        "cut" => "SELECT pg_terminate_backend(pg_backend_pid())",
        "sleep" => "SELECT pg_sleep(30)",
        "late" => "INSERT INTO lines (order_id) VALUES ('no such order')",
        _ => return Ok(()),
    };
    // Like many handlers do with an error they think they know.
    if let Err(error) = sqlx::query(statement).execute(tx).await {
        eprintln!("hidden: {error}");
    }
    Ok(())
}

struct Bed {
    guarded: Guarded,
    pool: sqlx::PgPool,
}

async fn bed() -> Bed {
    let database = std::env::var("IDEM_TEST_POSTGRES_URL").unwrap_or_else(|_| {
        panic!("IDEM_TEST_POSTGRES_URL is not set: run `scripts/test`, or start a server with `scripts/services up postgres` and `eval \"$(scripts/services env)\"`")
    });
    let schema = format!("run_{}", uuid::Uuid::new_v4().simple());
    let separator = if database.contains('?') { '&' } else { '?' };
    let url = format!("{database}{separator}options=-c%20search_path%3D{schema}");
    let pool = sqlx::PgPool::connect(&url).await.expect("PostgreSQL answers");
    let tables = format!(
        "CREATE SCHEMA {schema};
         CREATE TABLE {schema}.invoices (order_id text CONSTRAINT uq_invoices_order_id UNIQUE);
         CREATE TABLE {schema}.lines (order_id text REFERENCES {schema}.invoices (order_id) DEFERRABLE INITIALLY DEFERRED)"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(tables)).execute(&pool).await.unwrap();
    let store = connect(&url, &StoreOptions::default()).await.unwrap();
    store.migrate().await.unwrap();
    Bed { guarded: Guard::new(store).bind(invoice).unwrap(), pool }
}

impl Bed {
    async fn run(&self, orders: &[(&str, &str)]) -> HashMap<String, Outcome> {
        let deliveries = orders.iter().map(|(id, act)| {
            let body = json!({"order_id": id, "act": act}).to_string().into_bytes();
            self.guarded.prepare(Some(Arc::new(body)), &(), "m".into()).unwrap()
        });
        let outcomes = Mutex::new(HashMap::new());
        let report = |delivery: Delivery, outcome: Outcome| {
            outcomes.lock().unwrap().insert(delivery.key().to_string(), outcome);
        };
        self.guarded.run(deliveries.collect(), &CancellationToken::new(), &report).await;
        outcomes.into_inner().unwrap()
    }

    async fn invoices(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT order_id FROM invoices ORDER BY order_id").fetch_all(&self.pool).await.unwrap()
    }
}

fn completed(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Completed { already_done: None, .. })
}

/// A message that takes its transaction along costs itself its attempts, and its neighbours nothing.
async fn takes_its_transaction_along(act: &str, kind: FailureKind) {
    let bed = bed().await;
    let outcomes = bed.run(&[("A", ""), ("B", act), ("C", ""), ("D", "")]).await;
    for id in ["A", "C", "D"] {
        assert!(completed(&outcomes[id]), "{act} {id}: {:?}", outcomes[id]);
    }
    match &outcomes["B"] {
        Outcome::Failed { attempt: 1, retry_in: Some(_), failure } => assert_eq!(failure.kind, kind, "{failure:?}"),
        other => panic!("{act}: {other:?}"),
    }
    assert_eq!(bed.invoices().await, ["A", "C", "D"], "{act}");
    // Alone, and for the last time: it must not come back for ever.
    let last = loop {
        match bed.run(&[("B", act)]).await.remove("B").unwrap() {
            Outcome::NotDue { wait } => tokio::time::sleep(wait).await,
            outcome => break outcome,
        }
    };
    assert!(matches!(last, Outcome::Failed { attempt: 2, retry_in: None, .. }), "{act}: {last:?}");
}

#[tokio::test]
async fn an_error_that_the_handler_hides_is_its_failure_alone() {
    takes_its_transaction_along("hide", FailureKind::Transient).await;
}

#[tokio::test]
async fn a_handler_that_hangs_inside_a_statement_is_stopped_and_counted() {
    takes_its_transaction_along("sleep", FailureKind::Timeout).await;
}

#[tokio::test]
async fn a_handler_that_cuts_its_own_connection_is_no_outage() {
    takes_its_transaction_along("cut", FailureKind::Transient).await;
}

#[tokio::test]
async fn a_constraint_checked_at_the_commit_is_its_failure_alone() {
    takes_its_transaction_along("late", FailureKind::Transient).await;
}

#[tokio::test]
async fn t3_the_domains_own_constraint_completes_the_job() {
    let bed = bed().await;
    sqlx::raw_sql("INSERT INTO invoices VALUES ('B')").execute(&bed.pool).await.unwrap();
    let outcomes = bed.run(&[("A", ""), ("B", ""), ("C", "")]).await;
    assert!(completed(&outcomes["A"]) && completed(&outcomes["C"]));
    assert!(
        matches!(outcomes["B"], Outcome::Completed { already_done: Some(AlreadyDone::Domain), .. }),
        "{:?}",
        outcomes["B"]
    );
    assert_eq!(bed.invoices().await, ["A", "B", "C"]);
}

#[tokio::test]
async fn what_is_committed_is_on_disk_whatever_the_server_prefers() {
    let bed = bed().await;
    // The database's default is as careless as some are tuned to be; the guard's own connections are not.
    let database: String = sqlx::query_scalar("SELECT current_database()").fetch_one(&bed.pool).await.unwrap();
    let role = format!("careless_{}", uuid::Uuid::new_v4().simple());
    let create = format!("CREATE ROLE {role} LOGIN SUPERUSER; ALTER ROLE {role} SET synchronous_commit = off");
    sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&bed.pool).await.unwrap();
    let url = std::env::var("IDEM_TEST_POSTGRES_URL").unwrap();
    let (_, address) = url.split_once('@').expect("the test server's address names a user");
    let store = connect(&format!("postgres://{role}@{address}"), &StoreOptions::default()).await.unwrap();
    let mut tx = store.begin().await.unwrap();
    let connection = tx.connection::<PgConnection>().unwrap();
    let setting: String = sqlx::query_scalar("SHOW synchronous_commit").fetch_one(connection).await.unwrap();
    drop(tx);
    store.close().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("DROP ROLE {role}"))).execute(&bed.pool).await.unwrap();
    assert_eq!(setting, "on", "on {database}");
}
