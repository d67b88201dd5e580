use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "payment", probe = 5)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = settled())]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = "set tled")]
async fn handler_3(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
