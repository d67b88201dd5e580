//! Brings the tables to this version: the files of `migrations/`, applied in order and recorded.
//!
//! idem's bookkeeping has a table of its own, `_idem_migrations`, so that it and the application's never meet.

use std::future::Future;

use sha2::{Digest, Sha256};

use super::{StoreError, StoreErrorKind};

/// One file of `migrations/<engine>/`.
pub(super) struct Migration {
    pub version: i64,
    pub name: &'static str,
    pub text: &'static str,
}

macro_rules! migrations {
    ($engine:literal: $($version:literal $name:literal),+) => {
        &[$(Migration {
            version: $version,
            name: $name,
            text: include_str!(concat!("../../migrations/", $engine, "/", $name, ".sql")),
        }),+]
    };
}

#[cfg(feature = "postgres")]
pub(super) const POSTGRES: &[Migration] = migrations!("postgres": 1 "0001_processed_jobs");

#[cfg(feature = "mysql")]
pub(super) const MYSQL: &[Migration] = migrations!("mysql": 1 "0001_processed_jobs");

#[cfg(feature = "sqlite")]
pub(super) const SQLITE: &[Migration] = migrations!("sqlite": 1 "0001_processed_jobs");

/// A migration that was applied, as it is recorded.
pub(super) struct Applied {
    pub version: i64,
    pub name: String,
    pub checksum: String,
}

/// What an engine can do with its tables, inside a transaction that no two processes have at once.
pub(super) trait Tables: Send {
    /// What is recorded, by version; makes the table of records if it is missing.
    fn applied(&mut self) -> impl Future<Output = Result<Vec<Applied>, StoreError>> + Send;

    /// Runs a migration and records it.
    fn apply(&mut self, migration: &Migration) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Whether an insert can rely on the pair of consumer and key being unique.
    fn has_unique_pair(&mut self) -> impl Future<Output = Result<bool, StoreError>> + Send;
}

/// Applies what is missing, and refuses tables that this program cannot rely on.
pub(super) async fn migrate(tables: &mut impl Tables, ours: &[Migration]) -> Result<(), StoreError> {
    let applied = tables.applied().await?;
    for migration in pending(ours, &applied)? {
        tables.apply(migration).await?;
    }
    if tables.has_unique_pair().await? {
        Ok(())
    } else {
        Err(schema(
            "the table processed_jobs has no primary key (consumer_name, idempotency_key), without which a job could run \
             twice; remove rows that occur twice and restore it",
        ))
    }
}

impl Migration {
    pub(super) fn checksum(&self) -> String {
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

pub(super) fn schema(text: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Schema, text)
}
