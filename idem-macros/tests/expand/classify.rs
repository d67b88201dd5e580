// What is written for this (`UPDATE_EXPECT=1 cargo test -p idem-macros` makes the file anew):
//
//     #[derive(Debug, thiserror::Error, Classify)]
//     #[classify(terminal)]
//     enum InvoiceError {
//         #[error("the order has no lines")]
//         NoLines,
//         #[error("the rates are not there yet")]
//         #[classify(transient)]
//         NoRates { currency: Currency },
//         #[error(transparent)]
//         #[classify(inner)]
//         Database(#[from] sqlx::Error),
//     }

const _: () = {
    use ::idem_core::__private as __idem;
    #[automatically_derived]
    #[allow(deprecated, reason = "a deprecated variant is classified like any other")]
    impl __idem::Classify for InvoiceError {
        fn disposition(&self) -> __idem::Disposition {
            match self {
                Self::NoLines { .. } => __idem::Disposition::Terminal,
                Self::NoRates { .. } => __idem::Disposition::Transient,
                Self::Database { 0: __inner } => {
                    <sqlx::Error as __idem::Classify>::disposition(__inner)
                }
            }
        }
    }
};
