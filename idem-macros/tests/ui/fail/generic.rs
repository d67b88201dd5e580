use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn of_type<T>(_event: T) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice")]
async fn of_const<const N: usize>(_event: [u8; N]) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice")]
async fn of_lifetime<'a>(_event: String, _tx: &'a mut idem_core::store::Tx) -> Result<(), std::io::Error> {
    Ok(())
}

#[idempotent(key = "header:id", consumer = "invoice")]
async fn with_where(_event: String) -> Result<(), std::io::Error>
where
    String: Clone,
{
    Ok(())
}

fn main() {}
