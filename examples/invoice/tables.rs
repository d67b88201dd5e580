//! The application's own table. The second protection is its UNIQUE constraint: it refuses a second invoice even if the
//! guard's rows are lost.

use idem_examples::database::{Database, Query, Table};
use idem_examples::example::{Effects, ReadBack};
use idem_examples::failure::Failure;

/// One row per invoice.
pub const INVOICES: Table = Table {
    name: "invoices",
    postgres: "
        CREATE TABLE IF NOT EXISTS invoices (
            order_id   text        NOT NULL CONSTRAINT uq_invoices_order_id UNIQUE,
            amount     bigint      NOT NULL,
            currency   text        NOT NULL,
            event_id   text        NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now()
        )",
    // Bytes, for no collation may make two orders one.
    mysql: "
        CREATE TABLE IF NOT EXISTS invoices (
            order_id   varbinary(1020) NOT NULL,
            amount     bigint          NOT NULL,
            currency   varchar(16)     NOT NULL,
            event_id   varchar(255)    NOT NULL,
            created_at timestamp       NOT NULL DEFAULT CURRENT_TIMESTAMP,
            CONSTRAINT uq_invoices_order_id UNIQUE (order_id)
        ) CHARACTER SET utf8mb4",
    sqlite: "
        CREATE TABLE IF NOT EXISTS invoices (
            order_id   text    NOT NULL CONSTRAINT uq_invoices_order_id UNIQUE,
            amount     integer NOT NULL,
            currency   text    NOT NULL,
            event_id   text    NOT NULL,
            created_at text    NOT NULL DEFAULT CURRENT_TIMESTAMP
        )",
};

const ALL: Query = Query {
    text: "SELECT order_id, amount, currency, NULL FROM invoices",
    mysql: "SELECT CONVERT(order_id USING utf8mb4), amount, currency, CAST(NULL AS CHAR) FROM invoices",
};

/// The table, read back.
pub struct Invoices(pub Database);

impl ReadBack for Invoices {
    async fn effects(&self) -> Result<Vec<Effects>, Failure> {
        let found = self.0.effects(ALL).await?;
        Ok(vec![Effects { place: "invoices", found }])
    }
}
