use idem_macros::idempotent;

struct Invoices;

impl Invoices {
    #[idempotent(key = "header:id", consumer = "invoice")]
    async fn issue(&self, _event: String) -> Result<(), std::io::Error> {
        Ok(())
    }
}

fn main() {}
