//! Inside a function, inside private modules, and calling itself by its own name.

#![deny(warnings)]

use idem_macros::idempotent;

mod outer {
    pub(crate) mod inner {
        use super::super::idempotent;

        #[derive(serde::Deserialize)]
        pub(crate) struct OrderPaid {
            pub(crate) order_id: u64,
        }

        #[idempotent(key = "order_id", consumer = "inner")]
        pub(in super::super) async fn seen_from_the_root(event: OrderPaid) -> Result<(), std::io::Error> {
            let _ = event.order_id;
            Ok(())
        }
    }
}

use outer::inner::OrderPaid;

#[idempotent(key = "order_id", consumer = "recursive")]
async fn recursive(event: OrderPaid) -> Result<(), std::io::Error> {
    if event.order_id == 0 {
        return Ok(());
    }
    Box::pin(recursive(OrderPaid { order_id: event.order_id - 1 })).await
}

fn main() {
    #[idempotent(key = "order_id", consumer = "local")]
    async fn local(event: OrderPaid) -> Result<(), std::io::Error> {
        let _ = event.order_id;
        Ok(())
    }
    let _ = (local, recursive, outer::inner::seen_from_the_root);
    drop(outer::inner::seen_from_the_root::body(OrderPaid { order_id: 1 }));
}
