use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn issue_invoice(_event: String) {}

fn main() {}
