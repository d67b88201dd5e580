use idem_core::Probe;
use idem_core::store::Tx;
use idem_macros::idempotent;

async fn settled(_event: &String) -> Probe {
    Probe::NotDone
}

#[idempotent(key = "header:id", consumer = "payment", probe = settled)]
async fn atomic(_event: String, _tx: &mut Tx) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = settled)]
async fn batch(_events: Vec<String>) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
