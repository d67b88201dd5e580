//! The event that asks for a payment.

use idem_examples::example::{Asked, Example, Message, Order, Terms};
use serde::{Deserialize, Serialize};

/// A payment is to be made.
#[derive(Debug, Serialize, Deserialize)]
pub struct PaymentRequested {
    /// Names the payment.
    pub payment_id: String,
    /// What for: a payment can be settled once and refunded once.
    pub kind: String,
    /// Integer minor units.
    pub amount: i64,
    /// ISO 4217.
    pub currency: String,
    /// Names the message, not the job: a producer that tries again may stamp a new one.
    pub event_id: String,
}

/// What this example is called, and how its messages are written and read.
pub const EXAMPLE: Example = Example {
    consumer: "payment",
    topic: "payments.requested",
    jobs: "distinct payments",
    effects: "charges",
    write,
    read,
};

fn write(order: &Order) -> Message {
    let event = PaymentRequested {
        payment_id: format!("P-{}", order.number),
        kind: "settlement".to_owned(),
        amount: order.amount,
        currency: order.currency.to_owned(),
        event_id: order.event_id.clone(),
    };
    Message { value: serde_json::json!(event).to_string().into_bytes(), key: event.payment_id }
}

fn read(value: &[u8]) -> Option<Asked> {
    let PaymentRequested { payment_id, kind, amount, currency, event_id } = serde_json::from_slice(value).ok()?;
    let key = if payment_id.is_empty() || kind.is_empty() { String::new() } else { job(&payment_id, &kind) };
    Some(Asked { key, terms: Terms { amount, currency }, event_id })
}

/// The name of the job in tables and findings.
pub fn job(payment_id: &str, kind: &str) -> String {
    format!("{payment_id}/{kind}")
}
