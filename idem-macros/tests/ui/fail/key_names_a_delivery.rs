use idem_macros::idempotent;

#[idempotent(key = ["kafka:offset", "topic/partition/offset"], consumer = "invoice")]
async fn issue_invoice(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
