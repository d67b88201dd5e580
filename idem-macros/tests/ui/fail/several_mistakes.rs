use idem_macros::idempotent;

#[idempotent(key = "order..id", consumr = "invoice", lease = "2", attempts = 0)]
fn issue_invoice<T>(_tx: &mut T) {}

fn main() {}
