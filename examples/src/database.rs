//! The application's own database, on any engine, by plain SQL.

use std::str::FromStr;
use std::time::Duration;

use idem_kafka::Settings;
use sqlx::mysql::{MySqlConnectOptions, MySqlPool, MySqlPoolOptions};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions};

use crate::example::{Effect, Terms};
use crate::failure::{Failure, MISUSED};

/// Another process may hold SQLite's write lock for a while.
const BUSY: Duration = Duration::from_secs(30);
const OPEN_TRIES: u32 = 50;
const OPEN_PAUSE: Duration = Duration::from_millis(100);
const SQLITE_BUSY: i32 = 5;
/// Names the lock under which tables are created.
const CREATING: i64 = 0x1de3_c0de;

/// A table of the application, for each engine.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Its name.
    pub name: &'static str,
    /// `CREATE TABLE IF NOT EXISTS …`
    pub postgres: &'static str,
    /// The same for MariaDB and MySQL.
    pub mysql: &'static str,
    /// The same for SQLite.
    pub sqlite: &'static str,
}

/// Reads all effects: their key, amount, currency and receipt.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// For PostgreSQL and SQLite.
    pub text: &'static str,
    /// For MariaDB and MySQL, where keys are bytes.
    pub mysql: &'static str,
}

/// A pool of connections.
#[derive(Clone, Debug)]
pub enum Database {
    /// To PostgreSQL.
    Postgres(PgPool),
    /// To MariaDB or MySQL.
    Mysql(MySqlPool),
    /// To SQLite.
    Sqlite(SqlitePool),
}

impl Database {
    /// Connects to where a consumer with these settings keeps its rows.
    ///
    /// # Errors
    /// Nothing is set, or it cannot be reached.
    pub async fn of(settings: &Settings) -> Result<Self, Failure> {
        let url = settings.store.url()?;
        let unset = || Failure::new(MISUSED, "`store.url` is not set: set IDEM__STORE__URL");
        Self::connect(&url.ok_or_else(unset)?).await
    }

    /// Connects to `postgres://…`, `mysql://…` or `sqlite://…`. A SQLite file that is not there is made.
    ///
    /// # Errors
    /// The URL is none of them, or the database cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, Failure> {
        let attempt = "the application's database cannot be opened";
        let failed = |error| Failure::sql(attempt, error);
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            let options = PgConnectOptions::from_str(url).map_err(failed)?;
            let pool = PgPoolOptions::new().max_connections(16).acquire_timeout(Duration::from_secs(10));
            Ok(Self::Postgres(pool.connect_with(options).await.map_err(failed)?))
        } else if url.starts_with("mysql://") || url.starts_with("mariadb://") {
            let options = MySqlConnectOptions::from_str(url).map_err(failed)?.charset("utf8mb4");
            let pool = MySqlPoolOptions::new().max_connections(16).acquire_timeout(Duration::from_secs(10));
            Ok(Self::Mysql(pool.connect_with(options).await.map_err(failed)?))
        } else if url.starts_with("sqlite:") {
            let options = SqliteConnectOptions::from_str(url).map_err(failed)?;
            Ok(Self::Sqlite(open(options.create_if_missing(true).busy_timeout(BUSY)).await?))
        } else {
            Err(Failure::new(MISUSED, "a database's URL begins with postgres://, mysql:// or sqlite://"))
        }
    }

    /// Creates `table` unless it is there. Safe when several workers start at once.
    ///
    /// # Errors
    /// The database refuses.
    pub async fn create(&self, table: &Table) -> Result<(), Failure> {
        let created = match self {
            Self::Postgres(pool) => create_on_postgres(pool, table).await,
            Self::Mysql(pool) => sqlx::query(table.mysql).execute(pool).await.map(drop),
            Self::Sqlite(pool) => sqlx::query(table.sqlite).execute(pool).await.map(drop),
        };
        created.map_err(|error| Failure::sql(&format!("the table {} cannot be created", table.name), error))
    }

    /// Reads all effects.
    ///
    /// # Errors
    /// The database refuses.
    pub async fn effects(&self, query: Query) -> Result<Vec<Effect>, Failure> {
        type Row = (String, i64, String, Option<String>);
        let rows: Result<Vec<Row>, _> = match self {
            Self::Postgres(pool) => sqlx::query_as(query.text).fetch_all(pool).await,
            Self::Mysql(pool) => sqlx::query_as(query.mysql).fetch_all(pool).await,
            Self::Sqlite(pool) => sqlx::query_as(query.text).fetch_all(pool).await,
        };
        let rows = rows.map_err(|error| Failure::sql("the effects cannot be read", error))?;
        let effect = |(key, amount, currency, receipt)| Effect { key, terms: Terms { amount, currency }, receipt };
        Ok(rows.into_iter().map(effect).collect())
    }
}

/// While one process switches the journal of a new file, others that open it are refused without waiting.
async fn open(options: SqliteConnectOptions) -> Result<SqlitePool, Failure> {
    let options = options.journal_mode(SqliteJournalMode::Wal);
    // SQLite has one writer at a time: a second connection would only wait in a worse queue.
    let pool = || SqlitePoolOptions::new().max_connections(1).acquire_timeout(BUSY).test_before_acquire(false);
    let mut tries = 0;
    loop {
        tries += 1;
        match pool().connect_with(options.clone()).await {
            Ok(pool) => return Ok(pool),
            Err(error) if tries < OPEN_TRIES && is_busy(&error) => tokio::time::sleep(OPEN_PAUSE).await,
            Err(error) => {
                let path = options.get_filename().display();
                return Err(Failure::new(MISUSED, format!("the SQLite file {path} cannot be opened: {error}")));
            }
        }
    }
}

fn is_busy(error: &sqlx::Error) -> bool {
    // The low byte is the kind, the others say more about it.
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<i32>().ok());
    code.is_some_and(|code| code & 0xff == SQLITE_BUSY)
}

/// `IF NOT EXISTS` alone can fail when two sessions create a table at once: both look, then both insert into the catalogue.
async fn create_on_postgres(pool: &PgPool, table: &Table) -> Result<(), sqlx::Error> {
    let mut tx = pool.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(CREATING).execute(&mut *tx).await?;
    sqlx::query(table.postgres).execute(&mut *tx).await?;
    tx.commit().await
}
