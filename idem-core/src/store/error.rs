//! What can go wrong with a store, told apart by what the caller can do about it.

use std::error::Error as StdError;

#[cfg(feature = "mysql")]
use sqlx::mysql::MySqlDatabaseError;

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
        #[cfg(feature = "mysql")]
        sqlx::Error::Database(error) if error.try_downcast_ref::<MySqlDatabaseError>().is_some() => {
            number_of(&**error).map_or(StoreErrorKind::Broken, kind_of_number)
        }
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

/// By MySQL's own numbers: its SQLSTATE says `HY000` of most things. Those of MariaDB alone are from 1900 to 1999 and from
/// 4000 on.
#[cfg(feature = "mysql")]
fn kind_of_number(number: u16) -> StoreErrorKind {
    match number {
        DEADLOCK => StoreErrorKind::Contention,
        // waited too long for a lock, would have had to wait, the row has changed since the snapshot
        1205 | 3572 | 1020 => StoreErrorKind::Contention,
        // The server or the transaction is read-only, globally locked, offline, or not yet part of its cluster.
        1290 | 1836 | 1792 | 1223 | 3032 | 1047 => StoreErrorKind::Unavailable,
        // shutting down; too many connections, in all or of this user; the statement or session was killed, or its time is up
        1053 | 1040 | 1203 | 1226 | 1317 | 1927 | 3169 | 1969 | 3024 | 4031 => StoreErrorKind::Unavailable,
        // The connection broke off: as a server that passes statements on says it, and as a client library does.
        1152 | 1158..=1161 | 1184 | 2002 | 2003 | 2006 | 2013 => StoreErrorKind::Unavailable,
        // out of disk, memory, threads or statements; a commit that a replica refused
        1021 | 1037 | 1038 | 1041 | 1114 | 1135 | 1461 | 1180 | 3100 => StoreErrorKind::Unavailable,
        // Too many failed connections of this host. Somebody must reset it, but it is not this program's configuration.
        1129 => StoreErrorKind::Unavailable,
        // no such table or column; a table that is there already; no primary key where one is named; a broken table
        1146 | 1054 | 1050 | 1051 | 1176 | 1932 => StoreErrorKind::Schema,
        // refused password, user, host or privilege; unknown database or none; an expired password; no common protocol;
        // a binary log that cannot hold what READ COMMITTED writes
        1044..=1046 | 1049 | 1130 | 1142 | 1143 | 1227 | 1251 | 1665 | 1698 | 1820 | 1862 => {
            StoreErrorKind::Configuration
        }
        _ => StoreErrorKind::Broken,
    }
}

/// The engine has rolled back the whole transaction, so that others can go on.
#[cfg(feature = "mysql")]
pub(super) const DEADLOCK: u16 = 1213;

/// Two rows with one unique key. Only the statement is undone.
#[cfg(feature = "mysql")]
pub(super) const DUPLICATE: u16 = 1062;

/// MySQL's number of the error, if it is one of its own.
#[cfg(feature = "mysql")]
pub(super) fn number_of(error: &dyn sqlx::error::DatabaseError) -> Option<u16> {
    error.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
}

#[cfg(feature = "mysql")]
impl StoreError {
    /// MySQL's number of the error that this is about.
    pub(super) fn number(&self) -> Option<u16> {
        let cause = self.cause.as_deref()?.downcast_ref::<sqlx::Error>()?;
        cause.as_database_error().and_then(number_of)
    }
}

/// The UNIQUE violation somewhere among `error` and its causes, if there is one. Recognised by code and name, never by text
/// that people read; SQLite has no names, so there its columns stand for it. MySQL calls every primary key `PRIMARY`.
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
    #[cfg(feature = "mysql")]
    if let Some(error) = error.downcast_ref::<MySqlDatabaseError>() {
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
    #[cfg(feature = "mysql")]
    if error.try_downcast_ref::<MySqlDatabaseError>().is_some() {
        return index_in(error.message()).map(|index| UniqueViolation { constraint: index.to_owned() });
    }
    let named = error.constraint().map(str::to_owned);
    // SQLite: "UNIQUE constraint failed: invoices.order_id"
    let columns = || error.message().rsplit_once(": ").map(|(_, columns)| columns.to_owned());
    named.or_else(columns).map(|constraint| UniqueViolation { constraint })
}

/// The index's name, which MySQL puts nowhere but at the end of its message: "Duplicate entry '1' for key 'invoices_order'",
/// and from version 8 on with the table before it: "… for key 'invoices.invoices_order'". What comes before the last two
/// quotes is data, and may look like anything. The guard's connections have English messages, whatever the server's are.
#[cfg(feature = "mysql")]
fn index_in(message: &str) -> Option<&str> {
    let (before, name) = message.strip_suffix('\'')?.rsplit_once('\'')?;
    let index = name.rsplit_once('.').map_or(name, |(_, index)| index);
    (before.ends_with(" for key ") && !index.is_empty()).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "mysql")]
    #[test]
    fn mysqls_numbers_say_what_the_caller_can_do() {
        use StoreErrorKind::{Broken, Configuration, Contention, Schema, Unavailable};
        let table = [
            (Contention, vec![DEADLOCK, 1205]),
            (Unavailable, vec![1290, 1836, 1053, 1040, 2006, 2013, 1927, 1317, 1047, 1114]),
            (Schema, vec![1146, 1054, 1050, 1176]),
            (Configuration, vec![1044, 1045, 1046, 1049, 1142]),
            (Broken, vec![DUPLICATE, 1064, 1406, 1305, 4025, 3819, 0]),
        ];
        for (kind, numbers) in table {
            for number in numbers {
                assert_eq!(kind_of_number(number), kind, "{number}");
            }
        }
    }

    /// T3: the name decides whether a violation is the domain's "already done".
    #[cfg(feature = "mysql")]
    #[test]
    fn the_index_is_what_the_message_ends_with() {
        for (message, index) in [
            ("Duplicate entry 'order-1' for key 'invoices_order'", Some("invoices_order")),
            ("Duplicate entry 'order-1' for key 'invoices.invoices_order'", Some("invoices_order")),
            ("Duplicate entry '1' for key 'PRIMARY'", Some("PRIMARY")),
            ("Duplicate entry 'x' for key 'other'' for key 'invoices_order'", Some("invoices_order")),
            ("Duplicate entry '' for key 'shop.invoices_order'", Some("invoices_order")),
            ("Duplicate entry 'x' for key 'other'", Some("other")),
            ("Duplicate entry 'x' for key ''", None),
            ("Doppelter Eintrag 'x' für Schlüssel 'other'", None),
            ("Duplicate entry", None),
            ("'", None),
            ("", None),
        ] {
            assert_eq!(index_in(message), index, "{message}");
        }
    }

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
