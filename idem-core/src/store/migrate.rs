//! Brings the tables to this version: the files of `migrations/`, applied in order and recorded.
//!
//! idem's bookkeeping has a table of its own, so that it and the application's never meet.

use sha2::{Digest, Sha256};

use super::{StoreError, StoreErrorKind};

/// One file of `migrations/<engine>/`.
struct Migration {
    version: i64,
    name: &'static str,
    text: &'static str,
}

macro_rules! migrations {
    ($($engine:literal: $($version:literal $name:literal),+;)+) => {
        [$($(Migration {
            version: $version,
            name: $name,
            text: include_str!(concat!("../../migrations/", $engine, "/", $name, ".sql")),
        }),+)+]
    };
}

/// A migration that was applied, as it is recorded.
struct Applied {
    version: i64,
    name: String,
    checksum: String,
}

impl Migration {
    fn checksum(&self) -> String {
        Sha256::digest(self.text).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Which of `ours` are still to be applied.
///
/// # Errors
/// The record does not fit: the tables are of a newer version than this program, or a file has changed since.
fn pending<'m>(ours: &'m [Migration], applied: &[Applied]) -> Result<&'m [Migration], StoreError> {
    for (row, migration) in applied.iter().zip(ours) {
        if row.version != migration.version || row.checksum != migration.checksum() {
            return Err(schema(format!(
                "the tables were made by another migration {} ({}) than this program's {} ({}); \
                 run the version of the program that made them, or restore the tables",
                row.version, row.name, migration.version, migration.name
            )));
        }
    }
    match (applied.last(), ours.last()) {
        (Some(theirs), Some(newest)) if applied.len() > ours.len() => Err(schema(format!(
            "the tables are of version {}, but this program knows only up to version {}; \
             update the program, or restore the tables as they were before",
            theirs.version, newest.version
        ))),
        _ => Ok(&ours[applied.len()..]),
    }
}

fn schema(text: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Schema, text)
}

fn no_unique_pair() -> StoreError {
    schema(
        "the table processed_jobs has no primary key (consumer_name, idempotency_key), without which a job could run twice; \
         restore it: ALTER TABLE processed_jobs ADD PRIMARY KEY (consumer_name, idempotency_key)",
    )
}

#[cfg(feature = "postgres")]
pub(super) use postgres::migrate as postgres;

#[cfg(feature = "postgres")]
mod postgres {
    use sqlx::{AssertSqlSafe, PgConnection, Row};

    use super::{Applied, Migration, StoreError, no_unique_pair, pending, schema};

    static MIGRATIONS: [Migration; 1] = migrations!("postgres": 1 "0001_processed_jobs";);

    /// Ends with the transaction. Waiting for it is waiting for another process that migrates, so the limit is a longer one.
    const LOCK: &str = "
        SELECT set_config('lock_timeout', '100s', true),
               pg_advisory_xact_lock(hashtextextended('idem migrations in ' || current_schema(), 0))";

    const APPLIED: &str = "SELECT version, name, checksum FROM _idem_migrations ORDER BY version";

    const IS_RECORDED: &str =
        "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = current_schema() AND tablename = '_idem_migrations')";

    const RECORDS: &str = "
        CREATE TABLE _idem_migrations (
            version    bigint      PRIMARY KEY,
            name       text        NOT NULL,
            checksum   text        NOT NULL,
            applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )";

    const RECORD: &str = "INSERT INTO _idem_migrations (version, name, checksum) VALUES ($1, $2, $3)";

    /// A unique index that an insert can rely on: whole, checked at once, and of this pair.
    const HAS_UNIQUE_PAIR: &str = "
        SELECT EXISTS (
            SELECT FROM pg_index AS i
            WHERE i.indrelid = to_regclass('processed_jobs')
              AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
              AND i.indnkeyatts = 2
              AND ARRAY(SELECT a.attname::text FROM pg_attribute AS a
                        WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:1]) ORDER BY 1)
                  = ARRAY['consumer_name', 'idempotency_key'])";

    /// Everything in one transaction: as before or as after.
    pub(in super::super) async fn migrate(connection: &mut PgConnection) -> Result<(), StoreError> {
        let failed = |error| StoreError::from_sqlx("migrate the tables", error);
        run(connection, super::super::postgres::BEGIN).await?;
        let (current_schema,): (Option<String>,) =
            sqlx::query_as("SELECT current_schema()::text").fetch_one(&mut *connection).await.map_err(failed)?;
        if current_schema.is_none() {
            return Err(schema("the search_path names no schema that exists; create it, or set another"));
        }
        run(connection, LOCK).await?;
        let is_recorded: bool = sqlx::query_scalar(IS_RECORDED).fetch_one(&mut *connection).await.map_err(failed)?;
        // Asked first, because a role that may not create tables may still start where nothing is to be created.
        if !is_recorded {
            run(connection, RECORDS).await?;
        }
        let rows = sqlx::query(APPLIED).fetch_all(&mut *connection).await.map_err(failed)?;
        let applied = rows
            .iter()
            .map(|row| {
                Ok(Applied {
                    version: row.try_get("version")?,
                    name: row.try_get("name")?,
                    checksum: row.try_get("checksum")?,
                })
            })
            .collect::<Result<Vec<_>, sqlx::Error>>()
            .map_err(failed)?;
        for migration in pending(&MIGRATIONS, &applied)? {
            run(connection, migration.text).await?;
            sqlx::query(RECORD)
                .bind(migration.version)
                .bind(migration.name)
                .bind(migration.checksum())
                .execute(&mut *connection)
                .await
                .map_err(failed)?;
        }
        let has_unique_pair: bool =
            sqlx::query_scalar(HAS_UNIQUE_PAIR).fetch_one(&mut *connection).await.map_err(failed)?;
        if !has_unique_pair {
            return Err(no_unique_pair());
        }
        run(connection, "COMMIT").await
    }

    async fn run(connection: &mut PgConnection, text: &str) -> Result<(), StoreError> {
        let done = sqlx::raw_sql(AssertSqlSafe(text.to_owned())).execute(connection).await;
        done.map(|_| ()).map_err(|error| StoreError::from_sqlx("migrate the tables", error))
    }
}

#[cfg(feature = "sqlite")]
pub(super) use sqlite::migrate as sqlite;

#[cfg(feature = "sqlite")]
mod sqlite {
    use sqlx::{AssertSqlSafe, Row, SqliteConnection};

    use super::{Applied, Migration, StoreError, no_unique_pair, pending};

    static MIGRATIONS: [Migration; 1] = migrations!("sqlite": 1 "0001_processed_jobs";);

    const RECORDS: &str = "
        CREATE TABLE IF NOT EXISTS _idem_migrations (
            version    INTEGER PRIMARY KEY,
            name       TEXT    NOT NULL,
            checksum   TEXT    NOT NULL,
            applied_at TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ'))
        ) STRICT";

    const APPLIED: &str = "SELECT version, name, checksum FROM _idem_migrations ORDER BY version";

    const RECORD: &str = "INSERT INTO _idem_migrations (version, name, checksum) VALUES (?1, ?2, ?3)";

    /// A unique index that an insert can rely on: whole and of this pair.
    const HAS_UNIQUE_PAIR: &str = "
        SELECT EXISTS (
            SELECT 1
            FROM pragma_index_list('processed_jobs') AS i
            WHERE i.\"unique\" AND NOT i.partial
              AND (SELECT group_concat(c.name) FROM (SELECT name FROM pragma_index_info(i.name) ORDER BY name) AS c)
                  = 'consumer_name,idempotency_key')";

    /// Inside the caller's transaction, which has the write lock, so that one process at a time does this.
    pub(in super::super) async fn migrate(connection: &mut SqliteConnection) -> Result<(), StoreError> {
        let failed = |error| StoreError::from_sqlx("migrate the tables", error);
        run(connection, RECORDS).await?;
        let rows = sqlx::query(APPLIED).fetch_all(&mut *connection).await.map_err(failed)?;
        let applied = rows
            .iter()
            .map(|row| {
                Ok(Applied {
                    version: row.try_get("version")?,
                    name: row.try_get("name")?,
                    checksum: row.try_get("checksum")?,
                })
            })
            .collect::<Result<Vec<_>, sqlx::Error>>()
            .map_err(failed)?;
        for migration in pending(&MIGRATIONS, &applied)? {
            run(connection, migration.text).await?;
            sqlx::query(RECORD)
                .bind(migration.version)
                .bind(migration.name)
                .bind(migration.checksum())
                .execute(&mut *connection)
                .await
                .map_err(failed)?;
        }
        let has_unique_pair: bool =
            sqlx::query_scalar(HAS_UNIQUE_PAIR).fetch_one(&mut *connection).await.map_err(failed)?;
        if has_unique_pair { Ok(()) } else { Err(no_unique_pair()) }
    }

    async fn run(connection: &mut SqliteConnection, text: &'static str) -> Result<(), StoreError> {
        let done = sqlx::raw_sql(AssertSqlSafe(text)).execute(connection).await;
        done.map(|_| ()).map_err(|error| StoreError::from_sqlx("migrate the tables", error))
    }
}
