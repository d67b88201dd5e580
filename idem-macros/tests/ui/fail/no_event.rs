use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn nothing() -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice")]
async fn by_reference(_event: &String, _gateway: idem_core::State<u8>) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
