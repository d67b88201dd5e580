//! The guard of idem: a job named by consumer and key takes effect once, however often it is asked for.
//!
//! This crate knows no broker. `idem-kafka` feeds it from Kafka; an HTTP handler or a scheduled job can use it as it is:
//!
//! ```
//! use std::sync::Arc;
//! use idem_core::store::MemoryStore;
//! use idem_core::{DuplicateKind, Guard, Outcome, RunGuarded, idempotent};
//!
//! #[derive(serde::Serialize, serde::Deserialize)]
//! struct Welcome {
//!     customer_id: String,
//! }
//!
//! #[idempotent(key = "customer_id", consumer = "welcome-mail")]
//! async fn send_welcome(event: Welcome) -> Result<(), std::io::Error> {
//!     println!("welcome, {}", event.customer_id);
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let guard = Guard::new(Arc::new(MemoryStore::default()));
//! let welcome = || Welcome { customer_id: "C-1".to_owned() };
//!
//! let first = send_welcome.run(&guard, welcome()).await?;
//! assert!(matches!(*first, Outcome::Completed { attempt: 1, .. }));
//! let second = send_welcome.run(&guard, welcome()).await?;
//! assert!(matches!(*second, Outcome::Duplicate(DuplicateKind::Producer)));
//! # Ok(())
//! # }
//! ```
//!
//! # How it is built
//! [`machine`] decides: plain functions over plain values. A [`store::Store`] keeps the rows and asks the machine.
//! [`run`] orders the steps from a delivered message to its outcome. `#[idempotent]` makes a function a [`Handler`].
//!
//! # Features
//! | feature | adds |
//! |---|---|
//! | `macros` (default) | `#[idempotent]` and `#[derive(Classify)]` |
//! | `postgres` | `store::postgres::PgStore` |
//! | `mysql` | `store::mysql::MysqlStore`, for MariaDB and MySQL |
//! | `sqlite` | `store::sqlite::SqliteStore` |
//! | `test-util` | the contract suite for stores, and crash points that tests can set by environment |

#[doc(hidden)]
pub mod __private;
mod clock;
mod delivery;
mod fingerprint;
mod handler;
mod json;
mod key;
pub mod machine;
mod policy;
pub mod run;
pub mod store;
mod timestamp;

pub use clock::{Clock, ManualClock, SystemClock};
pub use delivery::{Delivery, Payload, REPLAYED_BY, Rejection};
pub use fingerprint::{Fingerprint, FingerprintError, FingerprintParseError};
pub use handler::{
    Call, Classify, CompleteError, Disposition, FailureKind, Handler, HandlerFailure, HeaderList, Headers, IntoOutcome,
    IntoProbe, Job, MAX_ERROR_BYTES, MAX_RESULT_BYTES, Mode, OnConflict, Output, Parameter, Probe, Requirements, Spec,
    State, States, Transactional, UniqueViolation,
};
pub use key::{
    ConsumerName, ConsumerNameError, EventKey, KeyBuilder, KeyError, KeyField, LockName, MAX_CONSUMER_CHARS,
    MAX_KEY_CHARS,
};
pub use policy::{Backoff, MAX_LEASE, MIN_LEASE, Policy, PolicyError};
pub use run::{
    AlreadyDone, DuplicateKind, Guard, Guarded, Outcome, Ran, Report, RunError, RunGuarded, SetupError, Undecided,
};
pub use timestamp::Timestamp;

#[cfg(feature = "macros")]
#[doc(inline)]
pub use idem_macros::{Classify, idempotent};
