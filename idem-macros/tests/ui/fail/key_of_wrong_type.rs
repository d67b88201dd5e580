use idem_macros::idempotent;

#[derive(serde::Deserialize)]
#[allow(dead_code)]
struct OrderPaid {
    order_id: String,
    total: f64,
}

#[idempotent(key = ["order_id", "total"], consumer = "invoice")]
async fn issue_invoice(_event: OrderPaid) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
