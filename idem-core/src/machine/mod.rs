//! The state machine of one job, as plain functions over plain values.
//!
//! A job is one row, named by consumer and key. Everything that happens to it is an [`Input`]; [`step`] says what the row
//! becomes and what the caller must do. Stores read a row, ask [`step`], and write the answer only if the row is still
//! the one they read; so the same table drives memory, SQLite and PostgreSQL.
//!
//! ```text
//!             delivered                complete
//!   absent ───────────────▶ PROCESSING ─────────▶ COMPLETED
//!                           ▲   │  │
//!   RECEIVED ───────────────┘   │  │ fail (transient, tries left)
//!      ▲   delivered            │  ▼
//!      └──── release, expire ◀──┘  FAILED, due ──── delivered when due ──▶ PROCESSING
//!                                  FAILED, terminal or exhausted ── set aside
//! ```
//!
//! No SQL, no clock, no randomness and nothing asynchronous lives here: instants and tokens come in as values.

mod decision;
mod input;
mod lease;
mod retry;
mod state;
mod step;

pub use decision::{Decision, Run, RunKind, Transition};
pub use input::{Delivered, FailureCause, Input, OperatorAction, TryFailed};
pub use lease::RunDeadline;
pub use retry::backoff;
pub use state::{Failure, Record, State, StateKind, Token};
pub use step::{IllegalStep, step};
