//! Keywords as names, a parameter of the handler's own name, patterns instead of names, and any order.

#![deny(warnings)]

use idem_core::store::Tx;
use idem_core::{Handler, Job, State};
use idem_macros::idempotent;

#[derive(serde::Deserialize)]
struct OrderPaid {
    r#type: String,
    order: Order,
}

#[derive(serde::Deserialize)]
struct Order(u64);

#[idempotent(key = ["type", "order.0"], consumer = "odd", fingerprint = r#type)]
async fn r#match(r#struct: OrderPaid) -> Result<(), std::io::Error> {
    let _ = (r#struct.r#type, r#struct.order.0);
    Ok(())
}

#[idempotent(key = "order.0", consumer = "odd")]
async fn event(event: OrderPaid) -> Result<(), std::io::Error> {
    drop(event);
    Ok(())
}

#[idempotent(key = "order.0", consumer = "odd")]
async fn patterns(
    _shared: State<u8>,
    _: &Job,
    tx: &mut Tx,
    OrderPaid { order: Order(number), .. }: OrderPaid,
    mut mutable: State<u16>,
) -> Result<(), std::io::Error> {
    mutable = mutable.clone();
    let _ = (number, tx, mutable);
    Ok(())
}

#[idempotent(key = "order.0", consumer = "odd")]
async fn body(call: OrderPaid) -> Result<(), std::io::Error> {
    drop(call);
    Ok(())
}

fn main() {
    assert_eq!(r#match::SPEC.name, "match");
    let _ = (r#match, event, patterns, body);
}
