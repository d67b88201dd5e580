use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice", fingerprint = ["header:id", "customer..id"])]
async fn issue_invoice(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
