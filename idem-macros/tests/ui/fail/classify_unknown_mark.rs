use idem_macros::Classify;

#[derive(Classify)]
enum InvoiceError {
    #[classify(transiant)]
    NoRates,
    #[classify(retry = true)]
    NoLines,
    #[classify]
    Unpaid,
}

fn main() {}
