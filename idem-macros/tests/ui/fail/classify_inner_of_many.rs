use idem_macros::Classify;

#[derive(Classify)]
#[classify(inner)]
enum InvoiceError {
    NoRates,
    Database(std::io::Error, u8),
    Io(std::io::Error),
}

fn main() {}
