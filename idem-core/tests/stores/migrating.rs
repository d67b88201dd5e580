//! The tables: made once however many start at once, refused when they are not what this version relies on.

use std::time::Duration;

use futures_util::future::join_all;
use idem_core::store::{MysqlStore, PgStore, SqliteStore, Store, StoreErrorKind, StoreOptions};
use sqlx::{AssertSqlSafe, MySqlPool, PgPool, SqlitePool};

use crate::subjects::{
    Database, Folder, Schema, mariadb, postgres, postgres_partitioned, request, run_on, run_on_mariadb, sqlite, terms,
    with_option,
};

const AT_ONCE: usize = 8;
/// How many there are.
const MIGRATIONS: i64 = 2;

fn few_connections() -> StoreOptions {
    StoreOptions::default().max_connections(2)
}

async fn on_postgres(pool: &PgPool, text: &str) {
    sqlx::raw_sql(AssertSqlSafe(text.to_owned())).execute(pool).await.expect("the statement works");
}

async fn on_mariadb(pool: &MySqlPool, text: &str) {
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
    assert_eq!(records, MIGRATIONS);
    stores[0].claim(&terms("after"), &[request("a", 1)]).await.expect("the tables work");
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_migrate_mariadb_at_once() {
    let database = Database::new().await;
    let options = few_connections();
    let stores = join_all((0..AT_ONCE).map(|_| MysqlStore::connect(&database.url, &options))).await;
    let stores: Vec<_> = stores.into_iter().map(|store| store.expect("MariaDB answers")).collect();
    for migrated in join_all(stores.iter().map(Store::migrate)).await {
        migrated.expect("one does it, the others wait");
    }
    let (records,): (i64,) = sqlx::query_as("SELECT count(*) FROM _idem_migrations WHERE applied_at IS NOT NULL")
        .fetch_one(stores[0].pool())
        .await
        .expect("it is there");
    assert_eq!(records, MIGRATIONS);
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
    assert_eq!(records, MIGRATIONS);
    stores[0].claim(&terms("after"), &[request("a", 1)]).await.expect("the tables work");
}

const NEWER: &str = "INSERT INTO _idem_migrations (version, name, checksum) VALUES (99, '0099_of_tomorrow', 'x')";
const NEWER_ON_MARIADB: &str = "INSERT INTO _idem_migrations (version, name, checksum, applied_at)
                                VALUES (99, '0099_of_tomorrow', 'x', UTC_TIMESTAMP(6))";
const CHANGED: &str = "UPDATE _idem_migrations SET checksum = 'x'";

#[tokio::test]
async fn tables_of_a_newer_version_are_refused() {
    let postgres = postgres().await;
    on_postgres(postgres.store.pool(), NEWER).await;
    let mariadb = mariadb().await;
    on_mariadb(mariadb.store.pool(), NEWER_ON_MARIADB).await;
    let sqlite = sqlite().await;
    on_sqlite(sqlite.store.pool(), NEWER).await;
    for store in [&postgres.store as &dyn Store, &mariadb.store, &sqlite.store] {
        let (kind, text) = refused(store).await;
        assert_eq!(kind, StoreErrorKind::Schema, "{text}");
        assert!(
            text.contains("version 99")
                && text.contains(&format!("version {MIGRATIONS}"))
                && text.contains("update the program"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_migration_that_changed_since_is_refused() {
    let postgres = postgres().await;
    on_postgres(postgres.store.pool(), CHANGED).await;
    let mariadb = mariadb().await;
    on_mariadb(mariadb.store.pool(), CHANGED).await;
    let sqlite = sqlite().await;
    on_sqlite(sqlite.store.pool(), CHANGED).await;
    for store in [&postgres.store as &dyn Store, &mariadb.store, &sqlite.store] {
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
async fn a_table_of_the_application_in_mariadb_is_left_alone() {
    let database = Database::new().await;
    let mine = "CREATE TABLE processed_jobs (mine TEXT); INSERT INTO processed_jobs VALUES ('x')";
    run_on_mariadb(&database.url, mine.into()).await;
    let store = MysqlStore::connect(&database.url, &few_connections()).await.expect("MariaDB answers");
    for _ in 0..2 {
        assert_eq!(refused(&store).await.0, StoreErrorKind::Schema);
        let (mine,): (String,) =
            sqlx::query_as("SELECT mine FROM processed_jobs").fetch_one(store.pool()).await.expect("it is as it was");
        assert_eq!(mine, "x");
    }
    on_mariadb(store.pool(), "RENAME TABLE processed_jobs TO mine").await;
    store.migrate().await.expect("the name is free");
    store.claim(&terms("after"), &[request("a", 1)]).await.expect("the tables work");
}

/// DDL commits by itself in MySQL, so a process can die between a table and its record.
#[tokio::test]
async fn a_migration_of_mariadb_that_was_interrupted_is_taken_up_again() {
    let begun = "UPDATE _idem_migrations SET applied_at = NULL";
    for interrupted in [
        // before the first statement, after the last, and before the record
        format!("{begun}; DROP TABLE processed_jobs"),
        begun.to_owned(),
        "DROP TABLE processed_jobs, job_locks; DELETE FROM _idem_migrations".to_owned(),
    ] {
        let subject = mariadb().await;
        let (store, pool) = (&subject.store, subject.store.pool());
        on_mariadb(pool, &interrupted).await;
        store.migrate().await.unwrap_or_else(|error| panic!("{interrupted}: {error:?}"));
        let (applied,): (i64,) = sqlx::query_as("SELECT count(*) FROM _idem_migrations WHERE applied_at IS NOT NULL")
            .fetch_one(pool)
            .await
            .expect("it is there");
        assert_eq!(applied, MIGRATIONS, "{interrupted}");
        store.claim(&terms("after"), &[request("a", 1)]).await.expect("the tables work");
    }

    let subject = mariadb().await;
    on_mariadb(
        subject.store.pool(),
        "INSERT INTO _idem_migrations (version, name, checksum) VALUES (3, '0003_x', 'y')",
    )
    .await;
    let (kind, text) = refused(&subject.store).await;
    assert_eq!(kind, StoreErrorKind::Schema);
    assert!(text.contains("has begun migration 3 (0003_x) and not finished it"), "{text}");
}

#[tokio::test]
async fn a_mariadb_without_its_primary_key_is_refused() {
    let subject = mariadb().await;
    let (store, pool) = (&subject.store, subject.store.pool());
    let restore = "ALTER TABLE processed_jobs ADD PRIMARY KEY (consumer_name, idempotency_key)";
    on_mariadb(pool, "ALTER TABLE processed_jobs DROP PRIMARY KEY").await;
    let (kind, text) = refused(store).await;
    assert_eq!(kind, StoreErrorKind::Schema, "{text}");
    assert!(text.contains("primary key (consumer_name, idempotency_key)"), "{text}");
    let claim = store.claim(&terms("damaged"), &[request("a", 1)]).await;
    assert_eq!(claim.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Schema), "also while it runs");
    let mut tx = store.begin().await.expect("the store works");
    let claim = idem_core::store::contract::claim_in(&mut tx, &terms("damaged"), &[request("a", 1)]).await;
    assert_eq!(claim.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Schema));
    drop(tx);

    // What looks like it and guards something else.
    for primary_key in [
        "PRIMARY KEY (consumer_name, idempotency_key(10))",
        "PRIMARY KEY (consumer_name, idempotency_key, status)",
        "PRIMARY KEY (idempotency_key)",
        "KEY pair (consumer_name, idempotency_key)",
    ] {
        on_mariadb(pool, &format!("ALTER TABLE processed_jobs ADD {primary_key}")).await;
        assert_eq!(refused(store).await.0, StoreErrorKind::Schema, "{primary_key}");
        let drop = if primary_key.starts_with("KEY") { "INDEX pair" } else { "PRIMARY KEY" };
        on_mariadb(pool, &format!("ALTER TABLE processed_jobs DROP {drop}")).await;
    }
    on_mariadb(pool, restore).await;
    store.migrate().await.expect("as the error said");
}

/// Its primary key is there, and yet two keys would be one, or a transaction none.
#[tokio::test]
async fn a_mariadb_that_does_not_compare_bytes_or_has_no_transactions_is_refused() {
    for change in [
        "MODIFY idempotency_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
        "MODIFY consumer_name BINARY(100) NOT NULL",
        "ENGINE = Aria",
    ] {
        let subject = mariadb().await;
        on_mariadb(subject.store.pool(), &format!("ALTER TABLE processed_jobs {change}")).await;
        let (kind, text) = refused(&subject.store).await;
        assert_eq!(kind, StoreErrorKind::Schema, "{change}");
        assert!(text.contains("VARBINARY"), "{text}");
    }
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
    let mariadb = mariadb().await;
    on_mariadb(mariadb.store.pool(), "DROP TABLE processed_jobs").await;
    let sqlite = sqlite().await;
    on_sqlite(sqlite.store.pool(), "DROP TABLE processed_jobs").await;
    for store in [&postgres.store as &dyn Store, &mariadb.store, &sqlite.store] {
        let claim = store.claim(&terms("gone"), &[request("a", 1)]).await;
        assert_eq!(claim.map(drop).map_err(|error| error.kind()), Err(StoreErrorKind::Schema));
        assert_eq!(refused(store).await.0, StoreErrorKind::Schema);
    }
}

// ---- looking without changing anything

/// The kind and the sentence of refused tables.
async fn found_wrong(store: &dyn Store) -> (StoreErrorKind, String) {
    let error = store.check_schema().await.expect_err("they must be refused");
    (error.kind(), error.to_string())
}

async fn tables_of_postgres(pool: &PgPool) -> Vec<String> {
    let tables = "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1";
    sqlx::query_scalar(tables).fetch_all(pool).await.expect("the catalogue can be read")
}

async fn tables_of_sqlite(pool: &SqlitePool) -> Vec<String> {
    let tables = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1";
    sqlx::query_scalar(tables).fetch_all(pool).await.expect("the catalogue can be read")
}

#[tokio::test]
async fn tables_that_are_not_there_are_missed_and_not_made() {
    let schema = Schema::new().await;
    let postgres = PgStore::connect(&schema.url, &few_connections()).await.expect("PostgreSQL answers");
    let folder = Folder::new();
    let sqlite = SqliteStore::connect(&folder.url(), &StoreOptions::default()).await.expect("the file can be made");
    for store in [&postgres as &dyn Store, &sqlite] {
        let (kind, text) = found_wrong(store).await;
        assert_eq!(kind, StoreErrorKind::Schema, "{text}");
        assert!(text.contains("the tables are not there; migrate them first"), "{text}");
    }
    assert_eq!(tables_of_postgres(postgres.pool()).await, [""; 0]);
    assert_eq!(tables_of_sqlite(sqlite.pool()).await, [""; 0]);
    for store in [&postgres as &dyn Store, &sqlite] {
        store.migrate().await.expect("empty tables can be made");
        store.check_schema().await.expect("they are there");
    }
}

/// As the first version left them.
const OLDER: &str = "DROP TABLE job_locks; DELETE FROM _idem_migrations WHERE version = 2";

#[tokio::test]
async fn tables_of_an_older_version_are_refused_and_not_changed() {
    let (postgres, sqlite) = (postgres().await, sqlite().await);
    on_postgres(postgres.store.pool(), OLDER).await;
    on_sqlite(sqlite.store.pool(), OLDER).await;
    for store in [&postgres.store as &dyn Store, &sqlite.store] {
        let (kind, text) = found_wrong(store).await;
        assert_eq!(kind, StoreErrorKind::Schema, "{text}");
        assert!(text.contains("the tables are of version 1") && text.contains("0002_job_locks"), "{text}");
        assert!(text.contains("migrate them first"), "{text}");
    }
    let first = ["_idem_migrations", "processed_jobs"];
    assert_eq!(tables_of_postgres(postgres.store.pool()).await, first);
    assert_eq!(tables_of_sqlite(sqlite.store.pool()).await, first);
    for store in [&postgres.store as &dyn Store, &sqlite.store] {
        store.migrate().await.expect("as the sentence says");
        store.check_schema().await.expect("they are of this version");
    }
}

#[tokio::test]
async fn tables_of_a_newer_or_another_version_are_found() {
    for (change, said) in [(NEWER, "version 99"), (CHANGED, "another migration 1")] {
        let (postgres, sqlite) = (postgres().await, sqlite().await);
        on_postgres(postgres.store.pool(), change).await;
        on_sqlite(sqlite.store.pool(), change).await;
        for store in [&postgres.store as &dyn Store, &sqlite.store] {
            let (kind, text) = found_wrong(store).await;
            assert_eq!(kind, StoreErrorKind::Schema, "{text}");
            assert!(text.contains(said), "{text}");
        }
    }
}

#[tokio::test]
async fn s3_a_table_without_its_primary_key_is_found_and_not_repaired() {
    let (postgres, sqlite) = (postgres().await, sqlite().await);
    on_postgres(postgres.store.pool(), "ALTER TABLE processed_jobs DROP CONSTRAINT processed_jobs_pkey").await;
    let copy = "ALTER TABLE processed_jobs RENAME TO damaged; CREATE TABLE processed_jobs AS SELECT * FROM damaged";
    on_sqlite(sqlite.store.pool(), copy).await;
    for store in [&postgres.store as &dyn Store, &sqlite.store] {
        for _ in 0..2 {
            let (kind, text) = found_wrong(store).await;
            assert_eq!(kind, StoreErrorKind::Schema, "{text}");
            assert!(text.contains("no primary key (consumer_name, idempotency_key)"), "{text}");
        }
    }
}

/// It is recorded as made, and was dropped since.
#[tokio::test]
async fn a_recorded_table_that_is_gone_is_found() {
    let (postgres, sqlite) = (postgres().await, sqlite().await);
    on_postgres(postgres.store.pool(), "DROP TABLE processed_jobs").await;
    on_sqlite(sqlite.store.pool(), "DROP TABLE processed_jobs").await;
    for store in [&postgres.store as &dyn Store, &sqlite.store] {
        assert_eq!(found_wrong(store).await.0, StoreErrorKind::Schema);
    }
}

/// Who may read and write rows, and make nothing.
#[tokio::test]
async fn a_user_who_may_not_make_tables_can_look() {
    let subject = postgres().await;
    let role = format!("reader_{}", uuid::Uuid::new_v4().simple());
    let schema = &subject.schema.name;
    let grant = format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role};
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}"
    );
    on_postgres(subject.store.pool(), &grant).await;
    let (_, address) = subject.schema.url.split_once('@').expect("the test server's address names a user");
    let store = PgStore::connect(&format!("postgres://{role}@{address}"), &few_connections()).await;
    let store = store.expect("PostgreSQL answers");
    let (looked, claimed) = (store.check_schema().await, store.claim(&terms("reader"), &[request("a", 1)]).await);
    store.close().await;
    on_postgres(subject.store.pool(), &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    looked.expect("nothing is to be made");
    claimed.expect("and it works");
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

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_of_mariadb_waits_for_another() {
    let database = Database::new().await;
    let store = MysqlStore::connect(&database.url, &few_connections().lock_timeout(Duration::from_millis(100))).await;
    let store = store.expect("MariaDB answers");
    let mut other = store.pool().acquire().await.expect("MariaDB answers");
    let lock = "SELECT GET_LOCK(CONCAT('idem migrations ', LEFT(SHA2(DATABASE(), 256), 40)), 0)";
    let (is_ours,): (bool,) = sqlx::query_as(lock).fetch_one(&mut *other).await.expect("MariaDB answers");
    assert!(is_ours, "nobody else has it");
    let migrating = tokio::spawn({
        let store = store.clone();
        async move { store.migrate().await }
    });
    crate::only_mysql::until("the migration waits longer than the limit for locks", &store, |sessions| {
        sessions.iter().any(|session| session.query.contains("GET_LOCK") && session.for_seconds > 1.1)
    })
    .await;
    sqlx::raw_sql("DO RELEASE_ALL_LOCKS()").execute(&mut *other).await.expect("MariaDB answers");
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

/// L5.
#[tokio::test]
async fn tables_without_the_locks_are_refused() {
    let (postgres, mariadb, sqlite) = (postgres().await, mariadb().await, sqlite().await);
    let stores = [&postgres.store as &dyn Store, &mariadb.store, &sqlite.store];
    for store in stores {
        store.check_schema().await.expect("they are there");
    }
    on_postgres(postgres.store.pool(), "ALTER TABLE job_locks DROP CONSTRAINT job_locks_pkey").await;
    on_mariadb(mariadb.store.pool(), "ALTER TABLE job_locks DROP PRIMARY KEY").await;
    on_sqlite(sqlite.store.pool(), "DROP TABLE job_locks").await;
    for store in stores {
        for refused in [store.check_schema().await, store.migrate().await] {
            let error = refused.expect_err("it must be refused");
            assert_eq!(error.kind(), StoreErrorKind::Schema);
            assert!(error.to_string().contains("job_locks"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_table_in_parts_stays_so_and_keeps_its_primary_key() {
    let subject = postgres_partitioned().await;
    let parts: i64 =
        sqlx::query_scalar("SELECT count(*) FROM pg_inherits WHERE inhparent = 'processed_jobs'::regclass")
            .fetch_one(subject.store.pool())
            .await
            .expect("the table is there");
    assert_eq!(parts, 16);
    // Another worker does not know how it was made.
    let other = PgStore::connect(&subject.schema.url, &few_connections()).await.expect("PostgreSQL answers");
    other.migrate().await.expect("it is of this version");
    other.check_schema().await.expect("it is of this version");
    on_postgres(other.pool(), "ALTER TABLE processed_jobs DROP CONSTRAINT processed_jobs_pkey").await;
    assert_eq!(refused(&other).await.0, StoreErrorKind::Schema);
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
async fn mariadb_ends_in_the_expected_schema() {
    let migrated = mariadb().await;
    let expected = Database::new().await;
    run_on_mariadb(&expected.url, include_str!("../../migrations/schema/mysql.sql").into()).await;
    let found = describe_mariadb(&migrated.database.url).await;
    assert!(found.iter().any(|definition| definition.contains("varbinary(1020)")), "{found:?}");
    assert_eq!(found, describe_mariadb(&expected.url).await);
}

async fn describe_mariadb(url: &str) -> Vec<String> {
    let store = MysqlStore::connect(url, &few_connections()).await.expect("MariaDB answers");
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() ORDER BY 1",
    )
    .fetch_all(store.pool())
    .await
    .expect("the catalogue can be read");
    let mut definitions = Vec::new();
    for table in tables {
        let (_, definition): (String, String) = sqlx::query_as(AssertSqlSafe(format!("SHOW CREATE TABLE {table}")))
            .fetch_one(store.pool())
            .await
            .expect("the catalogue can be read");
        definitions.push(definition);
    }
    definitions
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
