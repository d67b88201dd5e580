// What is written for this (`UPDATE_EXPECT=1 cargo test -p idem-macros` makes the file anew):
//
//     #[idempotent(key = "order_id", consumer = "invoice")]
//     async fn issue_invoices(tx: &mut Tx, events: Vec<OrderPaid>, jobs: &[Job]) -> Result<(), InvoiceError> {
//         insert_invoices(tx, &events, jobs).await
//     }

#[derive(::core::clone::Clone, ::core::marker::Copy)]
#[allow(non_camel_case_types, reason = "named as its function")]
struct issue_invoices;
impl issue_invoices {
    /// The function itself, without its guard.
    async fn body(
        tx: &mut Tx,
        events: Vec<OrderPaid>,
        jobs: &[Job],
    ) -> Result<(), InvoiceError> {
        async fn issue_invoices(
            tx: &mut Tx,
            events: Vec<OrderPaid>,
            jobs: &[Job],
        ) -> Result<(), InvoiceError> {
            insert_invoices(tx, &events, jobs).await
        }
        issue_invoices(tx, events, jobs).await
    }
}
const _: () = {
    use ::idem_core::__private as __idem;
    impl __idem::Handler for issue_invoices {
        type Event = OrderPaid;
        const SPEC: __idem::Spec = __idem::Spec {
            batch: true,
            ..__idem::Spec::new("issue_invoices", "invoice", __idem::Mode::Atomic)
        };
        fn key(
            __event: &Self::Event,
            __headers: &dyn __idem::Headers,
        ) -> __idem::KeyResult {
            __idem::key(__headers).field("order_id", &__event.order_id)?.finish()
        }
        fn require(__needs: &mut __idem::Requirements<'_>) {
            __needs.transaction(<Tx as __idem::Transactional>::ENGINE);
        }
        async fn call(__call: __idem::Call<'_, Self::Event>) -> __idem::CallResult {
            let mut __call = __idem::arguments(__call);
            let __answer = Self::body(
                    __call.transaction(<Tx as __idem::Transactional>::of)?,
                    __call.events(),
                    __call.jobs(<Job as __idem::JobParameter>::all),
                )
                .await;
            __idem::IntoOutcome::into_outcome(__answer)
        }
    }
};
