//! Every statement that the SQLite store sends, and how its rows are read.
//!
//! Batches go as one JSON array, since each statement costs a change of thread. The clock is the machine's, to the
//! millisecond, and stands still within a statement; it is read after `BEGIN IMMEDIATE` has waited for the write lock.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, Sqlite, SqliteConnection};
use uuid::Uuid;

use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{State, Token};
use crate::store::locks::{LockRequest, LockRows};
use crate::store::migrate::{Applied, Migration, Tables};
use crate::store::row_text::{self, StateColumns, Stored};
use crate::store::rows::{ClaimAs, Inserted, Loaded, Locked, Replacement, Rows, Snapshot};
use crate::store::{ClaimRequest, Completion, Purge, Returned, StoreError, StoreErrorKind, Terms};
use crate::timestamp::Timestamp;

/// The lock is taken at once: a transaction that read first and then wrote would be refused without waiting if another
/// writer came between.
pub(super) const BEGIN: &str = "BEGIN IMMEDIATE";

pub(super) const COMMIT: &str = "COMMIT";

pub(super) const ROLLBACK: &str = "ROLLBACK";

/// Microseconds since 1970.
macro_rules! now {
    () => {
        "(CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)"
    };
}

/// Whether a row ended at least ?1 microseconds ago.
macro_rules! ended {
    () => {
        concat!(
            "(status = 'COMPLETED' AND completed_at <= ",
            now!(),
            " - ?1 OR status = 'FAILED' AND failure_kind IN ('terminal', 'exhausted') AND updated_at <= ",
            now!(),
            " - ?1)"
        )
    };
}

const INSERT: &str = concat!(
    "
INSERT INTO processed_jobs (consumer_name, idempotency_key, status, locked_until, token, fence, attempts, payload_hash,
                            owner, message_id, created_at, updated_at, completed_at)
SELECT ?1, j.value ->> 'key', ?2, ",
    now!(),
    " + ?3, j.value ->> 'token', 1, 1, j.value ->> 'payload',
       ?4, j.value ->> 'message_id', ",
    now!(),
    ", ",
    now!(),
    ", CASE WHEN ?2 = 'COMPLETED' THEN ",
    now!(),
    " END
FROM json_each(?5) AS j
WHERE true
ON CONFLICT (consumer_name, idempotency_key) DO NOTHING
RETURNING idempotency_key, created_at"
);

const LOAD: &str = concat!(
    "
SELECT ",
    now!(),
    " AS now, p.idempotency_key, p.status, p.locked_until, p.token, p.fence, p.attempts, p.next_attempt_at, p.failure_kind,
       p.payload_hash, p.message_id, p.error_message
FROM json_each(?2) AS k
LEFT JOIN processed_jobs AS p ON p.consumer_name = ?1 AND p.idempotency_key = k.value
ORDER BY k.id"
);

const REPLACE: &str = concat!(
    "
UPDATE processed_jobs
SET status = ?3, locked_until = ?4, token = ?5, attempts = ?7, next_attempt_at = ?8, failure_kind = ?9, payload_hash = ?10,
    error_message = coalesce(?11, error_message), owner = CASE WHEN ?6 > fence THEN ?12 ELSE owner END, fence = ?6,
    updated_at = ",
    now!(),
    ", completed_at = CASE WHEN ?3 = 'COMPLETED' THEN ",
    now!(),
    " END
WHERE consumer_name = ?1 AND idempotency_key = ?2
  AND status = ?13 AND locked_until IS ?14 AND token IS ?15 AND fence = ?16
  AND attempts = ?17 AND next_attempt_at IS ?18 AND failure_kind IS ?19"
);

const COMPLETE: &str = concat!(
    "
INSERT INTO processed_jobs AS p (consumer_name, idempotency_key, status, token, fence, attempts, payload_hash, owner,
                                 message_id, result, result_hash, created_at, updated_at, completed_at)
SELECT ?1, j.value ->> 'key', 'COMPLETED', j.value ->> 'token', j.value ->> 'fence', j.value ->> 'attempt',
       j.value ->> 'payload', ?2, j.value ->> 'message_id', CAST(j.value ->> 'result' AS BLOB), j.value ->> 'result_hash', ",
    now!(),
    ", ",
    now!(),
    ", ",
    now!(),
    "
FROM json_each(?3) AS j
WHERE true
ON CONFLICT (consumer_name, idempotency_key) DO UPDATE
SET status = 'COMPLETED', locked_until = NULL, result = excluded.result, result_hash = excluded.result_hash,
    updated_at = excluded.updated_at, completed_at = excluded.completed_at
WHERE p.status = 'PROCESSING' AND p.token = excluded.token
RETURNING idempotency_key"
);

const RENEW: &str = concat!(
    "
UPDATE processed_jobs
SET locked_until = ",
    now!(),
    " + ?2, updated_at = ",
    now!(),
    "
FROM json_each(?3) AS j
WHERE consumer_name = ?1 AND idempotency_key = j.value ->> 'key' AND token = j.value ->> 'token'
  AND status = 'PROCESSING' AND locked_until > ",
    now!(),
    "
RETURNING idempotency_key"
);

const RESULT: &str = "
SELECT result FROM processed_jobs WHERE consumer_name = ?1 AND idempotency_key = ?2 AND status = 'COMPLETED'";

const KEEP_RESULTS: &str = "
UPDATE processed_jobs
SET result = CAST(j.value ->> 'result' AS BLOB), result_hash = j.value ->> 'result_hash'
FROM json_each(?2) AS j
WHERE consumer_name = ?1 AND idempotency_key = j.value ->> 'key'";

/// One search for each key. Joined with the table instead, every row of the consumer could be compared with every key.
const COUNT_DUPLICATES: &str = concat!(
    "
INSERT INTO processed_jobs (consumer_name, idempotency_key, status, fence, attempts, duplicates, created_at, updated_at)
SELECT ?1, j.value ->> 'key', 'RECEIVED', 0, 0, j.value ->> 'times', 0, 0
FROM json_each(?2) AS j
WHERE EXISTS (SELECT 1 FROM processed_jobs AS p WHERE p.consumer_name = ?1 AND p.idempotency_key = j.value ->> 'key')
ON CONFLICT (consumer_name, idempotency_key) DO UPDATE
SET duplicates = duplicates + excluded.duplicates, last_duplicate_at = ",
    now!()
);

/// Rows that ended long ago. There is no index for it: this reads the table, and is therefore not done while the file is
/// locked for writing.
const ENDED: &str = concat!(
    "
SELECT json_group_array(json_array(consumer_name, idempotency_key)) FROM (
    SELECT consumer_name, idempotency_key
    FROM processed_jobs
    WHERE (?2 IS NULL OR consumer_name = ?2) AND ",
    ended!(),
    "
    LIMIT ?3
)"
);

/// Of those, the ones for which it still holds.
const PURGE: &str = concat!(
    "
DELETE FROM processed_jobs
WHERE (consumer_name, idempotency_key) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?2)) AND ",
    ended!()
);

/// Whoever wants such a lock next makes it anew.
const PURGE_LOCKS: &str = concat!(
    "
DELETE FROM job_locks
WHERE lock_name IN (
    SELECT lock_name FROM job_locks WHERE locked_until IS NULL AND updated_at <= ",
    now!(),
    " - ?1 LIMIT ?2)"
);

const MAKE_LOCKS: &str = concat!(
    "
INSERT INTO job_locks (lock_name, updated_at)
SELECT k.value, ",
    now!(),
    "
FROM json_each(?1) AS k
WHERE true
ON CONFLICT (lock_name) DO NOTHING"
);

const TAKE_LOCKS: &str = concat!(
    "
UPDATE job_locks
SET token = j.value ->> 'token', locked_until = ",
    now!(),
    " + ?2, consumer_name = ?1, idempotency_key = j.value ->> 'key', updated_at = ",
    now!(),
    "
FROM json_each(?3) AS j
WHERE lock_name = j.value ->> 'name'
  AND (locked_until IS NULL OR token = j.value ->> 'token' OR locked_until <= ",
    now!(),
    ")
RETURNING lock_name"
);

const EXTEND_LOCKS: &str = concat!(
    "
UPDATE job_locks
SET locked_until = ",
    now!(),
    " + ?1, updated_at = ",
    now!(),
    "
FROM json_each(?2) AS j
WHERE lock_name = j.value ->> 'name' AND token = j.value ->> 'token' AND locked_until > ",
    now!(),
    "
RETURNING lock_name"
);

const FREE_LOCKS: &str = concat!(
    "
UPDATE job_locks
SET token = NULL, locked_until = NULL, updated_at = ",
    now!(),
    "
FROM json_each(?1) AS j
WHERE lock_name = j.value ->> 'name' AND token = j.value ->> 'token'"
);

/// The transaction is the file's only writer, so what is free now stays so until its end.
const HOLD_LOCKS: &str = concat!(
    "
SELECT l.lock_name
FROM json_each(?1) AS k
JOIN job_locks AS l ON l.lock_name = k.value
WHERE l.locked_until IS NULL OR l.locked_until <= ",
    now!()
);

const OVERWRITE: &str = concat!(
    "
UPDATE processed_jobs
SET status = ?3, locked_until = ?4, token = ?5, fence = ?6, attempts = ?7, next_attempt_at = ?8, failure_kind = ?9,
    payload_hash = ?10, error_message = ?11, updated_at = ",
    now!(),
    ", completed_at = CASE WHEN ?3 = 'COMPLETED' THEN ",
    now!(),
    " END
WHERE consumer_name = ?1 AND idempotency_key = ?2"
);

const CREATE_RECORDS: &str = "
CREATE TABLE IF NOT EXISTS _idem_migrations (
    version    INTEGER PRIMARY KEY,
    name       TEXT    NOT NULL,
    checksum   TEXT    NOT NULL,
    applied_at TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ'))
) STRICT";

const IS_RECORDED: &str =
    "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '_idem_migrations')";

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

const HAS_UNIQUE_LOCK: &str = "
SELECT EXISTS (
    SELECT 1
    FROM pragma_index_list('job_locks') AS i
    WHERE i.\"unique\" AND NOT i.partial
      AND (SELECT group_concat(c.name) FROM pragma_index_info(i.name) AS c) = 'lock_name')";

type Statement<'q> = Query<'q, Sqlite, SqliteArguments>;

/// The guard's rows through one connection, which is in a transaction if it writes.
pub(super) struct SqliteRows<'c>(pub(super) &'c mut SqliteConnection);

impl Rows for SqliteRows<'_> {
    async fn insert(
        &mut self,
        terms: &Terms,
        requests: &[&ClaimRequest],
        claim_as: ClaimAs,
    ) -> Result<HashMap<EventKey, Inserted>, StoreError> {
        let (status, lease) = match claim_as {
            ClaimAs::Processing => ("PROCESSING", Some(micros(terms.lease))),
            ClaimAs::Completed => ("COMPLETED", None),
        };
        let items = requests.iter().map(|request| {
            json!({
                "key": request.key.as_str(),
                "token": request.token.to_string(),
                "payload": request.payload.map(|payload| payload.to_string()),
                "message_id": row_text::message_id(request),
            })
        });
        let statement = sqlx::query(INSERT)
            .bind(terms.consumer.as_str())
            .bind(status)
            .bind(lease)
            .bind(row_text::owner(terms))
            .bind(array(items));
        let rows = fetch(self.0, statement, "claim jobs").await?;
        let inserted = rows.iter().map(|row| {
            let now = Timestamp::from_micros(row.try_get("created_at")?);
            Ok((key_of(row)?, Inserted { now, waited: Duration::ZERO }))
        });
        collect(inserted, "read claimed jobs")
    }

    async fn load(&mut self, consumer: &ConsumerName, keys: &[&EventKey]) -> Result<Loaded, StoreError> {
        let keys = array(keys.iter().map(|key| Value::from(key.as_str())));
        let rows = fetch(self.0, sqlx::query(LOAD).bind(consumer.as_str()).bind(keys), "read jobs").await?;
        let failed = |error| StoreError::from_sqlx("read a job", error);
        let mut loaded = Loaded { now: Timestamp::EPOCH, rows: Vec::with_capacity(rows.len()) };
        for row in &rows {
            loaded.now = Timestamp::from_micros(row.try_get("now").map_err(failed)?);
            let is_there = row.try_get::<Option<&str>, _>("idempotency_key").map_err(failed)?.is_some();
            loaded.rows.push(is_there.then(|| snapshot(row)).transpose()?);
        }
        Ok(loaded)
    }

    async fn replace(
        &mut self,
        terms: &Terms,
        Replacement { key, from, to, error }: Replacement<'_>,
        _locked: Locked,
    ) -> Result<bool, StoreError> {
        let from = StateColumns::of(from)?;
        let statement = written(sqlx::query(REPLACE), terms, key, &StateColumns::of(to)?)
            .bind(error.map(row_text::storable))
            .bind(row_text::owner(terms))
            .bind(from.status)
            .bind(from.locked_until.map(Timestamp::as_micros))
            .bind(from.token.map(|token| token.to_string()))
            .bind(from.fence)
            .bind(from.attempts)
            .bind(from.next_attempt_at.map(Timestamp::as_micros))
            .bind(from.failure_kind);
        Ok(execute(self.0, statement, "write a job").await? == 1)
    }

    async fn complete(&mut self, terms: &Terms, done: &[&Completion]) -> Result<HashSet<EventKey>, StoreError> {
        let items = done.iter().map(|done| {
            json!({
                "key": done.request.key.as_str(),
                "token": done.request.token.to_string(),
                "fence": done.fence,
                "attempt": row_text::attempts(done.attempt),
                "payload": done.request.payload.map(|payload| payload.to_string()),
                "message_id": row_text::message_id(&done.request),
                "result": text(&done.returned),
                "result_hash": done.returned.hash,
            })
        });
        let statement =
            sqlx::query(COMPLETE).bind(terms.consumer.as_str()).bind(row_text::owner(terms)).bind(array(items));
        let rows = fetch(self.0, statement, "complete jobs").await?;
        collect(rows.iter().map(key_of), "read completed jobs")
    }

    async fn renew(&mut self, terms: &Terms, held: &[(&EventKey, Token)]) -> Result<HashSet<EventKey>, StoreError> {
        let items = held.iter().map(|(key, token)| json!({"key": key.as_str(), "token": token.to_string()}));
        let statement = sqlx::query(RENEW).bind(terms.consumer.as_str()).bind(micros(terms.lease)).bind(array(items));
        let rows = fetch(self.0, statement, "renew leases").await?;
        collect(rows.iter().map(key_of), "read renewed jobs")
    }

    async fn result(&mut self, consumer: &ConsumerName, key: &EventKey) -> Result<Option<Vec<u8>>, StoreError> {
        let statement = sqlx::query_scalar(RESULT).bind(consumer.as_str()).bind(key.as_str());
        let result: Result<Option<Option<Vec<u8>>>, _> = statement.fetch_optional(&mut *self.0).await;
        result.map(Option::flatten).map_err(|error| StoreError::from_sqlx("read what a job returned", error))
    }

    async fn count_duplicates(
        &mut self,
        consumer: &ConsumerName,
        counts: &[(&EventKey, u64)],
    ) -> Result<(), StoreError> {
        let items = counts
            .iter()
            .map(|(key, times)| json!({"key": key.as_str(), "times": i64::try_from(*times).unwrap_or(i64::MAX)}));
        let statement = sqlx::query(COUNT_DUPLICATES).bind(consumer.as_str()).bind(array(items));
        execute(self.0, statement, "count duplicates").await?;
        Ok(())
    }
}

impl LockRows for SqliteRows<'_> {
    async fn make(&mut self, names: &[&LockName]) -> Result<(), StoreError> {
        let statement = sqlx::query(MAKE_LOCKS).bind(array(names.iter().map(|name| Value::from(name.as_str()))));
        execute(self.0, statement, "make locks").await?;
        Ok(())
    }

    async fn take(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let statement = sqlx::query(TAKE_LOCKS)
            .bind(terms.consumer.as_str())
            .bind(micros(terms.lease))
            .bind(array(requests.iter().map(lock_item)));
        let rows = fetch(self.0, statement, "take locks").await?;
        collect(rows.iter().map(lock_of), "read locks")
    }

    async fn extend(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let items = array(requests.iter().map(lock_item));
        let statement = sqlx::query(EXTEND_LOCKS).bind(micros(terms.lease)).bind(items);
        let rows = fetch(self.0, statement, "extend locks").await?;
        collect(rows.iter().map(lock_of), "read locks")
    }

    async fn free(&mut self, requests: &[&LockRequest]) -> Result<(), StoreError> {
        let statement = sqlx::query(FREE_LOCKS).bind(array(requests.iter().map(lock_item)));
        execute(self.0, statement, "free locks").await?;
        Ok(())
    }

    async fn hold(&mut self, names: &[&LockName]) -> Result<HashSet<LockName>, StoreError> {
        let statement = sqlx::query(HOLD_LOCKS).bind(array(names.iter().map(|name| Value::from(name.as_str()))));
        let rows = fetch(self.0, statement, "hold locks").await?;
        collect(rows.iter().map(lock_of), "read locks")
    }
}

fn lock_item(request: &&LockRequest) -> Value {
    json!({
        "name": request.name.as_str(),
        "token": request.token.to_string(),
        "key": request.key.as_str(),
    })
}

fn lock_of(row: &SqliteRow) -> Result<LockName, sqlx::Error> {
    Ok(LockName::from_stored(row.try_get("lock_name")?))
}

impl SqliteRows<'_> {
    /// Keeps what handlers returned.
    pub(super) async fn keep_results(
        &mut self,
        consumer: &ConsumerName,
        results: &[(EventKey, Returned)],
    ) -> Result<(), StoreError> {
        let items = results.iter().map(
            |(key, returned)| json!({"key": key.as_str(), "result": text(returned), "result_hash": returned.hash}),
        );
        let statement = sqlx::query(KEEP_RESULTS).bind(consumer.as_str()).bind(array(items));
        execute(self.0, statement, "keep what jobs returned").await?;
        Ok(())
    }

    /// Finds rows that ended long ago, as an array for [`purge`](Self::purge).
    pub(super) async fn ended(&mut self, purge: &Purge) -> Result<String, StoreError> {
        let statement = sqlx::query_scalar(ENDED)
            .bind(micros(purge.older_than))
            .bind(purge.consumer.as_ref().map(ConsumerName::as_str))
            .bind(i64::from(purge.most));
        statement.fetch_one(&mut *self.0).await.map_err(|error| StoreError::from_sqlx("find old jobs", error))
    }

    /// Removes those of them that are still what they were.
    pub(super) async fn purge(&mut self, purge: &Purge, ended: &str) -> Result<u64, StoreError> {
        let statement = sqlx::query(PURGE).bind(micros(purge.older_than)).bind(ended);
        let removed = execute(self.0, statement, "purge jobs").await?;
        if purge.consumer.is_none() && removed < u64::from(purge.most) {
            let statement = sqlx::query(PURGE_LOCKS).bind(micros(purge.older_than)).bind(i64::from(purge.most));
            execute(self.0, statement, "purge locks").await?;
        }
        Ok(removed)
    }

    /// Writes a state over whatever is there.
    pub(super) async fn overwrite(
        &mut self,
        terms: &Terms,
        key: &EventKey,
        state: &State,
        error: &str,
    ) -> Result<(), StoreError> {
        let statement =
            written(sqlx::query(OVERWRITE), terms, key, &StateColumns::of(state)?).bind(row_text::storable(error));
        execute(self.0, statement, "write a failed job").await?;
        Ok(())
    }
}

impl Tables for SqliteRows<'_> {
    async fn recorded(&mut self) -> Result<Option<Vec<Applied>>, StoreError> {
        let is_recorded = sqlx::query_scalar(IS_RECORDED).fetch_one(&mut *self.0).await;
        let is_recorded: bool =
            is_recorded.map_err(|error| StoreError::from_sqlx("look for the table of migrations", error))?;
        Ok(if is_recorded { Some(self.records().await?) } else { None })
    }

    async fn applied(&mut self) -> Result<Vec<Applied>, StoreError> {
        execute(self.0, sqlx::query(CREATE_RECORDS), "create the table of migrations").await?;
        self.records().await
    }

    async fn apply(&mut self, migration: &Migration) -> Result<(), StoreError> {
        let failed = |error| StoreError::from_sqlx(format!("apply migration {}", migration.name), error);
        sqlx::raw_sql(migration.text).execute(&mut *self.0).await.map_err(failed)?;
        let record = sqlx::query(RECORD).bind(migration.version).bind(migration.name).bind(migration.checksum());
        execute(self.0, record, "record a migration").await?;
        Ok(())
    }

    async fn has_unique_pair(&mut self) -> Result<bool, StoreError> {
        let answer = sqlx::query_scalar(HAS_UNIQUE_PAIR).fetch_one(&mut *self.0).await;
        answer.map_err(|error| StoreError::from_sqlx("look for the primary key", error))
    }

    async fn has_unique_lock(&mut self) -> Result<bool, StoreError> {
        let answer = sqlx::query_scalar(HAS_UNIQUE_LOCK).fetch_one(&mut *self.0).await;
        answer.map_err(|error| StoreError::from_sqlx("look for the primary key of locks", error))
    }
}

impl SqliteRows<'_> {
    async fn records(&mut self) -> Result<Vec<Applied>, StoreError> {
        let rows = fetch(self.0, sqlx::query(APPLIED), "read which migrations were applied").await?;
        let applied = rows.iter().map(|row| {
            let (version, name, checksum) = (row.try_get("version")?, row.try_get("name")?, row.try_get("checksum")?);
            Ok(Applied { version, name, checksum })
        });
        collect(applied, "read which migrations were applied")
    }
}

/// What a handler returned, which is JSON, as text.
fn text(returned: &Returned) -> Option<Cow<'_, str>> {
    returned.value.as_deref().map(String::from_utf8_lossy)
}

/// Binds ?1 to ?10 of a statement that writes a state.
fn written<'q>(statement: Statement<'q>, terms: &'q Terms, key: &'q EventKey, to: &StateColumns) -> Statement<'q> {
    statement
        .bind(terms.consumer.as_str())
        .bind(key.as_str())
        .bind(to.status)
        .bind(to.locked_until.map(Timestamp::as_micros))
        .bind(to.token.map(|token| token.to_string()))
        .bind(to.fence)
        .bind(to.attempts)
        .bind(to.next_attempt_at.map(Timestamp::as_micros))
        .bind(to.failure_kind)
        .bind(to.payload.map(|payload| payload.to_string()))
}

async fn fetch(
    connection: &mut SqliteConnection,
    statement: Statement<'_>,
    what: &str,
) -> Result<Vec<SqliteRow>, StoreError> {
    statement.fetch_all(connection).await.map_err(|error| StoreError::from_sqlx(what, error))
}

async fn execute(connection: &mut SqliteConnection, statement: Statement<'_>, what: &str) -> Result<u64, StoreError> {
    let done = statement.execute(connection).await.map_err(|error| StoreError::from_sqlx(what, error))?;
    Ok(done.rows_affected())
}

fn array(items: impl Iterator<Item = Value>) -> String {
    Value::Array(items.collect()).to_string()
}

fn collect<T, C: FromIterator<T>>(
    items: impl Iterator<Item = Result<T, sqlx::Error>>,
    what: &str,
) -> Result<C, StoreError> {
    items.collect::<Result<C, _>>().map_err(|error| StoreError::from_sqlx(what, error))
}

fn key_of(row: &SqliteRow) -> Result<EventKey, sqlx::Error> {
    Ok(EventKey::from_stored(row.try_get("idempotency_key")?))
}

fn snapshot(row: &SqliteRow) -> Result<Snapshot, StoreError> {
    let read = || -> Result<_, sqlx::Error> {
        let instant = |column| Ok::<_, sqlx::Error>(row.try_get::<Option<i64>, _>(column)?.map(Timestamp::from_micros));
        let columns = Stored {
            status: row.try_get("status")?,
            locked_until: instant("locked_until")?,
            token: None,
            fence: row.try_get("fence")?,
            attempts: row.try_get("attempts")?,
            next_attempt_at: instant("next_attempt_at")?,
            failure_kind: row.try_get("failure_kind")?,
            payload: row.try_get("payload_hash")?,
        };
        let token: Option<String> = row.try_get("token")?;
        Ok((columns, token, row.try_get("message_id")?, row.try_get("error_message")?))
    };
    let (columns, token, message_id, error) = read().map_err(|error| StoreError::from_sqlx("read a job", error))?;
    let token = token
        .map(|token| token.parse::<Uuid>())
        .transpose()
        .map_err(|error| StoreError::with_cause(StoreErrorKind::Broken, "read the token of a job", error))?;
    let columns = Stored { token: token.map(Token), ..columns };
    Ok(Snapshot { state: columns.state()?, message_id, error })
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}
