//! The process ends at each named point, is started again, and the promise is checked from outside.
//!
//! Each crash happens in a child: this very program, told by environment which mode to run and where to end.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use idem_core::run::CrashPoint;
use idem_core::store::{StoreOptions, Tx, connect, sql};
use idem_core::{Guard, Job, Mode, Outcome, State, idempotent};
use serde_json::json;
use tokio_util::sync::CancellationToken;

#[derive(serde::Deserialize)]
struct Order {
    order_id: String,
}

#[idempotent(key = "order_id", consumer = "atomic")]
async fn atomic(event: Order, tx: &mut Tx) -> Result<(), sqlx::Error> {
    tx.execute(sql("INSERT INTO effects (id) VALUES ($1)").bind(&event.order_id)).await?;
    Ok(())
}

struct Callee(sqlx::SqlitePool);

/// The effect is elsewhere: in another database, which honours the downstream key as a good callee does.
#[idempotent(key = "order_id", consumer = "lease", lease = "300ms")]
async fn lease(_event: Order, job: &Job, callee: State<Callee>) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO calls DEFAULT VALUES").execute(&callee.0).await?;
    sqlx::query("INSERT OR IGNORE INTO effects (id) VALUES ($1)")
        .bind(job.downstream_key("effect"))
        .execute(&callee.0)
        .await?;
    Ok(())
}

fn url(folder: &Path, name: &str) -> String {
    format!("sqlite://{}?mode=rwc", folder.join(name).display())
}

async fn open(folder: &Path, name: &str) -> sqlx::SqlitePool {
    let pool = sqlx::SqlitePool::connect(&url(folder, name)).await.unwrap();
    // In the atomic mode a second effect is an error only if the table says so: here it must be seen, so it may be there.
    let tables =
        "CREATE TABLE IF NOT EXISTS effects (id TEXT); CREATE TABLE IF NOT EXISTS calls (id INTEGER PRIMARY KEY)";
    sqlx::raw_sql(tables).execute(&pool).await.unwrap();
    if name == "callee.sqlite" {
        sqlx::raw_sql("CREATE UNIQUE INDEX IF NOT EXISTS one ON effects (id)").execute(&pool).await.unwrap();
    }
    pool
}

/// One worker's life: asks for the job until it is decided.
async fn work(mode: Mode, folder: &Path) {
    let callee = open(folder, "callee.sqlite").await;
    drop(open(folder, "guard.sqlite").await);
    let store_url = format!("sqlite://{}", folder.join("guard.sqlite").display());
    let store = connect(&store_url, &StoreOptions::default()).await.unwrap();
    store.migrate().await.unwrap();
    let guard = Guard::new(store).state(Callee(callee));
    let guarded = match mode {
        Mode::Atomic => guard.bind(atomic),
        Mode::Lease => guard.bind(lease),
    };
    let guarded = guarded.unwrap();
    loop {
        let body = json!({"order_id": "A-1"}).to_string().into_bytes();
        let delivery = guarded.prepare(Some(Arc::new(body)), &(), "m".into()).unwrap();
        match guarded.run_one(delivery, &CancellationToken::new()).await {
            Outcome::Completed { .. } | Outcome::Duplicate(_) => return,
            Outcome::InProgress { wait } => tokio::time::sleep(wait).await,
            other => panic!("{other:?}"),
        }
    }
}

const CHILD: &str = "IDEM_CRASH_CHILD";

/// Not a test of its own: what the child does. Without its variable it has nothing to do.
#[tokio::test]
async fn child() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let (mode, folder) = task.split_once(':').unwrap();
    work(if mode == "atomic" { Mode::Atomic } else { Mode::Lease }, Path::new(folder)).await;
}

/// Runs a child; whether it ended well.
fn run_child(mode: &str, folder: &Path, crash_at: Option<CrashPoint>) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child"]).env(CHILD, format!("{mode}:{}", folder.display()));
    if let Some(point) = crash_at {
        command.env("IDEM_CRASH_AT", format!("{}:1", point.as_str()));
    }
    command.output().unwrap().status.success()
}

async fn count(pool: &sqlx::SqlitePool, table: &str) -> i64 {
    let text = format!("SELECT count(*) FROM {table}");
    sqlx::query_scalar(sqlx::AssertSqlSafe(text)).fetch_one(pool).await.unwrap()
}

#[tokio::test]
async fn c2_a_crash_at_any_point_neither_loses_nor_doubles_the_effect() {
    let mut crashes = 0;
    for (mode, points) in [
        ("atomic", &CrashPoint::ALL[..]),
        ("lease", &[CrashPoint::Claimed, CrashPoint::Handled, CrashPoint::Recorded][..]),
    ] {
        for point in points {
            let folder = tempfile::tempdir().unwrap();
            assert!(!run_child(mode, folder.path(), Some(*point)), "{mode} {point:?}: it did not crash");
            crashes += 1;
            assert!(run_child(mode, folder.path(), None), "{mode} {point:?}: it does not go on");
            assert!(run_child(mode, folder.path(), None), "{mode} {point:?}: a redelivery is not skipped");

            let guard = open(folder.path(), "guard.sqlite").await;
            let callee = open(folder.path(), "callee.sqlite").await;
            let effects = count(&guard, "effects").await + count(&callee, "effects").await;
            assert_eq!(effects, 1, "{mode} {point:?}");
            let calls = count(&callee, "calls").await;
            let twice = mode == "lease" && *point == CrashPoint::Handled;
            let expected = if mode == "atomic" { 0 } else { 1 + i64::from(twice) };
            assert_eq!(calls, expected, "{mode} {point:?}: only a crash between effect and completion calls again");
            let status: String =
                sqlx::query_scalar("SELECT status FROM processed_jobs").fetch_one(&guard).await.unwrap();
            assert_eq!(status, "COMPLETED", "{mode} {point:?}");
        }
    }
    assert_eq!(crashes, 8);
}
