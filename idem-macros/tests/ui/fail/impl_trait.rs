use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn issue_invoice(_event: impl Send, _list: Vec<(u8, impl Sync)>) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
