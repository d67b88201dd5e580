//! Every statement that the PostgreSQL store sends, and how its rows are read.
//!
//! Clocks are `clock_timestamp()`, which is the instant of reading; `now()` would be the transaction's beginning. Keys come
//! as arrays that are sorted by their bytes, and `unnest` keeps their order, so that batches lock their rows in one order.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row};
use uuid::Uuid;

use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{State, Token};
use crate::store::locks::{LockRequest, LockRows};
use crate::store::migrate::{self, Applied, Migration, Tables};
use crate::store::row_text::{self, StateColumns};
use crate::store::rows::{ClaimAs, Inserted, Loaded, Locked, Replacement, Rows, Snapshot};
use crate::store::{ClaimRequest, Completion, Purge, Returned, StoreError, Terms};
use crate::timestamp::Timestamp;

/// Sent once on each new connection. Settings of the server, the database or the user must not change what the guard's
/// statements mean, and a worker that has vanished must not keep its locks.
///
/// `client_connection_check_interval` is there from version 14 on.
pub(super) const SETTINGS: &str = "
SELECT set_config('default_transaction_isolation', 'read committed', false),
       -- What was answered must survive a crash of the server: an offset is committed on the strength of it.
       CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', false) END,
       set_config('lock_timeout', $1, false),
       set_config('idle_in_transaction_session_timeout', $2, false),
       set_config('tcp_keepalives_idle', '30', false),
       set_config('tcp_keepalives_interval', '10', false),
       set_config('tcp_keepalives_count', '3', false),
       (SELECT set_config(name, '2s', false) FROM pg_settings WHERE name = 'client_connection_check_interval')";

/// The same for the transaction that has just begun, where a pooler gives each transaction another session: $1 and $2 are
/// written in as numbers of milliseconds.
pub(super) fn settings_of_transaction(lock_timeout: Duration, idle_timeout: Duration, only_guard: bool) -> String {
    let scans = if only_guard { "; SET LOCAL enable_seqscan = off" } else { "" };
    format!(
        "SET LOCAL lock_timeout = {}; SET LOCAL idle_in_transaction_session_timeout = {}; \
         SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'{scans}",
        lock_timeout.as_millis(),
        idle_timeout.as_millis(),
    )
}

/// For connections that only the guard uses: the planner may not scan a table that was small when it looked.
pub(super) const SETTINGS_OF_CONTROL: &str = "SELECT set_config('enable_seqscan', 'off', false)";

/// The isolation is named, because the user's default may be another.
pub(super) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// `COMMIT` of a transaction in which a statement failed is answered like any other, but rolls back. A savepoint is
/// refused then, and also when the handler has ended the transaction itself; `COMMIT` is then not reached.
pub(super) const COMMIT: &str = "SAVEPOINT idem_commit; COMMIT";

pub(super) const ROLLBACK: &str = "ROLLBACK";

const CAN_WRITE: &str = "SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off'";

/// Rows that are there already are left alone and cost no write. The clock is read in a subquery, which the planner does
/// not merge, so that all columns of a row have the same instant; `RETURNING` reads it again after any wait.
const INSERT: &str = "
INSERT INTO processed_jobs (consumer_name, idempotency_key, status, locked_until, token, fence, attempts, payload_hash,
                            owner, message_id, created_at, updated_at, completed_at)
SELECT $1, k.key, $2, k.now + $3 * interval '1 microsecond', k.token, 1, 1, k.payload,
       $4, k.message_id, k.now, k.now, CASE WHEN $2 = 'COMPLETED' THEN k.now END
FROM (SELECT t.*, clock_timestamp() AS now
      FROM unnest($5::text[], $6::uuid[], $7::text[], $8::text[]) AS t (key, token, payload, message_id)) AS k
ON CONFLICT (consumer_name, idempotency_key) DO NOTHING
RETURNING idempotency_key, created_at, clock_timestamp() AS answered";

/// The outer part is there so that the clock is answered even when no row is. One search of the primary key for each key:
/// joined in one, a young table would be scanned, and the plan kept while it grows.
const LOAD: &str = "
SELECT c.now, j.*
FROM (SELECT clock_timestamp() AS now) AS c
LEFT JOIN (
    SELECT p.*
    FROM unnest($2::text[]) AS k (key)
    CROSS JOIN LATERAL (
        SELECT idempotency_key, status, locked_until, token, fence, attempts, next_attempt_at, failure_kind, payload_hash,
               message_id, error_message
        FROM processed_jobs
        WHERE consumer_name = $1 AND idempotency_key = k.key
        OFFSET 0
    ) AS p
) AS j ON true";

const REPLACE: &str = "
UPDATE processed_jobs
SET status = $3, locked_until = $4, token = $5, attempts = $7, next_attempt_at = $8, failure_kind = $9, payload_hash = $10,
    error_message = coalesce($11, error_message), owner = CASE WHEN $6 > fence THEN $12 ELSE owner END, fence = $6,
    updated_at = clock_timestamp(), completed_at = CASE WHEN $3 = 'COMPLETED' THEN clock_timestamp() END
WHERE consumer_name = $1 AND idempotency_key = $2
  AND status = $13 AND locked_until IS NOT DISTINCT FROM $14 AND token IS NOT DISTINCT FROM $15 AND fence = $16
  AND attempts = $17 AND next_attempt_at IS NOT DISTINCT FROM $18 AND failure_kind IS NOT DISTINCT FROM $19";

/// As [`REPLACE`], but takes the lock first and only if it is free.
const REPLACE_UNLESS_LOCKED: &str = "
WITH free AS MATERIALIZED (
    SELECT consumer_name, idempotency_key
    FROM processed_jobs
    WHERE consumer_name = $1 AND idempotency_key = $2
      AND status = $13 AND locked_until IS NOT DISTINCT FROM $14 AND token IS NOT DISTINCT FROM $15 AND fence = $16
      AND attempts = $17 AND next_attempt_at IS NOT DISTINCT FROM $18 AND failure_kind IS NOT DISTINCT FROM $19
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE processed_jobs AS j
SET status = $3, locked_until = $4, token = $5, attempts = $7, next_attempt_at = $8, failure_kind = $9, payload_hash = $10,
    error_message = coalesce($11, j.error_message), owner = CASE WHEN $6 > j.fence THEN $12 ELSE j.owner END, fence = $6,
    updated_at = clock_timestamp(), completed_at = CASE WHEN $3 = 'COMPLETED' THEN clock_timestamp() END
FROM free
WHERE j.consumer_name = free.consumer_name AND j.idempotency_key = free.idempotency_key";

/// An insert that nearly always conflicts: it can only go through the primary key, whatever the planner thinks of the
/// table's size. A row that is gone is inserted.
const COMPLETE: &str = "
INSERT INTO processed_jobs AS j (consumer_name, idempotency_key, status, token, fence, attempts, payload_hash, owner,
                                 message_id, result, result_hash, created_at, updated_at, completed_at)
SELECT $1, k.key, 'COMPLETED', k.token, k.fence, k.attempt, k.payload, $2, k.message_id, k.result, k.result_hash,
       k.now, k.now, k.now
FROM (SELECT t.*, clock_timestamp() AS now
      FROM unnest($3::text[], $4::uuid[], $5::bigint[], $6::integer[], $7::text[], $8::text[], $9::bytea[], $10::text[])
           AS t (key, token, fence, attempt, payload, message_id, result, result_hash)) AS k
ON CONFLICT (consumer_name, idempotency_key) DO UPDATE
SET status = 'COMPLETED', locked_until = NULL, result = excluded.result, result_hash = excluded.result_hash,
    updated_at = excluded.updated_at, completed_at = excluded.completed_at
WHERE j.status = 'PROCESSING' AND j.token = excluded.token
RETURNING j.idempotency_key";

/// Locks in the order of the keys, and leaves locked rows to be looked at one by one: somebody's open transaction must not
/// hold up the other renewals. Each key is searched for by itself, as in [`LOAD`], and written as in [`COMPLETE`]: as joins,
/// both parts would read every row of the consumer while the planner takes the table for a young one, each as often as there
/// are keys. The insert always conflicts, because what is locked cannot go away.
const RENEW: &str = "
WITH held AS MATERIALIZED (
    SELECT p.idempotency_key
    FROM unnest($2::text[], $3::uuid[]) AS k (key, token)
    CROSS JOIN LATERAL (
        SELECT idempotency_key
        FROM processed_jobs
        WHERE consumer_name = $1 AND idempotency_key = k.key AND status = 'PROCESSING' AND token = k.token
          AND locked_until > clock_timestamp()
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS p
)
INSERT INTO processed_jobs (consumer_name, idempotency_key, status, fence, attempts, created_at, updated_at)
SELECT $1, held.idempotency_key, 'RECEIVED', 0, 0, clock_timestamp(), clock_timestamp() FROM held
ON CONFLICT (consumer_name, idempotency_key) DO UPDATE
SET locked_until = clock_timestamp() + $4 * interval '1 microsecond', updated_at = clock_timestamp()
RETURNING idempotency_key";

const RESULT: &str = "
SELECT result FROM processed_jobs WHERE consumer_name = $1 AND idempotency_key = $2 AND status = 'COMPLETED'";

/// The rows are this transaction's own. As [`COMPLETE`], so that a young table is not scanned.
const KEEP_RESULTS: &str = "
INSERT INTO processed_jobs (consumer_name, idempotency_key, status, fence, attempts, created_at, updated_at, result,
                            result_hash)
SELECT $1, k.key, 'COMPLETED', 1, 1, clock_timestamp(), clock_timestamp(), k.result, k.result_hash
FROM unnest($2::text[], $3::bytea[], $4::text[]) AS k (key, result, result_hash)
ON CONFLICT (consumer_name, idempotency_key) DO UPDATE SET result = excluded.result, result_hash = excluded.result_hash";

/// Locks in the order of the keys, and leaves out rows that somebody else writes: a count may not hold anybody up. In the shape
/// of [`RENEW`], and for its reasons.
const COUNT_DUPLICATES: &str = "
WITH counted AS MATERIALIZED (
    SELECT p.idempotency_key, k.times
    FROM unnest($2::text[], $3::bigint[]) AS k (key, times)
    CROSS JOIN LATERAL (
        SELECT idempotency_key
        FROM processed_jobs
        WHERE consumer_name = $1 AND idempotency_key = k.key
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS p
)
INSERT INTO processed_jobs AS j (consumer_name, idempotency_key, status, fence, attempts, duplicates, created_at, updated_at)
SELECT $1, counted.idempotency_key, 'RECEIVED', 0, 0, counted.times, clock_timestamp(), clock_timestamp() FROM counted
ON CONFLICT (consumer_name, idempotency_key) DO UPDATE
SET duplicates = j.duplicates + excluded.duplicates, last_duplicate_at = clock_timestamp()";

/// By the key and not by the place of the row, which in a partitioned table is not unique. The row is locked and looked at
/// once more before it goes. A row ended after it was made, so the index on `created_at` finds the old ones; the clock is in a
/// subquery, because an index is not searched for what may change with each row.
const PURGE: &str = "
WITH ended AS MATERIALIZED (
    SELECT consumer_name, idempotency_key
    FROM processed_jobs
    WHERE created_at <= (SELECT clock_timestamp() - $1 * interval '1 microsecond')
      AND (status = 'COMPLETED' AND completed_at <= (SELECT clock_timestamp() - $1 * interval '1 microsecond')
           OR status = 'FAILED' AND failure_kind IN ('terminal', 'exhausted')
              AND updated_at <= (SELECT clock_timestamp() - $1 * interval '1 microsecond'))
      AND ($2::text IS NULL OR consumer_name = $2)
    LIMIT $3
    FOR UPDATE SKIP LOCKED
)
DELETE FROM processed_jobs AS j
USING ended
WHERE j.consumer_name = ended.consumer_name AND j.idempotency_key = ended.idempotency_key";

/// Whoever wants such a lock next makes it anew.
const PURGE_LOCKS: &str = "
DELETE FROM job_locks
WHERE lock_name IN (
    SELECT lock_name
    FROM job_locks
    WHERE locked_until IS NULL AND updated_at <= clock_timestamp() - $1 * interval '1 microsecond'
    LIMIT $2
    FOR UPDATE SKIP LOCKED)";

const MAKE_LOCKS: &str = "
INSERT INTO job_locks (lock_name, updated_at)
SELECT k.name, clock_timestamp() FROM unnest($1::text[]) AS k (name)
ON CONFLICT (lock_name) DO NOTHING";

/// A name goes with the token and the key at the same place.
const TAKE_LOCKS: &str = "
WITH free AS MATERIALIZED (
    SELECT lock_name, array_position($3::text[], lock_name::text) AS place
    FROM job_locks
    WHERE lock_name = ANY ($3::text[])
      AND (locked_until IS NULL OR locked_until <= clock_timestamp()
           OR token = ($4::uuid[])[array_position($3::text[], lock_name::text)])
    ORDER BY lock_name
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE job_locks AS l
SET token = ($4::uuid[])[free.place], locked_until = clock_timestamp() + $2 * interval '1 microsecond', consumer_name = $1,
    idempotency_key = ($5::text[])[free.place], updated_at = clock_timestamp()
FROM free
WHERE l.lock_name = free.lock_name
RETURNING l.lock_name";

const EXTEND_LOCKS: &str = "
WITH held AS MATERIALIZED (
    SELECT lock_name
    FROM job_locks
    WHERE lock_name = ANY ($2::text[]) AND locked_until > clock_timestamp()
      AND token = ($3::uuid[])[array_position($2::text[], lock_name::text)]
    ORDER BY lock_name
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE job_locks AS l
SET locked_until = clock_timestamp() + $1 * interval '1 microsecond', updated_at = clock_timestamp()
FROM held
WHERE l.lock_name = held.lock_name
RETURNING l.lock_name";

const FREE_LOCKS: &str = "
WITH held AS MATERIALIZED (
    SELECT lock_name
    FROM job_locks
    WHERE lock_name = ANY ($1::text[]) AND token = ($2::uuid[])[array_position($1::text[], lock_name::text)]
    ORDER BY lock_name
    FOR NO KEY UPDATE
)
UPDATE job_locks AS l
SET token = NULL, locked_until = NULL, updated_at = clock_timestamp()
FROM held
WHERE l.lock_name = held.lock_name";

const HOLD_LOCKS: &str = "
SELECT lock_name
FROM job_locks
WHERE lock_name = ANY ($1::text[]) AND (locked_until IS NULL OR locked_until <= clock_timestamp())
ORDER BY lock_name
FOR NO KEY UPDATE SKIP LOCKED";

const OVERWRITE: &str = "
UPDATE processed_jobs
SET status = $3, locked_until = $4, token = $5, fence = $6, attempts = $7, next_attempt_at = $8, failure_kind = $9,
    payload_hash = $10, error_message = $11, updated_at = clock_timestamp(),
    completed_at = CASE WHEN $3 = 'COMPLETED' THEN clock_timestamp() END
WHERE consumer_name = $1 AND idempotency_key = $2";

/// Ends with the transaction. Waiting for it is waiting for another process that migrates, so its limit is a longer one.
const LOCK_MIGRATIONS: &str = "
SELECT set_config('lock_timeout', '100s', true),
       pg_advisory_xact_lock(hashtextextended('idem migrations in ' || current_schema(), 0))";

const CURRENT_SCHEMA: &str = "SELECT current_schema()::text";

const IS_RECORDED: &str =
    "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = current_schema() AND tablename = '_idem_migrations')";

const CREATE_RECORDS: &str = "
CREATE TABLE _idem_migrations (
    version    bigint      PRIMARY KEY,
    name       text        NOT NULL,
    checksum   text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)";

const APPLIED: &str = "SELECT version, name, checksum FROM _idem_migrations ORDER BY version";

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

const HAS_UNIQUE_LOCK: &str = "
SELECT EXISTS (
    SELECT FROM pg_index AS i
    JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = to_regclass('job_locks')
      AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
      AND i.indnkeyatts = 1 AND a.attname = 'lock_name')";

type Statement<'q> = Query<'q, Postgres, PgArguments>;

/// The guard's rows through one connection.
pub(super) struct PgRows<'c> {
    connection: &'c mut PgConnection,
    /// Whether the server may keep statements for the session. Behind a pooler that lends sessions for one transaction each,
    /// another client's statement of the same name would be there.
    persistent: bool,
}

impl<'c> PgRows<'c> {
    pub(super) fn new(connection: &'c mut PgConnection, persistent: bool) -> Self {
        Self { connection, persistent }
    }

    async fn fetch(&mut self, statement: Statement<'_>, what: &str) -> Result<Vec<PgRow>, StoreError> {
        let rows = statement.persistent(self.persistent).fetch_all(&mut *self.connection).await;
        rows.map_err(|error| StoreError::from_sqlx(what, error))
    }

    async fn execute(&mut self, statement: Statement<'_>, what: &str) -> Result<u64, StoreError> {
        let done = statement.persistent(self.persistent).execute(&mut *self.connection).await;
        Ok(done.map_err(|error| StoreError::from_sqlx(what, error))?.rows_affected())
    }

    /// The one value of the one row.
    async fn value<T>(&mut self, statement: Statement<'_>, what: &str) -> Result<T, StoreError>
    where
        T: for<'r> sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
    {
        let row = statement.persistent(self.persistent).fetch_one(&mut *self.connection).await;
        row.and_then(|row| row.try_get(0)).map_err(|error| StoreError::from_sqlx(what, error))
    }
}

impl Rows for PgRows<'_> {
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
        let statement = sqlx::query(INSERT)
            .bind(terms.consumer.as_str())
            .bind(status)
            .bind(lease)
            .bind(row_text::owner(terms))
            .bind(column(requests, |request| request.key.as_str()))
            .bind(column(requests, |request| request.token.0))
            .bind(column(requests, |request| request.payload.map(|payload| payload.to_string())))
            .bind(column(requests, |request| row_text::message_id(request)));
        let rows = self.fetch(statement, "claim jobs").await?;
        let inserted = rows.iter().map(|row| {
            let now: DateTime<Utc> = row.try_get("created_at")?;
            let answered: DateTime<Utc> = row.try_get("answered")?;
            let waited = timestamp(answered).since(timestamp(now));
            Ok((key_of(row)?, Inserted { now: timestamp(now), waited }))
        });
        collect(inserted, "read claimed jobs")
    }

    async fn load(&mut self, consumer: &ConsumerName, keys: &[&EventKey]) -> Result<Loaded, StoreError> {
        let statement = sqlx::query(LOAD).bind(consumer.as_str()).bind(column(keys, |key| key.as_str()));
        let rows = self.fetch(statement, "read jobs").await?;
        let mut found: HashMap<String, Snapshot> = HashMap::with_capacity(rows.len());
        let mut now = Timestamp::EPOCH;
        for row in &rows {
            now = timestamp(row.try_get("now").map_err(|error| StoreError::from_sqlx("read the clock", error))?);
            let key: Option<String> =
                row.try_get("idempotency_key").map_err(|error| StoreError::from_sqlx("read a job", error))?;
            if let Some(key) = key {
                found.insert(key, snapshot(row)?);
            }
        }
        Ok(Loaded { now, rows: keys.iter().map(|key| found.remove(key.as_str())).collect() })
    }

    async fn replace(
        &mut self,
        terms: &Terms,
        Replacement { key, from, to, error }: Replacement<'_>,
        locked: Locked,
    ) -> Result<bool, StoreError> {
        let from = StateColumns::of(from)?;
        let text = match locked {
            Locked::Wait => REPLACE,
            Locked::Skip => REPLACE_UNLESS_LOCKED,
        };
        let statement = written(sqlx::query(text), terms, key, &StateColumns::of(to)?)
            .bind(error.map(row_text::storable))
            .bind(row_text::owner(terms))
            .bind(from.status)
            .bind(from.locked_until.map(date_time))
            .bind(from.token.map(|token| token.0))
            .bind(from.fence)
            .bind(from.attempts)
            .bind(from.next_attempt_at.map(date_time))
            .bind(from.failure_kind);
        Ok(self.execute(statement, "write a job").await? == 1)
    }

    async fn complete(&mut self, terms: &Terms, done: &[&Completion]) -> Result<HashSet<EventKey>, StoreError> {
        let statement = sqlx::query(COMPLETE)
            .bind(terms.consumer.as_str())
            .bind(row_text::owner(terms))
            .bind(column(done, |done| done.request.key.as_str()))
            .bind(column(done, |done| done.request.token.0))
            .bind(column(done, |done| done.fence))
            .bind(column(done, |done| row_text::attempts(done.attempt)))
            .bind(column(done, |done| done.request.payload.map(|payload| payload.to_string())))
            .bind(column(done, |done| row_text::message_id(&done.request)))
            .bind(column(done, |done| done.returned.value.as_deref()))
            .bind(column(done, |done| done.returned.hash.as_deref()));
        let rows = self.fetch(statement, "complete jobs").await?;
        collect(rows.iter().map(key_of), "read completed jobs")
    }

    async fn renew(&mut self, terms: &Terms, held: &[(&EventKey, Token)]) -> Result<HashSet<EventKey>, StoreError> {
        let statement = sqlx::query(RENEW)
            .bind(terms.consumer.as_str())
            .bind(column(held, |(key, _)| key.as_str()))
            .bind(column(held, |(_, token)| token.0))
            .bind(micros(terms.lease));
        let rows = self.fetch(statement, "renew leases").await?;
        collect(rows.iter().map(key_of), "read renewed jobs")
    }

    async fn result(&mut self, consumer: &ConsumerName, key: &EventKey) -> Result<Option<Vec<u8>>, StoreError> {
        let what = "read what a job returned";
        let rows = self.fetch(sqlx::query(RESULT).bind(consumer.as_str()).bind(key.as_str()), what).await?;
        let result = rows.first().map(|row| row.try_get::<Option<Vec<u8>>, _>(0)).transpose();
        result.map(Option::flatten).map_err(|error| StoreError::from_sqlx(what, error))
    }

    async fn count_duplicates(
        &mut self,
        consumer: &ConsumerName,
        counts: &[(&EventKey, u64)],
    ) -> Result<(), StoreError> {
        let statement = sqlx::query(COUNT_DUPLICATES)
            .bind(consumer.as_str())
            .bind(column(counts, |(key, _)| key.as_str()))
            .bind(column(counts, |(_, times)| i64::try_from(*times).unwrap_or(i64::MAX)));
        self.execute(statement, "count duplicates").await?;
        Ok(())
    }
}

impl LockRows for PgRows<'_> {
    async fn make(&mut self, names: &[&LockName]) -> Result<(), StoreError> {
        let statement = sqlx::query(MAKE_LOCKS).bind(column(names, |name| name.as_str()));
        self.execute(statement, "make locks").await?;
        Ok(())
    }

    async fn take(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let statement = sqlx::query(TAKE_LOCKS)
            .bind(terms.consumer.as_str())
            .bind(micros(terms.lease))
            .bind(column(requests, |request| request.name.as_str()))
            .bind(column(requests, |request| request.token.0))
            .bind(column(requests, |request| request.key.as_str()));
        let rows = self.fetch(statement, "take locks").await?;
        collect(rows.iter().map(lock_of), "read locks")
    }

    async fn extend(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let statement = sqlx::query(EXTEND_LOCKS)
            .bind(micros(terms.lease))
            .bind(column(requests, |request| request.name.as_str()))
            .bind(column(requests, |request| request.token.0));
        let rows = self.fetch(statement, "extend locks").await?;
        collect(rows.iter().map(lock_of), "read locks")
    }

    async fn free(&mut self, requests: &[&LockRequest]) -> Result<(), StoreError> {
        let statement = sqlx::query(FREE_LOCKS)
            .bind(column(requests, |request| request.name.as_str()))
            .bind(column(requests, |request| request.token.0));
        self.execute(statement, "free locks").await?;
        Ok(())
    }

    async fn hold(&mut self, names: &[&LockName]) -> Result<HashSet<LockName>, StoreError> {
        let statement = sqlx::query(HOLD_LOCKS).bind(column(names, |name| name.as_str()));
        let rows = self.fetch(statement, "hold locks").await?;
        collect(rows.iter().map(lock_of), "read locks")
    }
}

fn lock_of(row: &PgRow) -> Result<LockName, sqlx::Error> {
    Ok(LockName::from_stored(row.try_get("lock_name")?))
}

impl PgRows<'_> {
    /// Keeps what handlers returned, on rows of this transaction.
    pub(super) async fn keep_results(
        &mut self,
        consumer: &ConsumerName,
        results: &[(EventKey, Returned)],
    ) -> Result<(), StoreError> {
        let statement = sqlx::query(KEEP_RESULTS)
            .bind(consumer.as_str())
            .bind(column(results, |(key, _)| key.as_str()))
            .bind(column(results, |(_, returned)| returned.value.as_deref()))
            .bind(column(results, |(_, returned)| returned.hash.as_deref()));
        self.execute(statement, "keep what jobs returned").await?;
        Ok(())
    }

    /// Removes rows that ended long ago.
    pub(super) async fn purge(&mut self, purge: &Purge) -> Result<u64, StoreError> {
        let statement = sqlx::query(PURGE)
            .bind(micros(purge.older_than))
            .bind(purge.consumer.as_ref().map(ConsumerName::as_str))
            .bind(i64::from(purge.most));
        let removed = self.execute(statement, "purge jobs").await?;
        if purge.consumer.is_none() && removed < u64::from(purge.most) {
            let statement = sqlx::query(PURGE_LOCKS).bind(micros(purge.older_than)).bind(i64::from(purge.most));
            self.execute(statement, "purge locks").await?;
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
        self.execute(statement, "write a failed job").await?;
        Ok(())
    }
}

impl Tables for PgRows<'_> {
    async fn recorded(&mut self) -> Result<Option<Vec<Applied>>, StoreError> {
        let is_recorded = self.is_recorded().await?;
        Ok(if is_recorded { Some(self.records().await?) } else { None })
    }

    async fn applied(&mut self) -> Result<Vec<Applied>, StoreError> {
        let schema: Option<String> = self.value(sqlx::query(CURRENT_SCHEMA), "read the current schema").await?;
        if schema.is_none() {
            return Err(migrate::schema("the search_path names no schema that exists; create it, or set another"));
        }
        self.execute(sqlx::query(LOCK_MIGRATIONS), "wait for others that migrate").await?;
        // Asked first, because a role that may not create tables may still start where nothing is to be created.
        if !self.is_recorded().await? {
            self.execute(sqlx::query(CREATE_RECORDS), "create the table of migrations").await?;
        }
        self.records().await
    }

    async fn apply(&mut self, migration: &Migration) -> Result<(), StoreError> {
        let failed = |error| StoreError::from_sqlx(format!("apply migration {}", migration.name), error);
        sqlx::raw_sql(migration.text).execute(&mut *self.connection).await.map_err(failed)?;
        let record = sqlx::query(RECORD).bind(migration.version).bind(migration.name).bind(migration.checksum());
        self.execute(record, "record a migration").await?;
        Ok(())
    }

    async fn has_unique_pair(&mut self) -> Result<bool, StoreError> {
        self.value(sqlx::query(HAS_UNIQUE_PAIR), "look for the primary key").await
    }

    async fn has_unique_lock(&mut self) -> Result<bool, StoreError> {
        self.value(sqlx::query(HAS_UNIQUE_LOCK), "look for the primary key of locks").await
    }
}

impl PgRows<'_> {
    /// Whether the server takes writes.
    pub(super) async fn can_write(&mut self) -> Result<bool, StoreError> {
        self.value(sqlx::query(CAN_WRITE), "ping the server").await
    }

    async fn is_recorded(&mut self) -> Result<bool, StoreError> {
        self.value(sqlx::query(IS_RECORDED), "look for the table of migrations").await
    }

    async fn records(&mut self) -> Result<Vec<Applied>, StoreError> {
        let rows = self.fetch(sqlx::query(APPLIED), "read which migrations were applied").await?;
        let applied = rows.iter().map(|row| {
            let (version, name, checksum) = (row.try_get("version")?, row.try_get("name")?, row.try_get("checksum")?);
            Ok(Applied { version, name, checksum })
        });
        collect(applied, "read which migrations were applied")
    }
}

/// Binds $1 to $10 of a statement that writes a state.
fn written<'q>(statement: Statement<'q>, terms: &'q Terms, key: &'q EventKey, to: &StateColumns) -> Statement<'q> {
    statement
        .bind(terms.consumer.as_str())
        .bind(key.as_str())
        .bind(to.status)
        .bind(to.locked_until.map(date_time))
        .bind(to.token.map(|token| token.0))
        .bind(to.fence)
        .bind(to.attempts)
        .bind(to.next_attempt_at.map(date_time))
        .bind(to.failure_kind)
        .bind(to.payload.map(|payload| payload.to_string()))
}

fn column<'t, T, U>(items: &'t [T], value: impl Fn(&'t T) -> U) -> Vec<U> {
    items.iter().map(value).collect()
}

fn collect<T, C: FromIterator<T>>(
    items: impl Iterator<Item = Result<T, sqlx::Error>>,
    what: &str,
) -> Result<C, StoreError> {
    items.collect::<Result<C, _>>().map_err(|error| StoreError::from_sqlx(what, error))
}

fn key_of(row: &PgRow) -> Result<EventKey, sqlx::Error> {
    Ok(EventKey::from_stored(row.try_get("idempotency_key")?))
}

fn snapshot(row: &PgRow) -> Result<Snapshot, StoreError> {
    let read = || -> Result<_, sqlx::Error> {
        let instant = |column| Ok::<_, sqlx::Error>(row.try_get::<Option<DateTime<Utc>>, _>(column)?.map(timestamp));
        let columns = row_text::Stored {
            status: row.try_get("status")?,
            locked_until: instant("locked_until")?,
            token: row.try_get::<Option<Uuid>, _>("token")?.map(Token),
            fence: row.try_get("fence")?,
            attempts: row.try_get("attempts")?,
            next_attempt_at: instant("next_attempt_at")?,
            failure_kind: row.try_get("failure_kind")?,
            payload: row.try_get("payload_hash")?,
        };
        Ok((columns, row.try_get("message_id")?, row.try_get("error_message")?))
    };
    let (columns, message_id, error) = read().map_err(|error| StoreError::from_sqlx("read a job", error))?;
    Ok(Snapshot { state: columns.state()?, message_id, error })
}

fn timestamp(instant: DateTime<Utc>) -> Timestamp {
    Timestamp::from_micros(instant.timestamp_micros())
}

/// The far future is the year 9999, before either side's calendar ends.
fn date_time(instant: Timestamp) -> DateTime<Utc> {
    const YEAR_9999: i64 = 253_370_764_800_000_000;
    DateTime::from_timestamp_micros(instant.as_micros().min(YEAR_9999)).unwrap_or(DateTime::UNIX_EPOCH)
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}
