use idem_core::Probe;
use idem_macros::idempotent;

async fn boolean(_event: &String) -> bool {
    true
}

async fn unclassified(_event: &String) -> Result<Probe, std::fmt::Error> {
    Ok(Probe::Done)
}

fn not_async(_event: &String) -> Probe {
    Probe::Done
}

#[idempotent(key = "header:id", consumer = "payment", probe = boolean)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = unclassified)]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = not_async)]
async fn handler_3(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
