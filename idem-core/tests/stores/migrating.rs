//! The tables: made once however many start at once, refused when they are not what this version relies on.

use std::time::Duration;

use futures_util::future::join_all;
use idem_core::store::{PgStore, SqliteStore, Store, StoreErrorKind, StoreOptions};
use sqlx::{AssertSqlSafe, PgPool, SqlitePool};

use crate::subjects::{Folder, Schema, postgres, request, run_on, sqlite, terms, with_option};

const AT_ONCE: usize = 8;

fn few_connections() -> StoreOptions {
    StoreOptions::default().max_connections(2)
}

async fn on_postgres(pool: &PgPool, text: &str) {
    sqlx::raw_sql(AssertSqlSafe(text.to_owned())).execute(pool).await.expect("the statement works");
}

async fn on_sqlite(pool: &SqlitePool, text: &str) {
    sqlx::raw_sql(AssertSqlSafe(text.to_owned())).execute(pool).await.expect("the statement works");
}

/// The kind and the sentence of a refused migration.
async fn refused(store: &dyn Store) -> (StoreErrorKind, String) {
    let error = store.migrate().await.expect_err("it must be refused");
    (error.kind(), error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_migrate_postgres_at_once() {
    let schema = Schema::new().await;
    let options = few_connections();
    let stores = join_all((0..AT_ONCE).map(|_| PgStore::connect(&schema.url, &options))).await;
    let stores: Vec<_> = stores.into_iter().map(|store| store.expect("PostgreSQL answers")).collect();
    for migrated in join_all(stores.iter().map(Store::migrate)).await {
        migrated.expect("one does it, the others wait");
    }
    let (records,): (i64,) =
        sqlx::query_as("SELECT count(*) FROM _idem_migrations").fetch_one(stores[0].pool()).await.expect("it is there");
    assert_eq!(records, 1);
    stores[0].claim(&terms("after"), &[request("a", 1)]).await.expect("the tables work");
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_migrate_sqlite_at_once() {
    let folder = Folder::new();
    let starts = (0..AT_ONCE).map(|_| {
        let url = folder.url();
        tokio::spawn(async move {
            let store = SqliteStore::connect(&url, &StoreOptions::default()).await.expect("the file can be made");
            store.migrate().await.expect("one does it, the others wait");
            store
        })
    });
    let stores: Vec<_> = join_all(starts).await.into_iter().map(|store| store.expect("no panic")).collect();
    let (records,): (i64,) =
        sqlx::query_as("SELECT count(*) FROM _idem_migrations").fetch_one(stores[0].pool()).await.expect("it is there");
    assert_eq!(records, 1);
    stores[0].claim(&terms("after"), &[request("a", 1)]).await.expect("the tables work");
}

const NEWER: &str = "INSERT INTO _idem_migrations (version, name, checksum) VALUES (99, '0099_of_tomorrow', 'x')";
const CHANGED: &str = "UPDATE _idem_migrations SET checksum = 'x'";

#[tokio::test]
async fn tables_of_a_newer_version_are_refused() {
    let postgres = postgres().await;
    on_postgres(postgres.store.pool(), NEWER).await;
    let sqlite = sqlite().await;
    on_sqlite(sqlite.store.pool(), NEWER).await;
    for store in [&postgres.store as &dyn Store, &sqlite.store] {
        let (kind, text) = refused(store).await;
        assert_eq!(kind, StoreErrorKind::Schema, "{text}");
        assert!(
            text.contains("version 99") && text.contains("version 1") && text.contains("update the program"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_migration_that_changed_since_is_refused() {
    let postgres = postgres().await;
    on_postgres(postgres.store.pool(), CHANGED).await;
    let sqlite = sqlite().await;
    on_sqlite(sqlite.store.pool(), CHANGED).await;
    for store in [&postgres.store as &dyn Store, &sqlite.store] {
        let (kind, text) = refused(store).await;
        assert_eq!(kind, StoreErrorKind::Schema, "{text}");
        assert!(text.contains("another migration 1"), "{text}");
    }
}

#[tokio::test]
async fn a_table_of_the_application_under_the_same_name_is_left_alone() {
    let schema = Schema::new().await;
    run_on(&schema.url, "CREATE TABLE processed_jobs (mine text); INSERT INTO processed_jobs VALUES ('x')".into())
        .await;
    let store = PgStore::connect(&schema.url, &few_connections()).await.expect("PostgreSQL answers");
    assert_eq!(refused(&store).await.0, StoreErrorKind::Schema);
    let (mine,): (String,) =
        sqlx::query_as("SELECT mine FROM processed_jobs").fetch_one(store.pool()).await.expect("it is as it was");
    assert_eq!(mine, "x");
    let records: Option<String> = sqlx::query_scalar("SELECT to_regclass('_idem_migrations')::text")
        .fetch_one(store.pool())
        .await
        .expect("PostgreSQL answers");
    assert_eq!(records, None, "nothing stays of a migration that failed");
}

#[tokio::test]
async fn a_postgres_without_its_primary_key_is_refused() {
    let subject = postgres().await;
    let (store, pool) = (&subject.store, subject.store.pool());
    on_postgres(pool, "ALTER TABLE processed_jobs DROP CONSTRAINT processed_jobs_pkey").await;
    let (kind, text) = refused(store).await;
    assert_eq!(kind, StoreErrorKind::Schema, "{text}");
    assert!(text.contains("primary key (consumer_name, idempotency_key)"), "{text}");
    let claim = store.claim(&terms("damaged"), &[request("a", 1)]).await;
    assert_eq!(claim.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Schema), "also while it runs");

    // What looks like it and guards nothing.
    for index in [
        "CREATE UNIQUE INDEX pair ON processed_jobs (consumer_name, idempotency_key) WHERE status = 'COMPLETED'",
        "CREATE INDEX pair ON processed_jobs (consumer_name, idempotency_key)",
        "CREATE UNIQUE INDEX pair ON processed_jobs (consumer_name, idempotency_key, status)",
        "CREATE UNIQUE INDEX pair ON processed_jobs (consumer_name) INCLUDE (idempotency_key)",
        "ALTER TABLE processed_jobs ADD CONSTRAINT pair UNIQUE (consumer_name, idempotency_key) DEFERRABLE",
    ] {
        on_postgres(pool, index).await;
        assert_eq!(refused(store).await.0, StoreErrorKind::Schema, "{index}");
        on_postgres(pool, "ALTER TABLE processed_jobs DROP CONSTRAINT IF EXISTS pair; DROP INDEX IF EXISTS pair").await;
    }
    on_postgres(pool, "ALTER TABLE processed_jobs ADD PRIMARY KEY (consumer_name, idempotency_key)").await;
    store.migrate().await.expect("as the error said");
}

#[tokio::test]
async fn an_sqlite_without_its_primary_key_is_refused() {
    let subject = sqlite().await;
    let (store, pool) = (&subject.store, subject.store.pool());
    let copy = "ALTER TABLE processed_jobs RENAME TO damaged; CREATE TABLE processed_jobs AS SELECT * FROM damaged";
    on_sqlite(pool, copy).await;
    let (kind, text) = refused(store).await;
    assert_eq!(kind, StoreErrorKind::Schema, "{text}");
    let claim = store.claim(&terms("damaged"), &[request("a", 1)]).await;
    assert_eq!(claim.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Schema), "also while it runs");

    // What looks like it and guards nothing.
    for (name, index) in [
        ("a", "CREATE UNIQUE INDEX a ON processed_jobs (consumer_name, idempotency_key) WHERE status = 'X'"),
        ("b", "CREATE INDEX b ON processed_jobs (consumer_name, idempotency_key)"),
        ("c", "CREATE UNIQUE INDEX c ON processed_jobs (consumer_name, idempotency_key, status)"),
        ("d", "CREATE UNIQUE INDEX d ON processed_jobs (token)"),
    ] {
        on_sqlite(pool, index).await;
        assert_eq!(refused(store).await.0, StoreErrorKind::Schema, "{index}");
        on_sqlite(pool, &format!("DROP INDEX {name}")).await;
    }
    on_sqlite(pool, "CREATE UNIQUE INDEX pair ON processed_jobs (consumer_name, idempotency_key)").await;
    store.migrate().await.expect("the pair is unique again");
}

#[tokio::test]
async fn a_table_that_is_gone_is_a_schema_error() {
    let postgres = postgres().await;
    on_postgres(postgres.store.pool(), "DROP TABLE processed_jobs").await;
    let sqlite = sqlite().await;
    on_sqlite(sqlite.store.pool(), "DROP TABLE processed_jobs").await;
    for store in [&postgres.store as &dyn Store, &sqlite.store] {
        let claim = store.claim(&terms("gone"), &[request("a", 1)]).await;
        assert_eq!(claim.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Schema));
        assert_eq!(refused(store).await.0, StoreErrorKind::Schema);
    }
}

#[tokio::test]
async fn a_search_path_without_a_schema_is_refused() {
    let schema = Schema::new().await;
    let url = with_option(&schema.url, "search_path", "no_such_schema");
    let store = PgStore::connect(&url, &few_connections()).await.expect("PostgreSQL answers");
    let (kind, text) = refused(&store).await;
    assert_eq!(kind, StoreErrorKind::Schema);
    assert!(text.contains("search_path"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_waits_for_another() {
    let schema = Schema::new().await;
    let store = PgStore::connect(&schema.url, &few_connections().lock_timeout(Duration::from_millis(100))).await;
    let store = store.expect("PostgreSQL answers");
    let other = store.pool().begin().await;
    let mut other = other.expect("PostgreSQL answers");
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('idem migrations in ' || current_schema(), 0))")
        .execute(&mut *other)
        .await
        .expect("nobody else has it");
    let migrating = tokio::spawn({
        let store = store.clone();
        async move { store.migrate().await }
    });
    crate::only_postgres::until("the migration waits longer than the limit for locks", &store, |sessions| {
        sessions.iter().any(|session| session.waits_for_lock && session.for_seconds > 0.3)
    })
    .await;
    other.rollback().await.expect("PostgreSQL answers");
    migrating.await.expect("no panic").expect("it is its turn");
}

// ---- the files against the expected end state

#[tokio::test]
async fn postgres_ends_in_the_expected_schema() {
    let migrated = postgres().await;
    let expected = Schema::new().await;
    run_on(&expected.url, include_str!("../../migrations/schema/postgres.sql").into()).await;
    let found = describe_postgres(&migrated.schema.url).await;
    assert!(found.iter().any(|line| line.contains("idempotency_key")), "{found:?}");
    assert_eq!(found, describe_postgres(&expected.url).await);
}

async fn describe_postgres(url: &str) -> Vec<String> {
    let store = PgStore::connect(url, &few_connections()).await.expect("PostgreSQL answers");
    sqlx::query_scalar(
        "SELECT format('table %s %s', relname, reloptions) FROM pg_class
         WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v', 'S')
         UNION ALL
         SELECT format('column %s.%s %s collate %s not null %s default %s', c.relname, a.attname,
                       format_type(a.atttypid, a.atttypmod), a.attcollation::regcollation, a.attnotnull,
                       pg_get_expr(d.adbin, d.adrelid))
         FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
         LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
         UNION ALL
         SELECT format('constraint %s on %s %s', conname, conrelid::regclass, pg_get_constraintdef(oid))
         FROM pg_constraint WHERE connamespace = current_schema()::regnamespace
         UNION ALL
         SELECT 'index ' || replace(indexdef, quote_ident(schemaname) || '.', '') FROM pg_indexes
         WHERE schemaname = current_schema()
         ORDER BY 1",
    )
    .fetch_all(store.pool())
    .await
    .expect("the catalogue can be read")
}

#[tokio::test]
async fn sqlite_ends_in_the_expected_schema() {
    let migrated = sqlite().await;
    let folder = Folder::new();
    let expected = SqliteStore::connect(&folder.url(), &StoreOptions::default()).await.expect("the file can be made");
    on_sqlite(expected.pool(), include_str!("../../migrations/schema/sqlite.sql")).await;
    let found = describe_sqlite(migrated.store.pool()).await;
    assert!(found.iter().any(|line| line.contains("idempotency_key")), "{found:?}");
    assert_eq!(found, describe_sqlite(expected.pool()).await);
}

/// The definitions, without comments and line breaks.
async fn describe_sqlite(pool: &SqlitePool) -> Vec<String> {
    let definitions: Vec<String> =
        sqlx::query_scalar("SELECT type || ' ' || name || ' ' || coalesce(sql, '') FROM sqlite_master ORDER BY 1")
            .fetch_all(pool)
            .await
            .expect("the schema can be read");
    let plain = |line: &str| line.split("--").next().unwrap_or_default().to_owned();
    let one_line = |definition: &String| {
        let lines: Vec<_> = definition.lines().map(plain).collect();
        lines.join(" ").split_whitespace().collect::<Vec<_>>().join(" ")
    };
    definitions.iter().map(one_line).collect()
}
