//! What was done, read back from both places: the gateway's ledger and the payments' table.

use std::path::PathBuf;

use idem_examples::database::{Database, Query};
use idem_examples::example::{Effect, Effects, ReadBack, Terms};
use idem_examples::failure::{Failure, MISUSED};

use crate::events::job;
use crate::gateway::read_ledger;

const ALL: Query = Query {
    text: "SELECT payment_id || '/' || kind, amount, currency, receipt FROM payments",
    mysql: "SELECT CONVERT(CONCAT(payment_id, '/', kind) USING utf8mb4), amount, currency, receipt FROM payments",
};

/// The two places.
pub struct Places {
    /// The gateway's ledger.
    pub ledger: PathBuf,
    /// Where the table is.
    pub database: Database,
}

impl ReadBack for Places {
    async fn effects(&self) -> Result<Vec<Effects>, Failure> {
        let unreadable = |error: std::io::Error| {
            Failure::new(MISUSED, format!("the ledger {} cannot be read: {error}", self.ledger.display()))
        };
        // By payment, not by idempotency key: a second charge under another key must be seen.
        let charges = read_ledger(&self.ledger).map_err(unreadable)?.into_iter().map(|entry| Effect {
            key: job(&entry.charge.payment_id, &entry.charge.kind),
            terms: Terms { amount: entry.charge.amount, currency: entry.charge.currency },
            receipt: Some(entry.receipt.number),
        });
        let charges = charges.collect();
        let rows = self.database.effects(ALL).await?;
        Ok(vec![
            Effects { place: "charges in the ledger", found: charges },
            Effects { place: "rows in payments", found: rows },
        ])
    }
}
