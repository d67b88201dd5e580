use idem_macros::Classify;

#[derive(Classify)]
enum InvoiceError {
    #[classify(terminal)]
    Io(#[classify(inner)] std::io::Error),
    #[classify(terminal, crate = idem_core)]
    NoRates,
}

#[derive(Classify)]
union Either {
    _one: u8,
}

fn main() {}
