use idem_macros::idempotent;

#[idempotent(
    key = ["", "order..id", ".id", "order id", "order_id()", "header:", "ce:id", "header:id", "header:id"],
    consumer = "invoice"
)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = [], consumer = "invoice")]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
