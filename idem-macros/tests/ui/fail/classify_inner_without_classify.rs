use idem_macros::Classify;

#[derive(Classify)]
#[classify(inner)]
struct Failed(std::fmt::Error);

fn main() {}
