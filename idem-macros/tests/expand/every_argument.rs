// What is written for this (`UPDATE_EXPECT=1 cargo test -p idem-macros` makes the file anew):
//
//     #[idempotent(
//         key = "order_id",
//         consumer = "invoice",
//         lease = "2m",
//         max_run = "1m 30s",
//         attempts = 5,
//         backoff = "100ms..1m",
//         fingerprint = ["amount", "customer.id"],
//         domain_unique = ["uq_invoices_order_id", "invoices.order_id"],
//         on_conflict = "skip",
//         lock = ["customer.id", "header:tenant"],
//         crate = renamed::idem_core,
//     )]
//     async fn issue_invoice(event: OrderPaid, tx: &mut PgConnection) -> Result<(), InvoiceError> {
//         insert_invoice(tx, &event).await
//     }

#[derive(::core::clone::Clone, ::core::marker::Copy)]
#[allow(non_camel_case_types, reason = "named as its function")]
struct issue_invoice;
impl issue_invoice {
    /// The function itself, without its guard.
    async fn body(event: OrderPaid, tx: &mut PgConnection) -> Result<(), InvoiceError> {
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
    use renamed::idem_core::__private as __idem;
    impl __idem::Handler for issue_invoice {
        type Event = OrderPaid;
        const SPEC: __idem::Spec = __idem::Spec {
            lease: __idem::Option::Some(__idem::Duration::from_millis(120000u64)),
            max_run: __idem::Option::Some(__idem::Duration::from_millis(90000u64)),
            attempts: __idem::Option::Some(5u32),
            backoff: __idem::Option::Some((
                __idem::Duration::from_millis(100u64),
                __idem::Duration::from_millis(60000u64),
            )),
            domain_unique: &["uq_invoices_order_id", "invoices.order_id"],
            on_conflict: __idem::OnConflict::Skip,
            lock: true,
            ..__idem::Spec::new("issue_invoice", "invoice", __idem::Mode::Atomic)
        };
        fn key(
            __event: &Self::Event,
            __headers: &dyn __idem::Headers,
        ) -> __idem::KeyResult {
            __idem::key(__headers).field("order_id", &__event.order_id)?.finish()
        }
        fn fingerprint(__event: &Self::Event) -> __idem::FingerprintResult {
            __idem::fingerprint()
                .field("amount", &__event.amount)
                .field("customer.id", &__event.customer.id)
                .finish()
        }
        fn lock(
            __event: &Self::Event,
            __headers: &dyn __idem::Headers,
        ) -> __idem::LockResult {
            __idem::lock(__headers)
                .field("customer.id", &__event.customer.id)
                .header("tenant")
                .finish()
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
