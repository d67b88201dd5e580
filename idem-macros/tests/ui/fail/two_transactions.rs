use idem_macros::idempotent;

use idem_core::store::Tx;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn issue_invoice(_event: String, _tx: &mut Tx, _other: &mut Tx) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
