// What is written for this (`UPDATE_EXPECT=1 cargo test -p idem-macros` makes the file anew):
//
//     #[idempotent(key = "payment_id", consumer = "payment-settlement", probe = settled)]
//     async fn settle(event: PaymentRequested, job: &Job, gateway: State<Gateway>) -> Result<Receipt, GatewayError> {
//         gateway.charge(job.downstream_key("charge"), &event).await
//     }

#[derive(::core::clone::Clone, ::core::marker::Copy)]
#[allow(non_camel_case_types, reason = "named as its function")]
struct settle;
impl settle {
    /// The function itself, without its guard.
    async fn body(
        event: PaymentRequested,
        job: &Job,
        gateway: State<Gateway>,
    ) -> Result<Receipt, GatewayError> {
        async fn settle(
            event: PaymentRequested,
            job: &Job,
            gateway: State<Gateway>,
        ) -> Result<Receipt, GatewayError> {
            gateway.charge(job.downstream_key("charge"), &event).await
        }
        settle(event, job, gateway).await
    }
}
const _: () = {
    use ::idem_core::__private as __idem;
    impl __idem::Handler for settle {
        type Event = PaymentRequested;
        const SPEC: __idem::Spec = __idem::Spec {
            probe: true,
            ..__idem::Spec::new("settle", "payment-settlement", __idem::Mode::Lease)
        };
        fn key(
            __event: &Self::Event,
            __headers: &dyn __idem::Headers,
        ) -> __idem::KeyResult {
            __idem::key(__headers).field("payment_id", &__event.payment_id)?.finish()
        }
        fn require(__needs: &mut __idem::Requirements<'_>) {
            __needs.parameter(<State<Gateway> as __idem::Parameter>::check);
        }
        async fn probe(__call: __idem::Call<'_, Self::Event>) -> __idem::ProbeResult {
            let mut __call = __idem::arguments(__call);
            let __event = __call.event()?;
            let __answer = settled(
                    &__event,
                    __call.job(<Job as __idem::JobParameter>::one)?,
                    __call.parameter(<State<Gateway> as __idem::Parameter>::take)?,
                )
                .await;
            __idem::IntoProbe::into_probe(__answer)
        }
        async fn call(__call: __idem::Call<'_, Self::Event>) -> __idem::CallResult {
            let mut __call = __idem::arguments(__call);
            let __answer = Self::body(
                    __call.event()?,
                    __call.job(<Job as __idem::JobParameter>::one)?,
                    __call.parameter(<State<Gateway> as __idem::Parameter>::take)?,
                )
                .await;
            __idem::IntoOutcome::into_outcome(__answer)
        }
    }
};
