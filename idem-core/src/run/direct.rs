//! The guard without Kafka: for HTTP handlers, scheduled jobs and other queues.

use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use super::{Delivery, Guard, Guarded, Outcome, Rejection, SetupError, Undecided, jitter, short_id};
use crate::handler::Handler;

/// How often a job whose outcome is unknown is asked for again, to learn it.
const ASK_AGAIN: u32 = 3;
/// The longest wait before.
const PAUSE: Duration = Duration::from_millis(200);

/// Runs a handler behind a guard, without Kafka: for HTTP handlers, scheduled jobs and other queues.
pub trait RunGuarded: Handler {
    /// Asks for the job of `event` and runs the handler if it gets it.
    ///
    /// The outcome may be that somebody else has done, or is doing, the job; see [`Outcome`]. Whoever asks for a job that is
    /// done gets what its handler returned, if that was kept.
    ///
    /// # Errors
    /// The handler cannot work with this guard, or the event has no usable key.
    ///
    /// # Cancel safety
    /// As for [`Guarded::run`]: the row is as before, or as after; run it again.
    fn run<'a>(self, guard: &'a Guard, event: Self::Event) -> BoxFuture<'a, Result<Ran, RunError>>
    where
        Self::Event: Serialize,
    {
        async move {
            let guarded = guard.bind(self)?;
            let payload =
                serde_json::to_vec(&event).map_err(|error| Rejection::Undecodable { reason: error.to_string() })?;
            let message_id = Arc::from(format!("direct/{}", short_id()));
            let delivery = guarded.prepare(Some(Arc::new(payload)), &(), message_id)?;
            Ok(run(&guarded, delivery).await)
        }
        .boxed()
    }
}

impl<H: Handler> RunGuarded for H {}

/// How a job ended that was asked for directly, and what its handler returned. Dereferences to the outcome.
///
/// ```
/// use std::sync::Arc;
/// use idem_core::{Guard, Outcome, RunGuarded, idempotent};
/// use idem_core::store::MemoryStore;
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Payment { payment_id: String }
///
/// #[idempotent(key = "payment_id", consumer = "payment")]
/// async fn settle(payment: Payment) -> Result<String, std::convert::Infallible> {
///     Ok(format!("receipt of {}", payment.payment_id))
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let guard = Guard::new(Arc::new(MemoryStore::default()));
/// for _ in 0..2 {
///     let ran = settle.run(&guard, Payment { payment_id: "P-1".into() }).await?;
///     assert!(matches!(*ran, Outcome::Completed { .. } | Outcome::Duplicate(_)));
///     assert_eq!(ran.returned::<String>().transpose()?.as_deref(), Some("receipt of P-1"));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Ran {
    /// How it ended.
    pub outcome: Outcome,
    returned: Option<Vec<u8>>,
}

impl Ran {
    /// What the handler returned, by this run or an earlier one. Nothing if the job is not completed, if the handler returns
    /// no value, if an earlier value was too long to be kept (see [`MAX_RESULT_BYTES`](crate::MAX_RESULT_BYTES)), or if the
    /// store did not answer when it was asked for.
    ///
    /// # Errors
    /// What was kept is no `T`: the handler's type has changed since.
    pub fn returned<T: DeserializeOwned>(&self) -> Option<Result<T, serde_json::Error>> {
        Some(serde_json::from_slice(self.returned.as_deref()?))
    }
}

impl Deref for Ran {
    type Target = Outcome;

    fn deref(&self) -> &Outcome {
        &self.outcome
    }
}

/// The job was not asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The handler cannot work with this guard.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The event cannot ask for a job.
    #[error(transparent)]
    Rejected(#[from] Rejection),
}

async fn run(guarded: &Guarded, delivery: Delivery) -> Ran {
    let key = delivery.key().clone();
    let mut next = Some(delivery);
    let mut outcome = Outcome::Undecided(Undecided::Cancelled);
    for times in 0..ASK_AGAIN {
        let Some(delivery) = next.take() else { break };
        if times > 0 {
            jitter(PAUSE).await;
        }
        let decided = Mutex::new(None);
        let report = |delivery: Delivery, outcome: Outcome| {
            *decided.lock().expect("nothing panics while it is held") = Some((delivery, outcome));
        };
        guarded.run(vec![delivery], &CancellationToken::new(), &report).await;
        let Some((delivery, decided)) = decided.into_inner().expect("nothing panics while it is held") else { break };
        // With the same claim: if its commit went through and only the reply was lost, this is how it is learnt.
        if matches!(decided, Outcome::Undecided(Undecided::Unavailable(_) | Undecided::Contention(_))) {
            next = Some(delivery);
        }
        outcome = decided;
    }
    let returned = match &outcome {
        Outcome::Completed { output: Some(output), .. } => output.as_json().map(<[u8]>::to_vec),
        Outcome::Completed { output: None, .. } | Outcome::Duplicate(_) => guarded.stored_result(&key).await,
        _ => None,
    };
    Ran { outcome, returned }
}
