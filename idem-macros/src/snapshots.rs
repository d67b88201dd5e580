//! Compares what the macros write with `tests/expand/`, which newcomers open to see it. `UPDATE_EXPECT=1` writes the files
//! anew; a changed file is a change that users can notice, and gets a line in the changelog.

use std::path::Path;

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::{Attribute, Item};

use crate::paths::DefaultCrate;

#[test]
fn basic() {
    compare(
        "basic",
        r#"
/// Issues one invoice per order.
#[idempotent(key = "order_id", consumer = "invoice")]
async fn issue_invoice(event: OrderPaid, tx: &mut PgConnection) -> Result<(), InvoiceError> {
    insert_invoice(tx, &event).await
}
"#,
    );
}

#[test]
fn lease() {
    compare(
        "lease",
        r#"
#[idempotent(key = "payment_id", consumer = "payment-settlement", lease = "2m", attempts = 5)]
async fn settle(event: PaymentRequested, job: &Job, gateway: State<Gateway>) -> Result<Receipt, GatewayError> {
    gateway.charge(job.downstream_key("charge"), &event).await
}
"#,
    );
}

#[test]
fn probe() {
    compare(
        "probe",
        r#"
#[idempotent(key = "payment_id", consumer = "payment-settlement", probe = settled)]
async fn settle(event: PaymentRequested, job: &Job, gateway: State<Gateway>) -> Result<Receipt, GatewayError> {
    gateway.charge(job.downstream_key("charge"), &event).await
}
"#,
    );
}

#[test]
fn batch() {
    compare(
        "batch",
        r#"
#[idempotent(key = "order_id", consumer = "invoice")]
async fn issue_invoices(tx: &mut Tx, events: Vec<OrderPaid>, jobs: &[Job]) -> Result<(), InvoiceError> {
    insert_invoices(tx, &events, jobs).await
}
"#,
    );
}

#[test]
fn composite_key() {
    compare(
        "composite_key",
        r#"
#[idempotent(key = ["order.id", event_type, "header:tenant"], consumer = "ledger")]
async fn book(event: Booking) -> Result<(), LedgerError> {
    ledger::book(event).await
}
"#,
    );
}

#[test]
fn every_argument() {
    compare(
        "every_argument",
        r#"
#[idempotent(
    key = "order_id",
    consumer = "invoice",
    lease = "2m",
    max_run = "1m 30s",
    attempts = 5,
    backoff = "100ms..1m",
    fingerprint = ["amount", "customer.id"],
    domain_unique = ["uq_invoices_order_id", "invoices.order_id"],
    on_conflict = "skip",
    lock = ["customer.id", "header:tenant"],
    crate = renamed::idem_core,
)]
async fn issue_invoice(event: OrderPaid, tx: &mut PgConnection) -> Result<(), InvoiceError> {
    insert_invoice(tx, &event).await
}
"#,
    );
}

#[test]
fn classify() {
    compare(
        "classify",
        r#"
#[derive(Debug, thiserror::Error, Classify)]
#[classify(terminal)]
enum InvoiceError {
    #[error("the order has no lines")]
    NoLines,
    #[error("the rates are not there yet")]
    #[classify(transient)]
    NoRates { currency: Currency },
    #[error(transparent)]
    #[classify(inner)]
    Database(#[from] sqlx::Error),
}
"#,
    );
}

/// What idem-kafka shows to its users finds idem-core through idem-kafka.
#[test]
fn both_macros_find_core_through_kafka() {
    let arguments = quote!(key = "order_id", consumer = "invoice");
    let function = quote!(
        async fn issue_invoice(event: OrderPaid) -> Result<(), InvoiceError> {}
    );
    let errors = quote!(
        #[classify(terminal)]
        struct InvoiceError;
    );
    let handler = crate::idempotent_in(DefaultCrate::Kafka, arguments, function);
    for written in [handler, crate::classify::derive(DefaultCrate::Kafka, errors)] {
        let import = quote!(
            use ::idem_kafka::core::__private as __idem;
        )
        .to_string();
        assert!(written.to_string().contains(&import), "{written}");
    }
}

fn compare(case: &str, source: &str) {
    let source = source.trim();
    let commented: String =
        source.lines().map(|line| format!("//     {line}\n").replace("//     \n", "//\n")).collect();
    let expansion = prettyplease::unparse(&syn::parse2(expand(source)).expect("the expansion is Rust"));
    let found = format!(
        "// What is written for this (`UPDATE_EXPECT=1 cargo test -p idem-macros` makes the file anew):\n//\n{commented}\n{expansion}"
    );

    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/expand/{case}.rs"));
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&file, &found).expect("the snapshot can be written");
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(found == expected, "{} is not what is written now:\n\n{found}", file.display());
}

/// Calls the macro as the compiler would.
fn expand(source: &str) -> TokenStream {
    let mut item: Item = syn::parse_str(source).expect("the source is Rust");
    match &mut item {
        Item::Fn(function) => {
            let attribute = take_attribute(&mut function.attrs, "idempotent");
            let arguments = attribute.meta.require_list().expect("the attribute has arguments").tokens.clone();
            crate::idempotent_in(DefaultCrate::Core, arguments, item.into_token_stream())
        }
        Item::Enum(errors) => {
            take_attribute(&mut errors.attrs, "derive");
            crate::classify::derive(DefaultCrate::Core, item.into_token_stream())
        }
        _ => unreachable!("a case is a function or an enum"),
    }
}

fn take_attribute(attrs: &mut Vec<Attribute>, name: &str) -> Attribute {
    let position = attrs.iter().position(|attr| attr.path().is_ident(name)).expect("the attribute is there");
    attrs.remove(position)
}
