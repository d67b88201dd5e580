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

macro_rules! migration {
    ($folder:literal, $version:literal, $name:literal) => {
        Migration {
            version: $version,
            name: $name,
            text: include_str!(concat!("../../migrations/", $folder, "/", $name, ".sql")),
        }
    };
}

/// The migrations of an engine. Where it has several lists, tables that are there follow the one that made them.
pub(super) type Variants = &'static [&'static [Migration]];

#[cfg(feature = "postgres")]
pub(super) const POSTGRES: Variants = &[
    &[migration!("postgres", 1, "0001_processed_jobs"), migration!("postgres", 2, "0002_job_locks")],
    &[migration!("postgres-partitioned", 1, "0001_processed_jobs"), migration!("postgres", 2, "0002_job_locks")],
];
/// Of [`POSTGRES`], the one table, and the one in parts.
#[cfg(feature = "postgres")]
pub(super) const PLAIN: usize = 0;
#[cfg(feature = "postgres")]
pub(super) const PARTITIONED: usize = 1;

#[cfg(feature = "mysql")]
pub(super) const MYSQL: Variants =
    &[&[migration!("mysql", 1, "0001_processed_jobs"), migration!("mysql", 2, "0002_job_locks")]];

#[cfg(feature = "sqlite")]
pub(super) const SQLITE: Variants =
    &[&[migration!("sqlite", 1, "0001_processed_jobs"), migration!("sqlite", 2, "0002_job_locks")]];

/// A migration that was applied, as it is recorded.
pub(super) struct Applied {
    pub version: i64,
    pub name: String,
    pub checksum: String,
}

/// What an engine can do with its tables, inside a transaction that no two processes have at once.
pub(super) trait Tables: Send {
    /// What is recorded, by version; nothing if there is no table of records.
    fn recorded(&mut self) -> impl Future<Output = Result<Option<Vec<Applied>>, StoreError>> + Send;

    /// Waits for other processes that migrate, makes the table of records if it is missing, and reads it.
    fn applied(&mut self) -> impl Future<Output = Result<Vec<Applied>, StoreError>> + Send;

    /// Runs a migration and records it.
    fn apply(&mut self, migration: &Migration) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Whether an insert can rely on the pair of consumer and key being unique.
    fn has_unique_pair(&mut self) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Whether the name of a lock is unique.
    fn has_unique_lock(&mut self) -> impl Future<Output = Result<bool, StoreError>> + Send;
}

/// Applies what is missing, and refuses tables that this program cannot rely on. Where there are none, they are made as the
/// list of that number says.
pub(super) async fn migrate(tables: &mut impl Tables, variants: Variants, anew: usize) -> Result<(), StoreError> {
    let applied = tables.applied().await?;
    for migration in pending(chosen(variants, &applied, anew), &applied)? {
        tables.apply(migration).await?;
    }
    check_unique(tables).await
}

/// Refuses tables that this program cannot rely on, and changes nothing.
pub(super) async fn check(tables: &mut impl Tables, variants: Variants) -> Result<(), StoreError> {
    let Some(applied) = tables.recorded().await? else {
        return Err(schema("the tables are not there; migrate them first, with a user who may make tables"));
    };
    let ours = chosen(variants, &applied, 0);
    match pending(ours, &applied)? {
        [] => check_unique(tables).await,
        [first, ..] => Err(schema(format!(
            "the tables are of version {}, but this program needs migration {}; migrate them first, with a user who may \
             change tables",
            first.version - 1,
            ours.last().unwrap_or(first).name
        ))),
    }
}

async fn check_unique(tables: &mut impl Tables) -> Result<(), StoreError> {
    if !tables.has_unique_pair().await? {
        return Err(schema(
            "the table processed_jobs has no primary key (consumer_name, idempotency_key), without which a job could run \
             twice; remove rows that occur twice and restore it",
        ));
    }
    if !tables.has_unique_lock().await? {
        return Err(schema(
            "the table job_locks is missing or has no primary key (lock_name), without which two jobs could hold one lock; \
             restore it",
        ));
    }
    Ok(())
}

impl Migration {
    pub(super) fn checksum(&self) -> String {
        Sha256::digest(self.text).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn chosen(variants: Variants, applied: &[Applied], anew: usize) -> &'static [Migration] {
    let made_by = |ours: &&[Migration]| {
        ours.first().zip(applied.first()).is_some_and(|(ours, theirs)| ours.checksum() == theirs.checksum)
    };
    variants.iter().copied().find(made_by).unwrap_or(variants[anew])
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
