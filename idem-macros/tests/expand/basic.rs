// What is written for this (`UPDATE_EXPECT=1 cargo test -p idem-macros` makes the file anew):
//
//     /// Issues one invoice per order.
//     #[idempotent(key = "order_id", consumer = "invoice")]
//     async fn issue_invoice(event: OrderPaid, tx: &mut PgConnection) -> Result<(), InvoiceError> {
//         insert_invoice(tx, &event).await
//     }

/// Issues one invoice per order.
#[derive(::core::clone::Clone, ::core::marker::Copy)]
#[allow(non_camel_case_types, reason = "named as its function")]
struct issue_invoice;
impl issue_invoice {
    /// The function itself, without its guard.
    async fn body(event: OrderPaid, tx: &mut PgConnection) -> Result<(), InvoiceError> {
        /// Issues one invoice per order.
        async fn issue_invoice(
            event: OrderPaid,
            tx: &mut PgConnection,
        ) -> Result<(), InvoiceError> {
            insert_invoice(tx, &event).await
        }
        issue_invoice(event, tx).await
    }
}
const _: () = {
    use ::idem_core::__private as __idem;
    impl __idem::Handler for issue_invoice {
        type Event = OrderPaid;
        const SPEC: __idem::Spec = __idem::Spec::new(
            "issue_invoice",
            "invoice",
            __idem::Mode::Atomic,
        );
        fn key(
            __event: &Self::Event,
            __headers: &dyn __idem::Headers,
        ) -> __idem::KeyResult {
            __idem::key(__headers).field("order_id", &__event.order_id)?.finish()
        }
        fn require(__needs: &mut __idem::Requirements<'_>) {
            __needs.transaction(<PgConnection as __idem::Transactional>::ENGINE);
        }
        async fn call(__call: __idem::Call<'_, Self::Event>) -> __idem::CallResult {
            let mut __call = __idem::arguments(__call);
            let __answer = Self::body(
                    __call.event()?,
                    __call.transaction(<PgConnection as __idem::Transactional>::of)?,
                )
                .await;
            __idem::IntoOutcome::into_outcome(__answer)
        }
    }
};
