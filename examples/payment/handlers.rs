//! The lines this example is about.

use idem_kafka::prelude::*;

use crate::events::PaymentRequested;
use crate::gateway::{Gateway, GatewayError};
use crate::payments::Payments;

/// Charges one payment through the gateway, and records its receipt.
///
/// Both effects are elsewhere, so no transaction can hold them together with the job. The job is held by a lease that is
/// renewed while this runs. If the worker dies after the charge, another one takes the job over and calls the gateway again
/// *under the same idempotency key*: the gateway answers with the receipt it gave before, and charges nothing.
#[idempotent(
    key = ["payment_id", "kind"],
    consumer = "payment",
    fingerprint = ["amount", "currency"],
    lease = "3s",
    attempts = 12,
    backoff = "100ms..2s"
)]
pub async fn settle_payment(
    event: PaymentRequested,
    job: &Job,
    gateway: State<Gateway>,
    payments: State<Payments>,
) -> Result<(), PaymentError> {
    let receipt = gateway.charge(&job.downstream_key("charge"), &event).await?;
    payments.record(&event, &receipt).await?;
    Ok(())
}

/// Why a payment is not settled yet.
#[derive(Debug, thiserror::Error, Classify)]
pub enum PaymentError {
    /// The gateway knows whether trying again is of use.
    #[error("the gateway did not charge")]
    #[classify(inner)]
    Gateway(#[from] GatewayError),
    /// The charge is done; the receipt is recorded by the next try.
    #[error("the receipt cannot be recorded")]
    #[classify(inner)]
    Database(#[from] sqlx::Error),
}
