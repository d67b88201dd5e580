//! The event that asks for an invoice.

use idem_examples::example::{Asked, Example, Message, Order, Terms};
use serde::{Deserialize, Serialize};

/// An order was paid.
#[derive(Debug, Serialize, Deserialize)]
pub struct OrderPaid {
    /// Names the job: one order, one invoice.
    pub order_id: String,
    /// Integer minor units.
    pub amount: i64,
    /// ISO 4217.
    pub currency: String,
    /// Names the message, not the job: a producer that tries again may stamp a new one.
    pub event_id: String,
    /// When it was paid, in RFC 3339. Not every producer says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paid_at: Option<String>,
}

/// What this example is called, and how its messages are written and read.
pub const EXAMPLE: Example =
    Example { consumer: "invoice", topic: "orders.paid", jobs: "distinct orders", effects: "invoices", write, read };

fn write(order: &Order) -> Message {
    let event = OrderPaid {
        order_id: format!("A-{}", order.number),
        amount: order.amount,
        currency: order.currency.to_owned(),
        event_id: order.event_id.clone(),
        paid_at: Some(order.paid_at.to_rfc3339()),
    };
    Message { value: serde_json::json!(event).to_string().into_bytes(), key: event.order_id }
}

fn read(value: &[u8]) -> Option<Asked> {
    let OrderPaid { order_id, amount, currency, event_id, .. } = serde_json::from_slice(value).ok()?;
    Some(Asked { key: order_id, terms: Terms { amount, currency }, event_id })
}
