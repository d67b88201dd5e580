use idem_macros::idempotent;

#[derive(serde::Deserialize)]
#[allow(dead_code)]
struct OrderPaid {
    order_id: String,
    total: f64,
}

#[idempotent(key = "ordr_id", consumer = "invoice", fingerprint = ["total.amount"])]
async fn issue_invoice(_event: OrderPaid) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
