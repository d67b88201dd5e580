use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice", on_conflict = "dead-letter")]
async fn handler_1(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice", on_conflict = "overwrite")]
async fn handler_2(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice", on_conflict = skip)]
async fn handler_3(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {}
