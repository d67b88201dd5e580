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

    /// The same for somebody else who asked together with the first one. Its causes become text.
    pub(crate) fn again(&self) -> Self {
        use std::error::Error as _;
        let cause = self.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        Self::new(self.kind, format!("{}{cause}", self.context))
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

pub(super) fn kind_of(error: &sqlx::Error) -> StoreErrorKind {
    match error {
        sqlx::Error::Database(error) => {
            error.code().map_or(StoreErrorKind::Broken, |code| kind_of_code(&code, error.message()))
        }
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) => StoreErrorKind::Configuration,
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => StoreErrorKind::Unavailable,
        _ => StoreErrorKind::Broken,
    }
}

/// By SQLSTATE (PostgreSQL, five characters) or result code (SQLite, a shorter number whose low byte is the kind).
fn kind_of_code(code: &str, message: &str) -> StoreErrorKind {
    match code.parse::<i32>() {
        Ok(number) if code.len() < 5 => kind_of_result_code(number & 0xff, message),
        _ => kind_of_sqlstate(code),
    }
}

fn kind_of_sqlstate(code: &str) -> StoreErrorKind {
    match code {
        // deadlock, serialization failure, lock not available
        "40P01" | "40001" | "55P03" => StoreErrorKind::Contention,
        // It is not known whether the statement took effect; a standby or a server set to read-only; a session that the
        // server ended because it was idle in its transaction or at all.
        "40003" | "25006" | "25P03" | "25P04" | "57P05" => StoreErrorKind::Unavailable,
        // undefined table, column or schema; a table that is there already; no unique pair for ON CONFLICT to refer to
        "42P01" | "42703" | "3F000" | "42P07" | "42P10" => StoreErrorKind::Schema,
        // refused password or user, unknown database, missing privilege
        "28P01" | "28000" | "3D000" | "42501" => StoreErrorKind::Configuration,
        // connection, insufficient resources, operator intervention (shutdown, still starting, cancelled), system error
        code if ["08", "53", "57", "58"].iter().any(|class| code.starts_with(class)) => StoreErrorKind::Unavailable,
        _ => StoreErrorKind::Broken,
    }
}

fn kind_of_result_code(primary: i32, message: &str) -> StoreErrorKind {
    match primary {
        // busy, locked, locking protocol, schema changed meanwhile
        5 | 6 | 15 | 17 => StoreErrorKind::Contention,
        // out of memory, read-only, interrupted, I/O error, disk full, cannot open
        7 | 8 | 9 | 10 | 13 | 14 => StoreErrorKind::Unavailable,
        // corrupt, not a database
        11 | 26 => StoreErrorKind::Schema,
        // The general error has no finer code.
        1 if ["no such table", "no such column", "already exists", "ON CONFLICT clause does not match"]
            .iter()
            .any(|part| message.contains(part)) =>
        {
            StoreErrorKind::Schema
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_say_what_the_caller_can_do() {
        use StoreErrorKind::{Broken, Configuration, Contention, Schema, Unavailable};
        let table = [
            (Contention, vec!["40P01", "40001", "55P03", "5", "261", "517", "6", "15"]),
            (Unavailable, vec!["08006", "25006", "25P03", "40003", "53300", "57P01", "57P03", "58030"]),
            (Unavailable, vec!["8", "10", "13", "14", "526", "1288", "8714"]),
            (Schema, vec!["42P01", "42703", "42P10", "3F000", "11", "26", "267"]),
            (Configuration, vec!["28P01", "28000", "3D000", "42501"]),
            (Broken, vec!["23505", "22001", "42601", "25P02", "1", "19", "2067", "1555"]),
        ];
        for (kind, codes) in table {
            for code in codes {
                assert_eq!(kind_of_code(code, ""), kind, "{code}");
            }
        }
        assert_eq!(kind_of_code("1", "no such table: processed_jobs"), Schema);
        assert_eq!(kind_of_code("1", "near \"SELEC\": syntax error"), Broken);
    }
}
