use idem_core::{Job, Probe, State};
use idem_macros::idempotent;

async fn by_value(_event: String) -> Probe {
    Probe::NotDone
}

async fn other_order(_job: &Job, _event: &String) -> Probe {
    Probe::NotDone
}

async fn too_few(_event: &String) -> Probe {
    Probe::NotDone
}

#[idempotent(key = "header:id", consumer = "payment", probe = by_value)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = other_order)]
async fn handler_2(_event: String, _job: &Job) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = "too_few")]
async fn handler_3(_event: String, _gateway: State<u8>) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
