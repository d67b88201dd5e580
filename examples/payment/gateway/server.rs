//! The gateway's server: `POST /charges` with an `Idempotency-Key`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use clap::Args;
use idem_examples::failure::{FAILED, Failure};
use idem_examples::run::when_stdin_ends;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::net::TcpListener;

use super::faults::{Fault, Faults};
use super::ledger::{Charge, Charged, Ledger};

/// Longer than any client waits. The connection's end ends the wait.
const NO_ANSWER: Duration = Duration::from_secs(600);

/// How to run the gateway.
#[derive(Args, Clone, Debug)]
pub struct ServeOptions {
    /// Where to listen; port 0 is any free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// File that keeps the charges, over restarts
    #[arg(long, value_name = "FILE")]
    pub ledger: PathBuf,
    /// Calls that go wrong.
    #[command(flatten)]
    pub faults: Faults,
    /// Another seed, other calls that go wrong
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// End when standard input ends
    #[arg(long)]
    pub until_stdin_ends: bool,
}

struct Shared {
    ledger: Mutex<Ledger>,
    faults: Faults,
    rng: Mutex<StdRng>,
}

/// Serves until it is killed. Prints its address as the first line of its output.
///
/// # Errors
/// The ledger or the address cannot be used.
pub async fn serve(options: ServeOptions) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(FAILED, format!("the gateway cannot listen: {error}"));
    let unusable = |error: std::io::Error| {
        Failure::new(FAILED, format!("the ledger {} cannot be used: {error}", options.ledger.display()))
    };
    let shared = Shared {
        ledger: Mutex::new(Ledger::open(&options.ledger).map_err(unusable)?),
        faults: options.faults,
        rng: Mutex::new(StdRng::seed_from_u64(options.seed)),
    };
    let listener = TcpListener::bind(options.listen).await.map_err(failed)?;
    println!("http://{}", listener.local_addr().map_err(failed)?);
    let router = Router::new().route("/charges", post(charge)).with_state(Arc::new(shared));
    let server = IntoFuture::into_future(axum::serve(listener, router));
    if options.until_stdin_ends {
        tokio::select! {
            served = server => served.map_err(failed),
            // At once: calls that are never answered would hold up an orderly end.
            () = when_stdin_ends().cancelled_owned() => Ok(()),
        }
    } else {
        server.await.map_err(failed)
    }
}

async fn charge(State(shared): State<Arc<Shared>>, headers: HeaderMap, Json(charge): Json<Charge>) -> Response {
    let key = headers.get("idempotency-key").and_then(|value| value.to_str().ok()).filter(|key| !key.is_empty());
    let Some(key) = key else {
        return (StatusCode::BAD_REQUEST, "Idempotency-Key is missing").into_response();
    };
    let fault = shared.faults.draw(&mut *shared.rng.lock().unwrap_or_else(PoisonError::into_inner));
    match fault {
        Fault::Unavailable => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Fault::SilentBeforeCharge => tokio::time::sleep(NO_ANSWER).await,
        Fault::None | Fault::SilentAfterCharge | Fault::Late(_) => {}
    }
    let charged = shared.ledger.lock().unwrap_or_else(PoisonError::into_inner).charge(key, charge);
    match fault {
        Fault::SilentAfterCharge => tokio::time::sleep(NO_ANSWER).await,
        Fault::Late(delay) => tokio::time::sleep(delay).await,
        Fault::None | Fault::SilentBeforeCharge | Fault::Unavailable => {}
    }
    match charged {
        Ok(Charged::Receipt(receipt)) => Json(receipt).into_response(),
        Ok(Charged::OtherCharge) => {
            (StatusCode::UNPROCESSABLE_ENTITY, "this Idempotency-Key was used for another charge").into_response()
        }
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    }
}
