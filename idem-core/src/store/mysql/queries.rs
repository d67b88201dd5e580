//! Every statement that the MySQL store sends, and how its rows are read.
//!
//! - **The clock** is `UTC_TIMESTAMP(6)`: the instant at which its statement began, whatever the session's time zone is.
//!   `SYSDATE()` would go on during a wait, but in the session's zone, and a server can be told to let it stand still.
//!   So what is decided is decided with the clock of a statement that waits for nobody: a plain `SELECT`, or one that skips
//!   what is locked.
//! - **Affected rows** are the rows that a statement found, changed or not: sqlx asks for `CLIENT_FOUND_ROWS`.
//! - **Order.** An `UPDATE` may see what its earlier assignments wrote, so none reads a column that is assigned before it.
//! - **Batches** are lists of placeholders, and each length is another text. So that few texts are prepared, a list is filled
//!   up to a power of two with its last item; where a repeated item would count, other lengths are not kept prepared.
//! - **`FORCE INDEX (PRIMARY)`** is a search for each key even while the table is young, so that nobody's row is locked in
//!   passing; and without a primary key, which the guard is, it fails.

use std::collections::{HashMap, HashSet};
use std::iter::repeat_n;
use std::time::Duration;

use chrono::{DateTime, NaiveDateTime};
use rand::Rng;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row};
use tokio::time::sleep;
use uuid::Uuid;

use crate::clock::{Clock, SystemClock};
use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{State, Token};
use crate::store::error::{DEADLOCK, DUPLICATE};
use crate::store::locks::{LockRequest, LockRows};
use crate::store::migrate::{self, Applied, Migration, Tables};
use crate::store::row_text::{self, StateColumns};
use crate::store::rows::{ClaimAs, Inserted, Loaded, Locked, Replacement, Rows, Snapshot};
use crate::store::{ClaimRequest, Completion, Purge, Returned, StoreError, StoreErrorKind, Terms};
use crate::timestamp::Timestamp;

/// Rows in one statement. Longer batches are several. Beyond 200 keys the optimizer guesses instead of looking.
const MOST_ROWS: usize = 128;

/// How often an insert is tried again whose key somebody else inserted since it was looked for, or that the engine broke off.
const ROUNDS: u32 = 16;
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Sent once on each new connection, before anything else. Settings of the server or the user must not change what the
/// guard's statements mean, and a worker that has vanished must not keep its locks.
///
/// `wait_timeout` counts from the last statement of a session, in a transaction or not; the pool notices when it was closed.
/// The mode is set as a whole, since a mode can change what a text means; strict, since a value that does not fit would be
/// cut; with what sqlx asks for. Messages are English because one of them is read, see `unique_violation`.
pub(super) fn settings(lock_timeout: Duration, idle_timeout: Duration) -> String {
    let (lock, idle) = (whole_seconds(lock_timeout), whole_seconds(idle_timeout));
    format!(
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
         SET SESSION autocommit = 1, completion_type = 'NO_CHAIN', unique_checks = 1, lc_messages = 'en_US',
             innodb_lock_wait_timeout = {lock}, lock_wait_timeout = {lock}, wait_timeout = {idle},
             sql_mode = 'STRICT_TRANS_TABLES,STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ZERO_DATE,NO_ZERO_IN_DATE,\
                         NO_ENGINE_SUBSTITUTION,PIPES_AS_CONCAT'"
    )
}

/// MySQL counts its time-outs so.
pub(super) fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// What the server must have, and what makes a commit durable.
pub(super) const SERVER: &str = "
SELECT VERSION() AS version, @@innodb_flush_log_at_trx_commit = 1 AS log_is_flushed,
       @@log_bin = 0 OR @@sync_binlog = 1 AS binlog_is_flushed";

/// The isolation is named, because a handler may have set another for its session.
///
/// Without autocommit: if the engine or a handler ends the transaction, what comes after it is in a new one that nobody
/// commits, instead of being committed statement by statement. The savepoint is gone then, which [`COMMIT`] asks for.
///
/// Answers the session's number, by which it can be ended from another one.
pub(super) const BEGIN: &str = "
SET autocommit = 0;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
START TRANSACTION;
SAVEPOINT idem_begun;
SELECT CONNECTION_ID()";

/// The first of the statements that fails is the last that is run.
pub(super) const COMMIT: &str = "RELEASE SAVEPOINT idem_begun; COMMIT; SET autocommit = 1";

pub(super) const ROLLBACK: &str = "ROLLBACK; SET autocommit = 1";

/// A savepoint of that name is not there: the transaction in which it was set has ended.
pub(super) const NO_SUCH_SAVEPOINT: u16 = 1305;

/// Ends a session, whose transaction is then rolled back. A user may do that to sessions of its own.
pub(super) fn end_session(id: u64) -> String {
    format!("KILL CONNECTION {id}")
}

/// Writes nothing, for no name is empty, and is refused as every write would be: by a replica or a server set to read-only,
/// in a session that is, or by a binary log that cannot hold it. Asking for the settings would miss that some users are
/// exempt from them.
pub(super) const CAN_WRITE: &str = "
UPDATE processed_jobs FORCE INDEX (PRIMARY) SET fence = fence WHERE consumer_name = '' AND idempotency_key = ''";

/// Which keys are there. The outer part is there so that the clock is answered even when no row is.
const EXISTING: List = List {
    before: "
SELECT c.now, j.idempotency_key
FROM (SELECT UTC_TIMESTAMP(6) AS now) AS c
LEFT JOIN processed_jobs AS j FORCE INDEX (PRIMARY) ON j.consumer_name = ? AND j.idempotency_key IN (",
    item: "?",
    between: ", ",
    after: ")",
};

/// Either all rows or none: of a row that is there already MySQL would not say that it is, only that a row was found.
const INSERT: List = List {
    before: "
INSERT INTO processed_jobs (consumer_name, idempotency_key, status, locked_until, token, fence, attempts, payload_hash,
                            owner, message_id, created_at, updated_at, completed_at)
VALUES ",
    item: "(?, ?, ?, ?, ?, 1, 1, ?, ?, ?, ?, ?, ?)",
    between: ", ",
    after: "",
};

const INSERT_COMPLETED: &str = "
INSERT INTO processed_jobs (consumer_name, idempotency_key, status, token, fence, attempts, payload_hash, owner, message_id,
                            result, result_hash, created_at, updated_at, completed_at)
VALUES (?, ?, 'COMPLETED', ?, ?, ?, ?, ?, ?, ?, ?, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))";

const LOAD: List = List {
    before: "
SELECT c.now, j.idempotency_key, j.status, j.locked_until, j.token, j.fence, j.attempts, j.next_attempt_at, j.failure_kind,
       j.payload_hash, j.message_id, j.error_message
FROM (SELECT UTC_TIMESTAMP(6) AS now) AS c
LEFT JOIN processed_jobs AS j FORCE INDEX (PRIMARY) ON j.consumer_name = ? AND j.idempotency_key IN (",
    item: "?",
    between: ", ",
    after: ")",
};

macro_rules! set_state {
    () => {
        "
SET j.owner = COALESCE(?, j.owner), j.error_message = COALESCE(?, j.error_message), j.status = ?, j.locked_until = ?,
    j.token = ?, j.fence = ?, j.attempts = ?, j.next_attempt_at = ?, j.failure_kind = ?, j.payload_hash = ?,
    j.updated_at = UTC_TIMESTAMP(6), j.completed_at = CASE WHEN ? = 'COMPLETED' THEN UTC_TIMESTAMP(6) END"
    };
}

macro_rules! is_as_read {
    () => {
        "
WHERE consumer_name = ? AND idempotency_key = ?
  AND status = ? AND locked_until <=> ? AND token <=> ? AND fence = ?
  AND attempts = ? AND next_attempt_at <=> ? AND failure_kind <=> ?"
    };
}

const REPLACE: &str = concat!("UPDATE processed_jobs AS j FORCE INDEX (PRIMARY)", set_state!(), is_as_read!());

/// As [`REPLACE`], but takes the lock first and only if it is free. The limit keeps the inner part a part of its own.
const REPLACE_UNLESS_LOCKED: &str = concat!(
    "
UPDATE (
    SELECT consumer_name, idempotency_key
    FROM processed_jobs FORCE INDEX (PRIMARY)",
    is_as_read!(),
    "
    LIMIT 1
    FOR UPDATE SKIP LOCKED
) AS free
STRAIGHT_JOIN processed_jobs AS j FORCE INDEX (PRIMARY)
    ON j.consumer_name = free.consumer_name AND j.idempotency_key = free.idempotency_key",
    set_state!()
);

/// Writes a state over whatever is there.
const OVERWRITE: &str = concat!(
    "UPDATE processed_jobs AS j FORCE INDEX (PRIMARY)",
    set_state!(),
    "
WHERE consumer_name = ? AND idempotency_key = ?"
);

/// A row that this very completion has completed before counts as completed, and stays.
const COMPLETE: List = List {
    before: "
UPDATE processed_jobs FORCE INDEX (PRIMARY)
SET updated_at = CASE status WHEN 'COMPLETED' THEN updated_at ELSE UTC_TIMESTAMP(6) END,
    completed_at = COALESCE(completed_at, UTC_TIMESTAMP(6)), locked_until = NULL, status = 'COMPLETED'
WHERE consumer_name = ? AND status IN ('PROCESSING', 'COMPLETED') AND (",
    item: "(idempotency_key = ? AND token = ?)",
    between: " OR ",
    after: ")",
};

/// One that has a result, or that must not be completed twice.
const COMPLETE_ONE: &str = "
UPDATE processed_jobs FORCE INDEX (PRIMARY)
SET updated_at = UTC_TIMESTAMP(6), completed_at = UTC_TIMESTAMP(6), locked_until = NULL, status = 'COMPLETED', result = ?,
    result_hash = ?
WHERE consumer_name = ? AND idempotency_key = ? AND status = 'PROCESSING' AND token = ?";

const RESULT: &str = "
SELECT result FROM processed_jobs FORCE INDEX (PRIMARY)
WHERE consumer_name = ? AND idempotency_key = ? AND status = 'COMPLETED'";

/// The row is this transaction's own.
const KEEP_RESULT: &str = "
UPDATE processed_jobs FORCE INDEX (PRIMARY) SET result = ?, result_hash = ? WHERE consumer_name = ? AND idempotency_key = ?";

/// Leaves out rows that somebody else writes: a count may not hold anybody up. What comes after is one `WHEN ? THEN ?` for
/// each key.
const COUNT_DUPLICATES: List = List {
    before: "
UPDATE (
    SELECT consumer_name, idempotency_key
    FROM processed_jobs FORCE INDEX (PRIMARY)
    WHERE consumer_name = ? AND idempotency_key IN (",
    item: "?",
    between: ", ",
    after: ")
    LIMIT 1000
    FOR UPDATE SKIP LOCKED
) AS counted
STRAIGHT_JOIN processed_jobs AS j FORCE INDEX (PRIMARY)
    ON j.consumer_name = counted.consumer_name AND j.idempotency_key = counted.idempotency_key
SET j.last_duplicate_at = UTC_TIMESTAMP(6), j.duplicates = j.duplicates + CASE j.idempotency_key",
};

/// A row ended after it was made, so the index on `created_at` finds the old ones.
const PURGE: &str = "
DELETE j
FROM (
    SELECT consumer_name, idempotency_key
    FROM processed_jobs FORCE INDEX (processed_jobs_created)
    WHERE created_at <= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND
      AND (status = 'COMPLETED' AND completed_at <= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND
           OR status = 'FAILED' AND failure_kind IN ('terminal', 'exhausted')
              AND updated_at <= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND)
      AND (? IS NULL OR consumer_name = ?)
    LIMIT ?
    FOR UPDATE SKIP LOCKED
) AS ended
STRAIGHT_JOIN processed_jobs AS j FORCE INDEX (PRIMARY)
    ON j.consumer_name = ended.consumer_name AND j.idempotency_key = ended.idempotency_key";

/// Whoever wants such a lock next makes it anew.
const PURGE_LOCKS: &str = "
DELETE l
FROM (
    SELECT lock_name
    FROM job_locks
    WHERE locked_until IS NULL AND updated_at <= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND
    LIMIT ?
    FOR UPDATE SKIP LOCKED
) AS free
STRAIGHT_JOIN job_locks AS l FORCE INDEX (PRIMARY) ON l.lock_name = free.lock_name";

const EXISTING_LOCKS: List = List {
    before: "SELECT lock_name FROM job_locks FORCE INDEX (PRIMARY) WHERE lock_name IN (",
    item: "?",
    between: ", ",
    after: ")",
};

const MAKE_LOCK: &str = "INSERT INTO job_locks (lock_name, updated_at) VALUES (?, UTC_TIMESTAMP(6))";

const TAKE_LOCK: &str = "
UPDATE (
    SELECT lock_name
    FROM job_locks FORCE INDEX (PRIMARY)
    WHERE lock_name = ? AND (locked_until IS NULL OR locked_until <= UTC_TIMESTAMP(6) OR token = ?)
    LIMIT 1
    FOR UPDATE SKIP LOCKED
) AS free
STRAIGHT_JOIN job_locks AS l FORCE INDEX (PRIMARY) ON l.lock_name = free.lock_name
SET l.token = ?, l.locked_until = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, l.consumer_name = ?, l.idempotency_key = ?,
    l.updated_at = UTC_TIMESTAMP(6)";

const EXTEND_LOCK: &str = "
UPDATE (
    SELECT lock_name
    FROM job_locks FORCE INDEX (PRIMARY)
    WHERE lock_name = ? AND locked_until > UTC_TIMESTAMP(6) AND token = ?
    LIMIT 1
    FOR UPDATE SKIP LOCKED
) AS held
STRAIGHT_JOIN job_locks AS l FORCE INDEX (PRIMARY) ON l.lock_name = held.lock_name
SET l.locked_until = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, l.updated_at = UTC_TIMESTAMP(6)";

const FREE_LOCK: &str = "
UPDATE job_locks FORCE INDEX (PRIMARY) SET token = NULL, locked_until = NULL, updated_at = UTC_TIMESTAMP(6)
WHERE lock_name = ? AND token = ?";

const HOLD_LOCKS: List = List {
    before: "
SELECT lock_name
FROM job_locks FORCE INDEX (PRIMARY)
WHERE (locked_until IS NULL OR locked_until <= UTC_TIMESTAMP(6)) AND lock_name IN (",
    item: "?",
    between: ", ",
    after: ")
FOR UPDATE SKIP LOCKED",
};

/// Leaves locked rows to be looked at one by one: somebody's open transaction must not hold up the other renewals.
const RENEW: List = List {
    before: "
UPDATE (
    SELECT consumer_name, idempotency_key
    FROM processed_jobs FORCE INDEX (PRIMARY)
    WHERE consumer_name = ? AND status = 'PROCESSING' AND locked_until > UTC_TIMESTAMP(6) AND (",
    item: "(idempotency_key = ? AND token = ?)",
    between: " OR ",
    after: ")
    LIMIT 1000
    FOR UPDATE SKIP LOCKED
) AS held
STRAIGHT_JOIN processed_jobs AS j FORCE INDEX (PRIMARY)
    ON j.consumer_name = held.consumer_name AND j.idempotency_key = held.idempotency_key
SET j.locked_until = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, j.updated_at = UTC_TIMESTAMP(6)",
};

/// The session's, so it is there across the implicit commits of DDL, and gone with the session. Names are the server's, so
/// the database is part of it, as a digest: a name has at most 64 characters.
const LOCK_MIGRATIONS: &str = "SELECT GET_LOCK(CONCAT('idem migrations ', LEFT(SHA2(DATABASE(), 256), 40)), 100) <=> 1";

/// DDL waits for every transaction that has used the table.
pub(super) const SETTINGS_OF_MIGRATION: &str = "SET SESSION lock_wait_timeout = 100";

const IS_RECORDED: &str = "
SELECT EXISTS (SELECT 1 FROM information_schema.tables
               WHERE table_schema = DATABASE() AND table_name = '_idem_migrations')";

const CREATE_RECORDS: &str = "
CREATE TABLE _idem_migrations (
    version    BIGINT       NOT NULL PRIMARY KEY,
    name       VARCHAR(255) NOT NULL,
    checksum   CHAR(64)     NOT NULL,
    applied_at DATETIME(6)  NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4 COLLATE = utf8mb4_bin";

const RECORDS: &str =
    "SELECT version, name, checksum, applied_at IS NOT NULL AS is_applied FROM _idem_migrations ORDER BY version";

/// Not applied yet, but begun.
const RECORD: &str = "INSERT INTO _idem_migrations (version, name, checksum) VALUES (?, ?, ?)";

const FORGET_RECORD: &str = "DELETE FROM _idem_migrations WHERE version = ?";

const FINISH_RECORD: &str = "UPDATE _idem_migrations SET applied_at = UTC_TIMESTAMP(6) WHERE version = ?";

/// What a statement says that has been run before: the table, column, index or constraint is there already, or gone.
const DONE_BEFORE: [u16; 6] = [1050, 1060, 1061, 1091, 1826, 3822];

/// A unique index that an insert can rely on: of this pair, and of the whole values.
const HAS_UNIQUE_PAIR: &str = "
SELECT EXISTS (
    SELECT 1 FROM information_schema.statistics
    WHERE table_schema = DATABASE() AND table_name = 'processed_jobs'
    GROUP BY index_name
    HAVING MAX(non_unique) = 0 AND COUNT(*) = 2 AND COUNT(sub_part) = 0
       AND MAX(column_name = 'consumer_name') = 1 AND MAX(column_name = 'idempotency_key') = 1
       AND index_name = 'PRIMARY')";

const HAS_UNIQUE_LOCK: &str = "
SELECT EXISTS (
    SELECT 1 FROM information_schema.statistics
    WHERE table_schema = DATABASE() AND table_name = 'job_locks' AND index_name = 'PRIMARY'
    HAVING COUNT(*) = 1 AND COUNT(sub_part) = 0 AND MAX(column_name = 'lock_name') = 1)";

/// Transactions, and columns that compare bytes.
const IS_EXACT: &str = "
SELECT (SELECT engine = 'InnoDB' FROM information_schema.tables
        WHERE table_schema = DATABASE() AND table_name = 'processed_jobs')
   AND 2 = (SELECT COUNT(*) FROM information_schema.columns
            WHERE table_schema = DATABASE() AND table_name = 'processed_jobs'
              AND column_name IN ('consumer_name', 'idempotency_key') AND data_type = 'varbinary')";

type Statement<'q> = Query<'q, MySql, MySqlArguments>;

/// A statement with as many items as the batch has.
struct List {
    before: &'static str,
    item: &'static str,
    between: &'static str,
    after: &'static str,
}

impl List {
    fn of(&self, items: usize) -> AssertSqlSafe<String> {
        let list = vec![self.item; items].join(self.between);
        AssertSqlSafe(format!("{}{list}{}", self.before, self.after))
    }
}

/// The items, and the last one again until they are a power of two.
fn filled_up<T>(items: &[T]) -> impl Iterator<Item = &T> + Clone {
    let missing = items.len().next_power_of_two() - items.len();
    items.iter().chain(items.last().into_iter().flat_map(move |last| repeat_n(last, missing)))
}

/// The guard's rows through one connection.
pub(super) struct MysqlRows<'c> {
    pub connection: &'c mut MySqlConnection,
    /// Whether each statement is a transaction of its own, so that one which the engine broke off can be sent again.
    pub alone: bool,
}

impl Rows for MysqlRows<'_> {
    async fn insert(
        &mut self,
        terms: &Terms,
        requests: &[&ClaimRequest],
        claim_as: ClaimAs,
    ) -> Result<HashMap<EventKey, Inserted>, StoreError> {
        let mut inserted = HashMap::with_capacity(requests.len());
        for requests in requests.chunks(MOST_ROWS) {
            self.insert_missing(terms, requests, claim_as, &mut inserted).await?;
        }
        Ok(inserted)
    }

    async fn load(&mut self, consumer: &ConsumerName, keys: &[&EventKey]) -> Result<Loaded, StoreError> {
        let mut now = None;
        let mut found: HashMap<EventKey, Snapshot> = HashMap::with_capacity(keys.len());
        for keys in keys.chunks(MOST_ROWS) {
            let keys = filled_up(keys);
            let mut statement = sqlx::query(LOAD.of(keys.clone().count())).bind(consumer.as_str().as_bytes());
            for key in keys {
                statement = statement.bind(key.as_str().as_bytes());
            }
            for row in fetch(self.connection, statement, "read jobs").await? {
                // The earliest: a lease that counts from it does not hold longer than its holder believes.
                now = Some(now.unwrap_or(clock(&row)?));
                if let Some(key) = key_of(&row)? {
                    found.insert(key, snapshot(&row)?);
                }
            }
        }
        let rows = keys.iter().map(|&key| found.remove(key)).collect();
        Ok(Loaded { now: now.unwrap_or(Timestamp::EPOCH), rows })
    }

    async fn replace(
        &mut self,
        terms: &Terms,
        Replacement { key, from, to, error }: Replacement<'_>,
        locked: Locked,
    ) -> Result<bool, StoreError> {
        let (from, to) = (StateColumns::of(from)?, StateColumns::of(to)?);
        let owner = (to.fence > from.fence).then(|| row_text::owner(terms));
        let error = error.map(row_text::storable);
        let statement = match locked {
            Locked::Wait => as_read(with_state(sqlx::query(REPLACE), owner, error, &to), terms, key, &from),
            Locked::Skip => {
                with_state(as_read(sqlx::query(REPLACE_UNLESS_LOCKED), terms, key, &from), owner, error, &to)
            }
        };
        Ok(execute(self.connection, statement, "write a job").await? == 1)
    }

    async fn complete(&mut self, terms: &Terms, done: &[&Completion]) -> Result<HashSet<EventKey>, StoreError> {
        let mut completed = HashSet::with_capacity(done.len());
        let (silent, with_result): (Vec<_>, Vec<_>) =
            done.iter().copied().partition(|done: &&Completion| done.returned.is_nothing());
        for done in with_result {
            if self.complete_one(terms, done).await? {
                completed.insert(done.request.key.clone());
            }
        }
        for done in silent.chunks(MOST_ROWS) {
            let held: Vec<_> = done.iter().map(|done| (&done.request.key, done.request.token)).collect();
            if self.complete_held(terms, &held).await? == held.len() as u64 {
                completed.extend(held.into_iter().map(|(key, _)| key.clone()));
                continue;
            }
            // How many, but not which: so they are asked one by one.
            for done in done {
                let held = (&done.request.key, done.request.token);
                if self.complete_held(terms, &[held]).await? == 1 || self.insert_completed(terms, done).await? {
                    completed.insert(done.request.key.clone());
                }
            }
        }
        Ok(completed)
    }

    async fn renew(&mut self, terms: &Terms, held: &[(&EventKey, Token)]) -> Result<HashSet<EventKey>, StoreError> {
        let mut renewed = HashSet::with_capacity(held.len());
        for held in held.chunks(MOST_ROWS) {
            if self.renew_held(terms, held).await? == held.len() as u64 {
                renewed.extend(held.iter().map(|(key, _)| (*key).clone()));
                continue;
            }
            for one in held {
                if self.renew_held(terms, std::slice::from_ref(one)).await? == 1 {
                    renewed.insert(one.0.clone());
                }
            }
        }
        Ok(renewed)
    }

    async fn result(&mut self, consumer: &ConsumerName, key: &EventKey) -> Result<Option<Vec<u8>>, StoreError> {
        let what = "read what a job returned";
        let statement = sqlx::query(RESULT).bind(consumer.as_str().as_bytes()).bind(key.as_str().as_bytes());
        let rows = fetch(self.connection, statement, what).await?;
        let result = rows.first().map(|row| row.try_get::<Option<Vec<u8>>, _>(0)).transpose();
        result.map(Option::flatten).map_err(|error| StoreError::from_sqlx(what, error))
    }

    async fn count_duplicates(
        &mut self,
        consumer: &ConsumerName,
        counts: &[(&EventKey, u64)],
    ) -> Result<(), StoreError> {
        for counts in counts.chunks(MOST_ROWS) {
            let counts = filled_up(counts);
            let items = counts.clone().count();
            let AssertSqlSafe(list) = COUNT_DUPLICATES.of(items);
            let text = format!("{list}{} ELSE 0 END", " WHEN ? THEN ?".repeat(items));
            let mut statement = sqlx::query(AssertSqlSafe(text)).bind(consumer.as_str().as_bytes());
            for (key, _) in counts.clone() {
                statement = statement.bind(key.as_str().as_bytes());
            }
            for (key, times) in counts {
                statement = statement.bind(key.as_str().as_bytes()).bind(i64::try_from(*times).unwrap_or(i64::MAX));
            }
            execute(self.connection, statement, "count duplicates").await?;
        }
        Ok(())
    }
}

/// Locks are few, and for sensitive work: one statement for each, in the order of their names.
impl LockRows for MysqlRows<'_> {
    async fn make(&mut self, names: &[&LockName]) -> Result<(), StoreError> {
        // Looked for first: an insert would wait for whoever holds a row that is there.
        let there = self.locks(&EXISTING_LOCKS, names, "look for locks").await?;
        for name in names.iter().filter(|name| !there.contains(**name)) {
            let made = execute(self.connection, sqlx::query(MAKE_LOCK).bind(name.as_str().as_bytes()), "make a lock");
            match made.await {
                Ok(_) => {}
                Err(error) if error.number() == Some(DUPLICATE) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn take(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let mut taken = HashSet::new();
        for LockRequest { name, token, key } in requests {
            let statement = sqlx::query(TAKE_LOCK)
                .bind(name.as_str().as_bytes())
                .bind(token.0)
                .bind(token.0)
                .bind(micros(terms.lease))
                .bind(terms.consumer.as_str().as_bytes())
                .bind(key.as_str().as_bytes());
            if execute(self.connection, statement, "take a lock").await? == 1 {
                taken.insert(name.clone());
            }
        }
        Ok(taken)
    }

    async fn extend(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let mut extended = HashSet::new();
        for LockRequest { name, token, .. } in requests {
            let statement =
                sqlx::query(EXTEND_LOCK).bind(name.as_str().as_bytes()).bind(token.0).bind(micros(terms.lease));
            if execute(self.connection, statement, "extend a lock").await? == 1 {
                extended.insert(name.clone());
            }
        }
        Ok(extended)
    }

    async fn free(&mut self, requests: &[&LockRequest]) -> Result<(), StoreError> {
        for LockRequest { name, token, .. } in requests {
            let statement = sqlx::query(FREE_LOCK).bind(name.as_str().as_bytes()).bind(token.0);
            execute(self.connection, statement, "free a lock").await?;
        }
        Ok(())
    }

    async fn hold(&mut self, names: &[&LockName]) -> Result<HashSet<LockName>, StoreError> {
        self.locks(&HOLD_LOCKS, names, "hold locks").await
    }
}

impl MysqlRows<'_> {
    /// The locks that a statement finds.
    async fn locks(&mut self, list: &List, names: &[&LockName], what: &str) -> Result<HashSet<LockName>, StoreError> {
        let mut found = HashSet::new();
        for names in names.chunks(MOST_ROWS) {
            let names = filled_up(names);
            let mut statement = sqlx::query(list.of(names.clone().count()));
            for name in names {
                statement = statement.bind(name.as_str().as_bytes());
            }
            for row in fetch(self.connection, statement, what).await? {
                let name = row
                    .try_get::<Vec<u8>, _>(0)
                    .and_then(|bytes| String::from_utf8(bytes).map_err(|error| sqlx::Error::Decode(error.into())));
                let name = name.map_err(|error| StoreError::from_sqlx("read a lock", error))?;
                found.insert(LockName::from_stored(name));
            }
        }
        Ok(found)
    }

    /// Keeps what handlers returned, on rows of this transaction.
    pub(super) async fn keep_results(
        &mut self,
        consumer: &ConsumerName,
        results: &[(EventKey, Returned)],
    ) -> Result<(), StoreError> {
        for (key, returned) in results {
            let statement = sqlx::query(KEEP_RESULT)
                .bind(returned.value.as_deref())
                .bind(returned.hash.as_deref())
                .bind(consumer.as_str().as_bytes())
                .bind(key.as_str().as_bytes());
            execute(self.connection, statement, "keep what a job returned").await?;
        }
        Ok(())
    }

    /// Removes rows that ended long ago.
    pub(super) async fn purge(&mut self, purge: &Purge) -> Result<u64, StoreError> {
        let consumer = purge.consumer.as_ref().map(|consumer| consumer.as_str().as_bytes());
        let age = micros(purge.older_than);
        let statement = sqlx::query(PURGE).bind(age).bind(age).bind(age).bind(consumer).bind(consumer).bind(purge.most);
        let removed = execute(self.connection, statement, "purge jobs").await?;
        if purge.consumer.is_none() && removed < u64::from(purge.most) {
            let statement = sqlx::query(PURGE_LOCKS).bind(age).bind(purge.most);
            execute(self.connection, statement, "purge locks").await?;
        }
        Ok(removed)
    }

    /// Completes one job that is held, or whose row is gone, and answers whether it did: not if it is completed already.
    pub(super) async fn complete_one(&mut self, terms: &Terms, done: &Completion) -> Result<bool, StoreError> {
        let statement = sqlx::query(COMPLETE_ONE)
            .bind(done.returned.value.as_deref())
            .bind(done.returned.hash.as_deref())
            .bind(terms.consumer.as_str().as_bytes())
            .bind(done.request.key.as_str().as_bytes())
            .bind(done.request.token.0);
        Ok(execute(self.connection, statement, "complete a job").await? == 1
            || self.insert_completed(terms, done).await?)
    }

    /// Looks which rows are there, without a lock, and inserts the others in one statement. If one of them has come since,
    /// none is inserted, and it looks again.
    ///
    /// Whoever waits for the insert of an open transaction that then rolls back may collide with the next one that waits:
    /// both have a lock on the place where the row was. The engine breaks one off.
    async fn insert_missing(
        &mut self,
        terms: &Terms,
        requests: &[&ClaimRequest],
        claim_as: ClaimAs,
        inserted: &mut HashMap<EventKey, Inserted>,
    ) -> Result<(), StoreError> {
        for _ in 0..ROUNDS {
            // This process's clock, but only for how long it took at most: MySQL's own is read before the wait.
            let asked = SystemClock.monotonic();
            let (now, there) = self.existing(&terms.consumer, requests).await?;
            let missing: Vec<_> = requests.iter().filter(|request| !there.contains(&request.key)).copied().collect();
            if missing.is_empty() {
                return Ok(());
            }
            match self.insert_all(terms, &missing, claim_as, now).await {
                Ok(()) => {
                    let waited = SystemClock.monotonic().saturating_duration_since(asked);
                    let rows = missing.iter().map(|request| (request.key.clone(), Inserted { now, waited }));
                    inserted.extend(rows);
                    return Ok(());
                }
                Err(error) if error.number() == Some(DUPLICATE) => {}
                Err(error) if error.number() == Some(DEADLOCK) && self.alone => pause().await,
                Err(error) => return Err(error),
            }
        }
        let text = "claim jobs: other workers' inserts came first each time";
        Err(StoreError::new(StoreErrorKind::Contention, text))
    }

    async fn existing(
        &mut self,
        consumer: &ConsumerName,
        requests: &[&ClaimRequest],
    ) -> Result<(Timestamp, HashSet<EventKey>), StoreError> {
        let requests = filled_up(requests);
        let mut statement = sqlx::query(EXISTING.of(requests.clone().count())).bind(consumer.as_str().as_bytes());
        for request in requests {
            statement = statement.bind(request.key.as_str().as_bytes());
        }
        let rows = fetch(self.connection, statement, "look for jobs").await?;
        let now = rows.first().map(clock).transpose()?.unwrap_or(Timestamp::EPOCH);
        let there = rows.iter().filter_map(|row| key_of(row).transpose()).collect::<Result<_, _>>()?;
        Ok((now, there))
    }

    async fn insert_all(
        &mut self,
        terms: &Terms,
        requests: &[&ClaimRequest],
        claim_as: ClaimAs,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let (status, locked_until, completed_at) = match claim_as {
            ClaimAs::Processing => ("PROCESSING", Some(now.plus(terms.lease)), None),
            ClaimAs::Completed => ("COMPLETED", None, Some(now)),
        };
        let owner = row_text::owner(terms);
        let mut statement = sqlx::query(INSERT.of(requests.len())).persistent(requests.len().is_power_of_two());
        for request in requests {
            statement = statement
                .bind(terms.consumer.as_str().as_bytes())
                .bind(request.key.as_str().as_bytes())
                .bind(status)
                .bind(locked_until.map(date_time))
                .bind(request.token.0)
                .bind(request.payload.map(|payload| payload.to_string()))
                .bind(owner.as_str())
                .bind(row_text::message_id(request))
                .bind(date_time(now))
                .bind(date_time(now))
                .bind(completed_at.map(date_time));
        }
        execute(self.connection, statement, "claim jobs").await?;
        Ok(())
    }

    /// How many rows are completed now.
    async fn complete_held(&mut self, terms: &Terms, held: &[(&EventKey, Token)]) -> Result<u64, StoreError> {
        let items = filled_up(held);
        let statement = sqlx::query(COMPLETE.of(items.clone().count())).bind(terms.consumer.as_str().as_bytes());
        execute(self.connection, with_held(statement, items), "complete jobs").await
    }

    /// Writes a row that is gone; answers whether it was.
    async fn insert_completed(&mut self, terms: &Terms, done: &Completion) -> Result<bool, StoreError> {
        let statement = sqlx::query(INSERT_COMPLETED)
            .bind(terms.consumer.as_str().as_bytes())
            .bind(done.request.key.as_str().as_bytes())
            .bind(done.request.token.0)
            .bind(done.fence)
            .bind(row_text::attempts(done.attempt))
            .bind(done.request.payload.map(|payload| payload.to_string()))
            .bind(row_text::owner(terms))
            .bind(row_text::message_id(&done.request))
            .bind(done.returned.value.as_deref())
            .bind(done.returned.hash.as_deref());
        match execute(self.connection, statement, "complete a job whose row is gone").await {
            Ok(_) => Ok(true),
            Err(error) if error.number() == Some(DUPLICATE) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// How many rows are renewed.
    async fn renew_held(&mut self, terms: &Terms, held: &[(&EventKey, Token)]) -> Result<u64, StoreError> {
        let items = filled_up(held);
        let statement = sqlx::query(RENEW.of(items.clone().count())).bind(terms.consumer.as_str().as_bytes());
        let statement = with_held(statement, items).bind(micros(terms.lease));
        execute(self.connection, statement, "renew leases").await
    }

    /// Writes a state over whatever is there.
    pub(super) async fn overwrite(
        &mut self,
        terms: &Terms,
        key: &EventKey,
        state: &State,
        error: &str,
    ) -> Result<(), StoreError> {
        let error = Some(row_text::storable(error));
        let statement = with_state(sqlx::query(OVERWRITE), None, error, &StateColumns::of(state)?)
            .bind(terms.consumer.as_str().as_bytes())
            .bind(key.as_str().as_bytes());
        execute(self.connection, statement, "write a failed job").await?;
        Ok(())
    }
}

/// DDL commits by itself here, statement by statement. So a migration is recorded as begun before its first statement and as
/// applied after its last, and one that was interrupted is run again, whereby what is there already counts as done.
impl Tables for MysqlRows<'_> {
    async fn recorded(&mut self) -> Result<Option<Vec<Applied>>, StoreError> {
        if !self.is_recorded().await? {
            return Ok(None);
        }
        let records = self.records().await?;
        Ok(Some(records.into_iter().filter(|record| record.is_applied).map(|record| record.applied).collect()))
    }

    async fn applied(&mut self) -> Result<Vec<Applied>, StoreError> {
        let failed = |error| StoreError::from_sqlx("read which migrations were applied", error);
        let is_ours: bool =
            sqlx::query_scalar(LOCK_MIGRATIONS).fetch_one(&mut *self.connection).await.map_err(failed)?;
        if !is_ours {
            let text = "wait for others that migrate: another process has been doing it for too long";
            return Err(StoreError::new(StoreErrorKind::Contention, text));
        }
        // Asked first, because a user who may not create tables may still start where nothing is to be created.
        if !self.is_recorded().await? {
            execute(self.connection, sqlx::query(CREATE_RECORDS), "create the table of migrations").await?;
        }
        let records = self.records().await?;
        let (applied, begun): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| record.is_applied);
        for Record { applied: begun, .. } in begun {
            let is_ours = |ours: &Migration| ours.version == begun.version && ours.checksum() == begun.checksum;
            if !migrate::MYSQL.iter().copied().flatten().any(is_ours) {
                return Err(migrate::schema(format!(
                    "another version of this program has begun migration {} ({}) and not finished it; \
                     start that version once more, so that it does",
                    begun.version, begun.name
                )));
            }
        }
        Ok(applied.into_iter().map(|record| record.applied).collect())
    }

    async fn apply(&mut self, migration: &Migration) -> Result<(), StoreError> {
        let failed = |error| StoreError::from_sqlx(format!("apply migration {}", migration.name), error);
        let was_begun = self.records().await?.iter().any(|record| record.applied.version == migration.version);
        if !was_begun {
            let record = sqlx::query(RECORD).bind(migration.version).bind(migration.name).bind(migration.checksum());
            execute(self.connection, record, "record a migration").await?;
        }
        for (number, statement) in statements(migration.text).into_iter().enumerate() {
            let sent = sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *self.connection).await;
            match sent.map_err(failed) {
                Ok(_) => {}
                Err(error) if was_begun && error.number().is_some_and(|number| DONE_BEFORE.contains(&number)) => {}
                Err(error) => {
                    // Nothing was done, so nothing is to be taken up again: a table of this name is somebody else's.
                    if number == 0 && !was_begun {
                        let forget = sqlx::query(FORGET_RECORD).bind(migration.version);
                        execute(self.connection, forget, "forget a migration that was refused").await?;
                    }
                    return Err(error);
                }
            }
        }
        execute(self.connection, sqlx::query(FINISH_RECORD).bind(migration.version), "record a migration").await?;
        Ok(())
    }

    async fn has_unique_pair(&mut self) -> Result<bool, StoreError> {
        let failed = |error| StoreError::from_sqlx("look for the primary key", error);
        let has_pair: bool =
            sqlx::query_scalar(HAS_UNIQUE_PAIR).fetch_one(&mut *self.connection).await.map_err(failed)?;
        let is_exact: Option<bool> =
            sqlx::query_scalar(IS_EXACT).fetch_one(&mut *self.connection).await.map_err(failed)?;
        if has_pair && is_exact == Some(false) {
            return Err(migrate::schema(
                "the table processed_jobs is not an InnoDB table whose consumer_name and idempotency_key are VARBINARY, \
                 without which two keys could be taken for one, or a job run twice; change it back",
            ));
        }
        Ok(has_pair)
    }

    async fn has_unique_lock(&mut self) -> Result<bool, StoreError> {
        let answer = sqlx::query_scalar(HAS_UNIQUE_LOCK).fetch_one(&mut *self.connection).await;
        answer.map_err(|error| StoreError::from_sqlx("look for the primary key of locks", error))
    }
}

/// What is recorded of a migration.
struct Record {
    applied: Applied,
    is_applied: bool,
}

impl MysqlRows<'_> {
    async fn is_recorded(&mut self) -> Result<bool, StoreError> {
        let is_recorded = sqlx::query_scalar(IS_RECORDED).fetch_one(&mut *self.connection).await;
        is_recorded.map_err(|error| StoreError::from_sqlx("look for the table of migrations", error))
    }

    async fn records(&mut self) -> Result<Vec<Record>, StoreError> {
        let what = "read which migrations were applied";
        let rows = fetch(self.connection, sqlx::query(RECORDS), what).await?;
        let record = |row: &MySqlRow| {
            let (version, name, checksum) = (row.try_get("version")?, row.try_get("name")?, row.try_get("checksum")?);
            Ok(Record { applied: Applied { version, name, checksum }, is_applied: row.try_get("is_applied")? })
        };
        let records: Result<_, sqlx::Error> = rows.iter().map(record).collect();
        records.map_err(|error| StoreError::from_sqlx(what, error))
    }
}

/// The statements of a migration, each of which ends with its line. Comments are whole lines, and left out.
fn statements(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    for line in text.lines().filter(|line| !line.trim_start().starts_with("--") && !line.trim().is_empty()) {
        let ends = line.trim_end().ends_with(';');
        all.last_mut().into_iter().for_each(|one| *one += &format!("{line}\n"));
        all.extend(ends.then(String::new));
    }
    all.retain(|one| !one.is_empty());
    all
}

/// Binds what [`set_state!`] asks for.
fn with_state<'q>(
    statement: Statement<'q>,
    owner: Option<String>,
    error: Option<std::borrow::Cow<'q, str>>,
    to: &StateColumns,
) -> Statement<'q> {
    statement
        .bind(owner)
        .bind(error)
        .bind(to.status)
        .bind(to.locked_until.map(date_time))
        .bind(to.token.map(|token| token.0))
        .bind(to.fence)
        .bind(to.attempts)
        .bind(to.next_attempt_at.map(date_time))
        .bind(to.failure_kind)
        .bind(to.payload.map(|payload| payload.to_string()))
        .bind(to.status)
}

/// Binds what [`is_as_read!`] asks for.
fn as_read<'q>(statement: Statement<'q>, terms: &'q Terms, key: &'q EventKey, from: &StateColumns) -> Statement<'q> {
    statement
        .bind(terms.consumer.as_str().as_bytes())
        .bind(key.as_str().as_bytes())
        .bind(from.status)
        .bind(from.locked_until.map(date_time))
        .bind(from.token.map(|token| token.0))
        .bind(from.fence)
        .bind(from.attempts)
        .bind(from.next_attempt_at.map(date_time))
        .bind(from.failure_kind)
}

fn with_held<'q, 'h: 'q>(
    mut statement: Statement<'q>,
    held: impl Iterator<Item = &'h (&'h EventKey, Token)>,
) -> Statement<'q> {
    for (key, token) in held {
        statement = statement.bind(key.as_str().as_bytes()).bind(token.0);
    }
    statement
}

async fn fetch(
    connection: &mut MySqlConnection,
    statement: Statement<'_>,
    what: &str,
) -> Result<Vec<MySqlRow>, StoreError> {
    statement.fetch_all(connection).await.map_err(|error| StoreError::from_sqlx(what, error))
}

/// How many rows the statement has found.
async fn execute(connection: &mut MySqlConnection, statement: Statement<'_>, what: &str) -> Result<u64, StoreError> {
    let done = statement.execute(connection).await.map_err(|error| StoreError::from_sqlx(what, error))?;
    Ok(done.rows_affected())
}

/// For another's turn, and not in step with a third one.
pub(super) async fn pause() {
    let share: f64 = rand::rng().random();
    sleep(LONGEST_PAUSE.mul_f64(share)).await;
}

fn clock(row: &MySqlRow) -> Result<Timestamp, StoreError> {
    row.try_get("now").map(timestamp).map_err(|error| StoreError::from_sqlx("read the clock", error))
}

/// Nothing in the row that is there only for its clock.
fn key_of(row: &MySqlRow) -> Result<Option<EventKey>, StoreError> {
    let key = || -> Result<_, sqlx::Error> {
        let Some(bytes) = row.try_get::<Option<Vec<u8>>, _>("idempotency_key")? else { return Ok(None) };
        let key = String::from_utf8(bytes).map_err(|error| sqlx::Error::Decode(error.into()))?;
        Ok(Some(EventKey::from_stored(key)))
    };
    key().map_err(|error| StoreError::from_sqlx("read the key of a job", error))
}

fn snapshot(row: &MySqlRow) -> Result<Snapshot, StoreError> {
    let read = || -> Result<_, sqlx::Error> {
        let instant = |column| Ok::<_, sqlx::Error>(row.try_get::<Option<NaiveDateTime>, _>(column)?.map(timestamp));
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

fn timestamp(instant: NaiveDateTime) -> Timestamp {
    Timestamp::from_micros(instant.and_utc().timestamp_micros())
}

/// The far future is the year 9999, before either side's calendar ends.
fn date_time(instant: Timestamp) -> NaiveDateTime {
    const YEAR_9999: i64 = 253_370_764_800_000_000;
    DateTime::from_timestamp_micros(instant.as_micros().min(YEAR_9999)).unwrap_or(DateTime::UNIX_EPOCH).naive_utc()
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_filled_up_to_a_power_of_two() {
        assert_eq!(filled_up(&[1, 2, 3, 4, 5]).collect::<Vec<_>>(), [&1, &2, &3, &4, &5, &5, &5, &5]);
        assert_eq!(filled_up(&[7]).collect::<Vec<_>>(), [&7]);
        assert_eq!(filled_up::<u8>(&[]).count(), 0);
        let list = List { before: "a(", item: "?", between: ", ", after: ")" };
        assert_eq!(list.of(3).0, "a(?, ?, ?)");
    }

    #[test]
    fn times_are_rounded_up_to_seconds() {
        for (millis, seconds) in [(1, 1), (999, 1), (1000, 1), (1001, 2), (10_000, 10)] {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds);
        }
    }

    #[test]
    fn a_migration_is_taken_apart_where_a_line_ends_a_statement() {
        let text = "-- one; two;\nCREATE TABLE a (\n    -- of a;\n    b INT\n);\n\n-- more\nALTER TABLE a\n    ADD c INT;\n-- end;\n";
        assert_eq!(statements(text), ["CREATE TABLE a (\n    b INT\n);\n", "ALTER TABLE a\n    ADD c INT;\n"]);
        for migration in migrate::MYSQL.iter().copied().flatten() {
            assert_eq!(statements(migration.text).len(), migration.text.matches("CREATE TABLE").count());
        }
    }
}
