//! The client of the gateway: one HTTP call, which never waits for longer than its time-out.

use std::time::Duration;

use idem_kafka::prelude::*;
use reqwest::StatusCode;

use super::ledger::{Charge, Receipt};
use crate::events::PaymentRequested;

/// Calls the gateway at one address.
#[derive(Clone)]
pub struct Gateway {
    charges: String,
    client: reqwest::Client,
}

/// Why there is no receipt.
#[derive(Debug, thiserror::Error, Classify)]
pub enum GatewayError {
    /// It may have charged or not. Only the same idempotency key makes another try safe.
    #[error("the gateway did not answer")]
    #[classify(transient)]
    NoAnswer(#[from] reqwest::Error),
    /// It did not charge.
    #[error("the gateway is not available: {0}")]
    #[classify(transient)]
    Unavailable(StatusCode),
    /// It will not charge.
    #[error("the gateway refused: {0} {1}")]
    #[classify(terminal)]
    Refused(StatusCode, String),
}

impl Gateway {
    /// Calls the gateway at `url`, such as `http://127.0.0.1:8080`, and waits for `timeout` at most.
    ///
    /// # Errors
    /// The client cannot be made.
    pub fn new(url: &str, timeout: Duration) -> Result<Self, reqwest::Error> {
        let client = reqwest::Client::builder().timeout(timeout).tcp_nodelay(true).build()?;
        Ok(Self { charges: format!("{}/charges", url.trim_end_matches('/')), client })
    }

    /// Charges once per `idempotency_key`, however often it is called.
    ///
    /// # Errors
    /// There is no receipt, and another try may be of use or not.
    pub async fn charge(&self, idempotency_key: &str, event: &PaymentRequested) -> Result<Receipt, GatewayError> {
        let charge = Charge {
            payment_id: event.payment_id.clone(),
            kind: event.kind.clone(),
            amount: event.amount,
            currency: event.currency.clone(),
        };
        let request = self.client.post(&self.charges).header("Idempotency-Key", idempotency_key).json(&charge);
        let answer = request.send().await?;
        match answer.status() {
            status if status.is_success() => Ok(answer.json().await?),
            status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                Err(GatewayError::Unavailable(status))
            }
            status => Err(GatewayError::Refused(status, answer.text().await.unwrap_or_default())),
        }
    }
}
