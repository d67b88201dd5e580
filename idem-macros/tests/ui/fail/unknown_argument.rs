use idem_macros::idempotent;

#[idempotent(key = "header:id", consumr = "invoice")]
async fn issue_invoice(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice", topic = "orders.paid")]
async fn with_topic(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

/// Code that uses the handler shows no errors of its own.
fn main() {
    fn handle(_: impl idem_core::Handler) {}
    handle(issue_invoice);
    drop(with_topic::body(String::new()));
}
