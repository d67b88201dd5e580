use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice", lease = "2", max_run = "5 minutes", backoff = "1s..")]
async fn issue_invoice(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
