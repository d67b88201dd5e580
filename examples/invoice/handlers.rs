//! The lines this example is about.

use idem_kafka::core::store::Engine;
use idem_kafka::prelude::*;
use sqlx::PgConnection;

use crate::events::OrderPaid;

/// Issues one invoice per order.
///
/// `tx` holds the claim of the job, this invoice, and the job's completion: they commit together, or not at all. Two
/// messages ask for the same if they agree on the fields of `fingerprint`; a message with the order's key and another
/// amount goes to the dead-letter topic. `domain_unique` names the table's own constraint, as PostgreSQL and as SQLite tell
/// it: should it refuse an invoice, the invoice is there already, and the job is done.
#[idempotent(
    key = "order_id",
    consumer = "invoice",
    fingerprint = ["amount", "currency"],
    domain_unique = ["uq_invoices_order_id", "invoices.order_id"]
)]
pub async fn issue_invoice(event: OrderPaid, tx: &mut Tx) -> Result<(), InvoiceError> {
    let invoice = sql("INSERT INTO invoices (order_id, amount, currency, event_id) VALUES ($1, $2, $3, $4)")
        .bind(&event.order_id)
        .bind(event.amount)
        .bind(&event.currency)
        .bind(&event.event_id);
    tx.execute(invoice).await?;
    Ok(())
}

/// The same for all fresh orders of a batch at once, in one statement: for topics with a backlog.
#[idempotent(
    key = "order_id",
    consumer = "invoice",
    fingerprint = ["amount", "currency"],
    domain_unique = ["uq_invoices_order_id", "invoices.order_id"]
)]
pub async fn issue_invoices(events: Vec<OrderPaid>, tx: &mut Tx) -> Result<(), InvoiceError> {
    match tx.engine() {
        Engine::Mysql => insert_on_mysql(&events, tx).await?,
        Engine::Sqlite => insert_on_sqlite(&events, tx).await?,
        _ => insert_on_postgres(&events, tx).await?,
    }
    Ok(())
}

/// Why there is no invoice yet.
#[derive(Debug, thiserror::Error, Classify)]
pub enum InvoiceError {
    /// The database tells whether trying again is of use: it is for a lost connection, not for a violated constraint.
    #[error("the invoice cannot be written")]
    #[classify(inner)]
    Database(#[from] sqlx::Error),
}

/// One array per column.
async fn insert_on_postgres(events: &[OrderPaid], tx: &mut Tx) -> Result<(), sqlx::Error> {
    let Some(connection) = tx.connection::<PgConnection>() else {
        return Err(sqlx::Error::Configuration("the invoices are on PostgreSQL, MySQL or SQLite".into()));
    };
    let texts = |column: fn(&OrderPaid) -> &str| events.iter().map(column).collect::<Vec<_>>();
    sqlx::query(
        "INSERT INTO invoices (order_id, amount, currency, event_id)
         SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[])",
    )
    .bind(texts(|event| &event.order_id))
    .bind(events.iter().map(|event| event.amount).collect::<Vec<_>>())
    .bind(texts(|event| &event.currency))
    .bind(texts(|event| &event.event_id))
    .execute(connection)
    .await?;
    Ok(())
}

/// MariaDB and MySQL have no arrays, but they read JSON.
async fn insert_on_mysql(events: &[OrderPaid], tx: &mut Tx) -> Result<(), sqlx::Error> {
    let invoices = sql("INSERT INTO invoices (order_id, amount, currency, event_id)
         SELECT CONVERT(order_id USING utf8mb4), amount, currency, event_id
         FROM JSON_TABLE($1, '$[*]' COLUMNS (
             order_id VARCHAR(255) CHARACTER SET utf8mb4 PATH '$.order_id', amount BIGINT PATH '$.amount',
             currency VARCHAR(16) PATH '$.currency', event_id VARCHAR(255) PATH '$.event_id')) AS e")
    .bind(serde_json::json!(events).to_string());
    tx.execute(invoices).await?;
    Ok(())
}

/// SQLite has no arrays, but it reads JSON.
async fn insert_on_sqlite(events: &[OrderPaid], tx: &mut Tx) -> Result<(), sqlx::Error> {
    let invoices = sql("INSERT INTO invoices (order_id, amount, currency, event_id)
         SELECT value ->> 'order_id', value ->> 'amount', value ->> 'currency', value ->> 'event_id'
         FROM json_each($1)")
    .bind(serde_json::json!(events).to_string());
    tx.execute(invoices).await?;
    Ok(())
}
