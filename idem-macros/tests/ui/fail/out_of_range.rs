use idem_macros::idempotent;

#[idempotent(
    key = "header:id",
    consumer = "invoice",
    lease = "299ms",
    max_run = "0s",
    attempts = 0,
    backoff = "1m..1s"
)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice", lease = "25h", max_run = "25h", attempts = 4294967296, backoff = "1s")]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
