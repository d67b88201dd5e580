use idem_macros::idempotent;

#[idempotent(
    key = 5,
    consumer = invoice,
    attempts = "5",
    lease = 120,
    max_run = 5m,
    backoff = ["100ms", "1m"],
    fingerprint = true,
    domain_unique = uq_invoices,
    crate = "idem_core"
)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice", attempts = -1)]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
