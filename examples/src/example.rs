//! What the shared parts need to know of one example.

use std::future::Future;

use chrono::{DateTime, Utc};
use idem_kafka::App;

use crate::failure::Failure;

/// An example's names and the shape of its events. Plain data.
#[derive(Clone, Copy, Debug)]
pub struct Example {
    /// The consumer's name, which is its group's default name too.
    pub consumer: &'static str,
    /// The topic it reads unless told otherwise.
    pub topic: &'static str,
    /// What its jobs are called in a table, such as `distinct orders`.
    pub jobs: &'static str,
    /// What its effects are called, such as `invoices`.
    pub effects: &'static str,
    /// Makes the message that asks for a job.
    pub write: fn(&Order) -> Message,
    /// Reads a message's value back; nothing if it is not one of this example's.
    pub read: fn(&[u8]) -> Option<Asked>,
}

/// What a plan knows of a job, before it becomes an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Which job this is.
    pub number: u64,
    /// Integer minor units.
    pub amount: i64,
    /// ISO 4217.
    pub currency: &'static str,
    /// Of the message, not of the job: a producer that tries again may stamp a new one.
    pub event_id: String,
    /// When it was paid.
    pub paid_at: DateTime<Utc>,
}

/// A record to produce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The record's key.
    pub key: String,
    /// The record's value.
    pub value: Vec<u8>,
}

/// What a message asks for, as far as a check must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Names the job.
    pub key: String,
    /// What to do.
    pub terms: Terms,
    /// Names the message.
    pub event_id: String,
}

/// What two messages must agree on to ask for the same: the fields of `fingerprint = […]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// Integer minor units.
    pub amount: i64,
    /// ISO 4217.
    pub currency: String,
}

/// One effect that is there: an invoice, a charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// Which job it belongs to.
    pub key: String,
    /// What was done.
    pub terms: Terms,
    /// What the other side answered, if there is one.
    pub receipt: Option<String>,
}

/// All effects that stand in one place.
#[derive(Clone, Debug)]
pub struct Effects {
    /// Such as `invoices`, or `charges in the gateway's ledger`.
    pub place: &'static str,
    /// Each of them.
    pub found: Vec<Effect>,
}

/// An example that can be run: its handler, with everything that the handler takes.
pub trait Attach {
    /// Gives `topic` to the example's handler.
    fn attach(&self, app: App, topic: &str) -> App;
}

/// Reads back what an example did, with plain SQL and plain files.
pub trait ReadBack {
    /// Every place in which each job must have exactly one effect. The first is the one the table shows.
    ///
    /// # Errors
    /// A place cannot be read.
    fn effects(&self) -> impl Future<Output = Result<Vec<Effects>, Failure>>;
}
