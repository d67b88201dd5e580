// What is written for this (`UPDATE_EXPECT=1 cargo test -p idem-macros` makes the file anew):
//
//     #[idempotent(key = ["order.id", event_type, "header:tenant"], consumer = "ledger")]
//     async fn book(event: Booking) -> Result<(), LedgerError> {
//         ledger::book(event).await
//     }

#[derive(::core::clone::Clone, ::core::marker::Copy)]
#[allow(non_camel_case_types, reason = "named as its function")]
struct book;
impl book {
    /// The function itself, without its guard.
    async fn body(event: Booking) -> Result<(), LedgerError> {
        async fn book(event: Booking) -> Result<(), LedgerError> {
            ledger::book(event).await
        }
        book(event).await
    }
}
const _: () = {
    use ::idem_core::__private as __idem;
    impl __idem::Handler for book {
        type Event = Booking;
        const SPEC: __idem::Spec = __idem::Spec::new(
            "book",
            "ledger",
            __idem::Mode::Lease,
        );
        fn key(
            __event: &Self::Event,
            __headers: &dyn __idem::Headers,
        ) -> __idem::KeyResult {
            __idem::key(__headers)
                .field("order.id", &__event.order.id)?
                .field("event_type", &__event.event_type)?
                .header("tenant")?
                .finish()
        }
        async fn call(__call: __idem::Call<'_, Self::Event>) -> __idem::CallResult {
            let mut __call = __idem::arguments(__call);
            let __answer = Self::body(__call.event()?).await;
            __idem::IntoOutcome::into_outcome(__answer)
        }
    }
};
