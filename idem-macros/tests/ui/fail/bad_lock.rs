use idem_macros::idempotent;

#[derive(serde::Deserialize)]
struct Booking {
    account_id: u64,
    amount: f64,
}

#[idempotent(key = "account_id", consumer = "ledger", lock = ["account_id", "account_id", "kafka:offset", "ce:id", ""])]
async fn handler_1(_event: Booking) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "account_id", consumer = "ledger", lock = [])]
async fn handler_2(_event: Booking) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "account_id", consumer = "ledger", lock = ["amount", "acount_id"])]
async fn handler_3(_event: Booking) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
