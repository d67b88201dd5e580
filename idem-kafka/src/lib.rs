//! Kafka consumers whose handlers take effect once, although messages arrive more than once.
//!
//! ```no_run
//! use idem_kafka::prelude::*;
//! use sqlx::PgConnection;
//!
//! #[derive(serde::Deserialize)]
//! struct OrderPaid {
//!     order_id: String,
//!     amount: i64,
//! }
//!
//! /// The invoice and the note that it was issued are committed together, or not at all.
//! #[idempotent(key = "order_id", consumer = "invoice")]
//! async fn issue_invoice(event: OrderPaid, tx: &mut PgConnection) -> Result<(), sqlx::Error> {
//!     sqlx::query("INSERT INTO invoices (order_id, amount) VALUES ($1, $2)")
//!         .bind(&event.order_id)
//!         .bind(event.amount)
//!         .execute(tx)
//!         .await?;
//!     Ok(())
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), idem_kafka::Error> {
//!     // IDEM__KAFKA__BROKERS, IDEM__KAFKA__GROUP, IDEM__STORE__URL
//!     App::from_env()?.handle("orders.paid", issue_invoice).run().await?;
//!     Ok(())
//! }
//! ```
//!
//! # What the runtime guarantees
//! - An offset moves only past messages whose outcome is durable: completed, a duplicate of a completed job, or set aside
//!   in an acknowledged dead letter. Everything else is delivered again.
//! - Messages of one key run one after another, in the order they came; a key that waits holds up no other.
//! - A store that is away costs no attempt and sets nothing aside: the consumer keeps its partitions and waits.
//! - Memory is bounded by [`App::run_ahead`] and [`App::run_ahead_bytes`], transactions by [`App::batch`], ending by
//!   [`App::drain_timeout`].
//!
//! # What becomes of bad messages
//! A body that is missing (a tombstone) or not the event, and a key that is missing, empty, too long or has a NUL, cannot ask
//! for a job: the record goes to the dead-letter topic with the reason, and its offset moves when that is acknowledged. So do
//! jobs that failed for good, and messages that use a key again for another payload. While the dead-letter topic is missing
//! or forbidden the record waits, with its key and its partition's offset; nothing is dropped.
//!
//! # Features
//! | feature | adds |
//! |---|---|
//! | `postgres` (default) | the PostgreSQL store |
//! | `mysql` | the store for MariaDB and MySQL |
//! | `sqlite` (default) | the SQLite store |
//! | `test-util` | crash points that tests can set by environment |

pub use idem_core as core;

mod app;
mod assignment;
mod careful;
mod config;
mod dead_letter;
mod decode;
mod dispatch;
pub mod embedded;
mod error;
mod flow;
mod offsets;
mod record;
mod runtime;
mod settings;
mod stats;

pub use app::App;
pub use config::{OnOffsetLost, Start};
pub use error::{Error, ErrorKind};
#[doc(inline)]
pub use idem_macros::{ClassifyKafka as Classify, idempotent_kafka as idempotent};
pub use settings::{KafkaSettings, LogSettings, PassThrough, Settings, Span, StoreSettings};
pub use stats::{Stats, Summary};

/// What a handler's author and a consumer's `main` need.
pub mod prelude {
    pub use idem_core::store::{Tx, sql};
    // The trait alone: `idem_core::Classify` is the derive too when another crate has turned its macros on.
    pub use idem_core::__private::Classify;
    pub use idem_core::{Disposition, Job, Outcome, RunGuarded, State};

    pub use crate::{App, Classify, Error, idempotent};
}

/// The README's code compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
