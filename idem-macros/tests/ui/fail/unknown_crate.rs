use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice", crate = idem_kore)]
async fn issue_invoice(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
