//! The guard's table in schemas of its own, young or filled with old rows, whole or in parts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use idem_core::store::{PgStore, Store, StoreOptions};
use idem_core::{Guard, Guarded};
use sha2::{Digest, Sha256};
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgPool, PgPoolOptions};
use uuid::Uuid;

use crate::Failure;
use crate::args::Args;
use crate::handlers::{CONSUMER, Kind};

/// Rows that one statement of the filling inserts.
const CHUNK: u64 = 50_000;
/// How many statements fill at once.
const FILLERS: u64 = 2;

/// The key of the `number`-th job. Of 36 characters, in no order.
pub fn key(number: u64) -> String {
    let digest = Sha256::digest(format!("key {number}"));
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    Uuid::from_bytes(bytes).to_string()
}

/// The same in SQL, of a column `n`.
const KEY: &str = "left(encode(sha256(('key ' || n)::bytea), 'hex'), 32)::uuid::text";

/// The server, and who makes and drops schemas in it.
pub struct Tables {
    url: String,
    keep: bool,
    admin: PgPool,
    /// What this run made or used.
    used: Mutex<Vec<String>>,
}

/// One schema with the guard's tables and `invoices`.
pub struct Table {
    pub name: &'static str,
    pub url: String,
    pub guard: Guard,
    pub pool: PgPool,
    /// Whose key is asked for next. Those below are in the table.
    next: AtomicU64,
}

impl Tables {
    pub fn new(args: &Args) -> Result<Self, Failure> {
        let url = std::env::var("IDEM_TEST_POSTGRES_URL").map_err(
            |_| "IDEM_TEST_POSTGRES_URL names no server, such as postgres://postgres@127.0.0.1:5432/postgres",
        )?;
        let admin = PgPoolOptions::new().max_connections(1).connect_lazy(&url)?;
        Ok(Self { url, keep: args.keep, admin, used: Mutex::default() })
    }

    /// A table with `rows` old rows, all completed.
    pub async fn table(&self, name: &'static str, rows: u64, partitioned: bool) -> Result<Table, Failure> {
        let schema = schema(name);
        self.used.lock().expect("nothing panics while it is held").push(schema.clone());
        if self.keep && self.is_filled(&schema, rows).await? {
            let table = self.open(name, partitioned).await?;
            let known = table.number("SELECT coalesce(max(n), 0) FROM progress").await?;
            table.next.store(u64::try_from(known)?, Ordering::Relaxed);
            eprintln!("guard: using what is in {schema}");
            return Ok(table);
        }
        run(&self.admin, format!("DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}")).await?;
        let table = self.open(name, partitioned).await?;
        run(&table.pool, "CREATE TABLE invoices (id text NOT NULL); CREATE TABLE progress (n bigint)".into()).await?;
        table.fill(rows).await?;
        run(&self.admin, format!("COMMENT ON SCHEMA {schema} IS 'filled with {rows}'")).await?;
        Ok(table)
    }

    async fn is_filled(&self, schema: &str, rows: u64) -> Result<bool, Failure> {
        let comment: Option<String> =
            sqlx::query_scalar("SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = $1")
                .bind(schema)
                .fetch_optional(&self.admin)
                .await?
                .flatten();
        Ok(comment == Some(format!("filled with {rows}")))
    }

    async fn open(&self, name: &'static str, partitioned: bool) -> Result<Table, Failure> {
        let separator = if self.url.contains('?') { '&' } else { '?' };
        // Plain text, because the relay that counts statements reads it.
        let url = format!("{}{separator}sslmode=disable&options=-c%20search_path%3D{}", self.url, schema(name));
        let store = PgStore::connect(&url, &StoreOptions::default().partitioned(partitioned)).await?;
        store.migrate().await?;
        // Apart from the store's, which may be closed.
        let pool = PgPoolOptions::new().max_connections(4).connect_lazy(&url)?;
        Ok(Table { name, url, guard: Guard::new(Arc::new(store)), pool, next: AtomicU64::new(0) })
    }

    /// Drops what this run has used, unless it is to be kept. Others stay: filling them takes minutes.
    pub async fn drop_used(&self) -> Result<(), Failure> {
        let used = std::mem::take(&mut *self.used.lock().expect("nothing panics while it is held"));
        for schema in used.into_iter().filter(|_| !self.keep) {
            run(&self.admin, format!("DROP SCHEMA IF EXISTS {schema} CASCADE")).await?;
        }
        Ok(())
    }

    /// Writes all that is still in the server's memory, so that the next page images are due.
    pub async fn checkpoint(&self) -> Result<(), Failure> {
        run(&self.admin, "CHECKPOINT".into()).await
    }

    /// Bytes of write-ahead log so far.
    pub async fn wal(&self) -> Result<u64, Failure> {
        number(&self.admin, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
            .await?
            .try_into()
            .map_err(Into::into)
    }
}

fn schema(name: &str) -> String {
    format!("idem_guard_bench_{name}")
}

impl Table {
    pub fn bind(&self, kind: Kind) -> Result<Guarded, Failure> {
        Ok(kind.bind(&self.guard)?)
    }

    /// The numbers of `count` jobs that nobody has asked for.
    pub fn fresh(&self, count: u64) -> std::ops::Range<u64> {
        let first = self.next.fetch_add(count, Ordering::Relaxed);
        first..first + count
    }

    /// So that another run, which finds this table, asks for no key a second time.
    pub async fn note_progress(&self) -> Result<(), Failure> {
        let next = self.next.load(Ordering::Relaxed);
        run(&self.pool, format!("TRUNCATE progress; INSERT INTO progress VALUES ({next})")).await
    }

    /// Empties it and fills it again. The keys go on, so that none comes twice.
    pub async fn restore(&self, rows: u64) -> Result<(), Failure> {
        run(&self.pool, "TRUNCATE processed_jobs, invoices".into()).await?;
        self.fill(rows).await
    }

    /// Inserts rows as the guard would leave them, one by one in the order of no index.
    pub async fn fill(&self, rows: u64) -> Result<(), Failure> {
        let end = self.fresh(rows).end;
        let first = end - rows;
        let filler = async |place: u64| -> Result<(), Failure> {
            let mut chunk = first + place * CHUNK;
            while chunk < end {
                let last = (chunk + CHUNK).min(end) - 1;
                run(&self.pool, fill_text(chunk, last)).await?;
                if rows > 10 * CHUNK && (chunk / CHUNK).is_multiple_of(20) {
                    eprintln!("guard: filling {}, {} of {rows}", self.name, chunk - first);
                }
                chunk += FILLERS * CHUNK;
            }
            Ok(())
        };
        let fillers = (0..FILLERS).map(filler);
        futures_util::future::try_join_all(fillers).await?;
        let vacuum = if rows > 0 { "VACUUM (ANALYZE) processed_jobs" } else { "SELECT 1" };
        run(&self.pool, vacuum.into()).await
    }

    pub async fn number(&self, query: &str) -> Result<i64, Failure> {
        number(&self.pool, query).await
    }

    /// Bytes of the primary key, of all parts.
    pub async fn key_bytes(&self) -> Result<i64, Failure> {
        let query = "SELECT sum(pg_relation_size(i.indexrelid))::bigint FROM pg_index AS i
                     JOIN pg_class AS c ON c.oid = i.indrelid
                     WHERE i.indisprimary AND c.relname ~ '^processed_jobs' AND c.relnamespace = current_schema()::regnamespace";
        self.number(query).await
    }

    pub async fn row_count(&self) -> Result<i64, Failure> {
        self.number("SELECT count(*) FROM processed_jobs").await
    }

    pub async fn reindex(&self) -> Result<(), Failure> {
        run(&self.pool, "REINDEX TABLE processed_jobs".into()).await
    }
}

fn fill_text(first: u64, last: u64) -> String {
    format!(
        "BEGIN; SET LOCAL synchronous_commit = off;
         INSERT INTO processed_jobs (consumer_name, idempotency_key, status, token, fence, attempts, payload_hash, owner,
                                     message_id, created_at, updated_at, completed_at)
         SELECT '{CONSUMER}', {KEY}, 'COMPLETED', gen_random_uuid(), 1, 1, 'sha256:' || encode(sha256(n::text::bytea), 'hex'),
                'pid-1-filling', 'orders/' || n % 12 || '/' || n, now(), now(), now()
         FROM generate_series({first}, {last}) AS n; COMMIT"
    )
}

async fn run(pool: &PgPool, text: String) -> Result<(), Failure> {
    sqlx::raw_sql(AssertSqlSafe(text)).execute(pool).await?;
    Ok(())
}

async fn number(pool: &PgPool, query: &str) -> Result<i64, Failure> {
    Ok(sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_one(pool).await?)
}
