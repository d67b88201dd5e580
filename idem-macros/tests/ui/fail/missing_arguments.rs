use idem_macros::idempotent;

#[idempotent]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id")]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent()]
async fn handler_3(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
