//! The payments' own table, in a database that need not be the guard's.

use idem_examples::database::{Database, Table};

use crate::events::PaymentRequested;
use crate::gateway::Receipt;

/// One row per payment and kind.
pub const PAYMENTS: Table = Table {
    name: "payments",
    postgres: "
        CREATE TABLE IF NOT EXISTS payments (
            payment_id text        NOT NULL,
            kind       text        NOT NULL,
            amount     bigint      NOT NULL,
            currency   text        NOT NULL,
            receipt    text        NOT NULL,
            event_id   text        NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT uq_payments UNIQUE (payment_id, kind)
        )",
    // Bytes, for no collation may make two payments one.
    mysql: "
        CREATE TABLE IF NOT EXISTS payments (
            payment_id varbinary(1020) NOT NULL,
            kind       varbinary(255)  NOT NULL,
            amount     bigint          NOT NULL,
            currency   varchar(16)     NOT NULL,
            receipt    varchar(255)    NOT NULL,
            event_id   varchar(255)    NOT NULL,
            created_at timestamp       NOT NULL DEFAULT CURRENT_TIMESTAMP,
            CONSTRAINT uq_payments UNIQUE (payment_id, kind)
        ) CHARACTER SET utf8mb4",
    sqlite: "
        CREATE TABLE IF NOT EXISTS payments (
            payment_id text    NOT NULL,
            kind       text    NOT NULL,
            amount     integer NOT NULL,
            currency   text    NOT NULL,
            receipt    text    NOT NULL,
            event_id   text    NOT NULL,
            created_at text    NOT NULL DEFAULT CURRENT_TIMESTAMP,
            CONSTRAINT uq_payments UNIQUE (payment_id, kind)
        )",
};

/// A try that was repeated after its insert finds its own row.
const RECORD: &str = "
    INSERT INTO payments (payment_id, kind, amount, currency, receipt, event_id) VALUES ($1, $2, $3, $4, $5, $6)
    ON CONFLICT (payment_id, kind) DO NOTHING";

/// Not `INSERT IGNORE`, which would hide other errors, too.
const RECORD_ON_MYSQL: &str = "
    INSERT INTO payments (payment_id, kind, amount, currency, receipt, event_id) VALUES (?, ?, ?, ?, ?, ?)
    ON DUPLICATE KEY UPDATE kind = payments.kind";

/// The table, for the handler.
#[derive(Clone)]
pub struct Payments(pub Database);

impl Payments {
    /// Records what the gateway answered.
    ///
    /// # Errors
    /// The database refuses.
    pub async fn record(&self, event: &PaymentRequested, receipt: &Receipt) -> Result<(), sqlx::Error> {
        macro_rules! record {
            ($text:expr, $pool:expr) => {
                sqlx::query($text)
                    .bind(&event.payment_id)
                    .bind(&event.kind)
                    .bind(event.amount)
                    .bind(&event.currency)
                    .bind(&receipt.number)
                    .bind(&event.event_id)
                    .execute($pool)
                    .await
                    .map(drop)
            };
        }
        match &self.0 {
            Database::Postgres(pool) => record!(RECORD, pool),
            Database::Mysql(pool) => record!(RECORD_ON_MYSQL, pool),
            Database::Sqlite(pool) => record!(RECORD, pool),
        }
    }
}
