use idem_macros::Classify;

#[derive(Classify)]
enum InvoiceError {
    #[classify(transient, terminal)]
    NoRates,
    #[classify(inner)]
    #[classify(terminal)]
    NoLines,
}

fn main() {}
