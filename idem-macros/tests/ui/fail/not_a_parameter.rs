use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn issue_invoice(_event: String, _gateway: u8) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
