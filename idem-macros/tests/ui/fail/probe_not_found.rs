use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "payment", probe = setled)]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "payment", probe = "probes::settled")]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
