use idem_macros::idempotent;

use idem_core::Job;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn one(_event: String, _jobs: &[Job]) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice")]
async fn many(_events: Vec<String>, _job: &Job) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
