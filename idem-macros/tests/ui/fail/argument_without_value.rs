use idem_macros::idempotent;

#[idempotent(key, consumer("invoice"), lease =)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent("order_id", consumer = "invoice")]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
