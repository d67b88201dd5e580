//! What can go wrong with a store, told apart by what the caller can do about it.

use std::error::Error as StdError;

use crate::handler::UniqueViolation;

/// A store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("{context}")]
pub struct StoreError {
    kind: StoreErrorKind,
    context: String,
    #[source]
    cause: Option<Box<dyn StdError + Send + Sync>>,
}

/// What the caller can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No answer, or a store that cannot be written to now. Not the message's fault: wait and ask again. Whether the
    /// request took effect is unknown.
    Unavailable,
    /// The engine broke off a deadlock, a wait for a lock or a conflict of snapshots. Nothing took effect: ask again.
    Contention,
    /// The tables are missing, damaged or of another version.
    Schema,
    /// The configuration is wrong: a malformed URL, a refused password, a path that cannot be written.
    Configuration,
    /// Anything else: asking again gives the same.
    Broken,
}

impl StoreError {
    /// An error without a cause below it.
    pub fn new(kind: StoreErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), cause: None }
    }

    /// An error with a cause; `context` says what was attempted.
    pub fn with_cause(
        kind: StoreErrorKind,
        context: impl Into<String>,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self { kind, context: context.into(), cause: Some(cause.into()) }
    }

    /// An error of sqlx; `context` says what was attempted.
    pub fn from_sqlx(context: impl Into<String>, error: sqlx::Error) -> Self {
        Self::with_cause(kind_of(&error), context, error)
    }

    /// What the caller can do.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether asking again can help.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Unavailable | StoreErrorKind::Contention)
    }
}

/// SQLSTATEs (PostgreSQL) and result codes (SQLite), by what the caller can do.
fn kind_of(error: &sqlx::Error) -> StoreErrorKind {
    match error {
        sqlx::Error::Database(error) => error.code().map_or(StoreErrorKind::Broken, |code| kind_of_code(&code)),
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) => StoreErrorKind::Configuration,
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => StoreErrorKind::Unavailable,
        _ => StoreErrorKind::Broken,
    }
}

fn kind_of_code(code: &str) -> StoreErrorKind {
    match code {
        // deadlock, serialization failure, lock not available; SQLite: busy, locked, and their extended forms
        "40P01" | "40001" | "55P03" | "5" | "6" | "261" | "262" | "517" | "773" => StoreErrorKind::Contention,
        // read-only transaction (a standby), too many connections, out of memory or disk, shutdown, cannot connect now,
        // statement or session ended from outside
        "25006" | "25P03" | "25P04" => StoreErrorKind::Unavailable,
        // undefined table or column: the schema is not there
        "42P01" | "42703" => StoreErrorKind::Schema,
        // SQLite: read-only, I/O error, full, cannot open
        "8" | "10" | "13" | "14" | "264" | "266" | "522" | "776" | "778" | "1032" | "1288" => {
            StoreErrorKind::Unavailable
        }
        "28P01" | "28000" | "3D000" => StoreErrorKind::Configuration,
        code if code.len() == 5 && (code.starts_with("08") || code.starts_with("53") || code.starts_with("57")) => {
            StoreErrorKind::Unavailable
        }
        _ => StoreErrorKind::Broken,
    }
}

/// The UNIQUE violation somewhere among `error` and its causes, if there is one. Recognised by code and name, never by text
/// that people read; SQLite has no names, so there its columns stand for it.
pub fn unique_violation(error: &(dyn StdError + 'static)) -> Option<UniqueViolation> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(violation) = database_error(error).and_then(violation_of) {
            return Some(violation);
        }
        next = error.source();
    }
    None
}

/// `error` as sqlx's error of a database, however it was wrapped.
fn database_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a dyn sqlx::error::DatabaseError> {
    if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        return error.as_database_error();
    }
    // `#[error(transparent)]` skips `sqlx::Error` itself: its source is the driver's own error.
    #[cfg(feature = "postgres")]
    if let Some(error) = error.downcast_ref::<sqlx::postgres::PgDatabaseError>() {
        return Some(error);
    }
    #[cfg(feature = "sqlite")]
    if let Some(error) = error.downcast_ref::<sqlx::sqlite::SqliteError>() {
        return Some(error);
    }
    error.downcast_ref::<Box<dyn sqlx::error::DatabaseError>>().map(|error| &**error)
}

fn violation_of(error: &dyn sqlx::error::DatabaseError) -> Option<UniqueViolation> {
    if !error.is_unique_violation() {
        return None;
    }
    let named = error.constraint().map(str::to_owned);
    // SQLite: "UNIQUE constraint failed: invoices.order_id"
    let columns = || error.message().rsplit_once(": ").map(|(_, columns)| columns.to_owned());
    named.or_else(columns).map(|constraint| UniqueViolation { constraint })
}
