use idem_macros::Classify;

#[derive(Classify)]
enum InvoiceError {
    #[classify(transient)]
    NoRates,
    NoLines,
    Unpaid { order_id: String },
}

#[derive(Classify)]
struct Failed;

fn main() {}
