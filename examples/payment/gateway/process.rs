//! The gateway as a process of its own, started by the demonstration.

use std::path::Path;

use idem_examples::failure::{FAILED, Failure};
use idem_examples::workers::this_program;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use super::faults::Faults;

/// A running gateway. Dropping it ends it.
pub struct GatewayProcess {
    _child: Child,
    url: String,
}

impl GatewayProcess {
    /// Starts it on a free port.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start(ledger: &Path, faults: &Faults, seed: u64) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::io("the gateway cannot be started", &error);
        let mut command = this_program().map_err(failed)?;
        command
            .args(["gateway", "--until-stdin-ends", "--seed", &seed.to_string(), "--ledger"])
            .arg(ledger)
            .args(faults.arguments());
        let mut child = command.spawn().map_err(failed)?;
        let mut url = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut url).await.map_err(failed)?;
        }
        match url.trim() {
            "" => Err(Failure::new(FAILED, "the gateway ended by itself")),
            url => Ok(Self { url: url.to_owned(), _child: child }),
        }
    }

    /// Where it listens.
    pub fn url(&self) -> &str {
        &self.url
    }
}
