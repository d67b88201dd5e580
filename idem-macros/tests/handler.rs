//! What handlers do once they are expanded: their keys, fingerprints, settings, needs and calls.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::store::{Engine, MemoryStore, Store, Tx};
use idem_core::{
    Call, ConsumerName, EventKey, FailureKind, Fingerprint, Handler, Headers, Job, KeyError, LockName, Mode,
    OnConflict, Output, Probe, Requirements, State, States,
};
use idem_macros::{Classify, idempotent};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct OrderPaid {
    order_id: String,
    kind: Option<String>,
    amount: i64,
    customer: Customer,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
struct Customer {
    id: u64,
    country: String,
}

fn order(order_id: &str) -> OrderPaid {
    let customer = Customer { id: 7, country: "ID".into() };
    OrderPaid { order_id: order_id.into(), kind: Some("paid".into()), amount: 5, customer }
}

#[derive(Debug, PartialEq, Classify)]
enum InvoiceError {
    #[classify(terminal)]
    NoLines,
    #[classify(transient)]
    NoRates,
}

impl fmt::Display for InvoiceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no invoice: {self:?}")
    }
}

impl std::error::Error for InvoiceError {}

/// What handlers saw.
type Seen = Arc<Mutex<Vec<String>>>;

#[idempotent(key = "order_id", consumer = "invoice")]
async fn issue_invoice(event: OrderPaid, tx: &mut Tx, job: &Job, seen: State<Seen>) -> Result<i64, InvoiceError> {
    seen.lock().unwrap().push(format!("{} for {} in {tx:?}", job.key(), event.amount));
    match event.amount {
        0 => Err(InvoiceError::NoLines),
        amount if amount < 0 => Err(InvoiceError::NoRates),
        amount => Ok(amount),
    }
}

#[idempotent(key = "customer.id", consumer = "greeter")]
async fn greet(seen: State<Seen>, events: Vec<OrderPaid>, jobs: &[Job]) -> Result<(), InvoiceError> {
    for (event, job) in events.iter().zip(jobs) {
        seen.lock().unwrap().push(format!("{} by {}", event.order_id, job.key()));
    }
    Ok(())
}

#[idempotent(
    key = [order_id, "kind", "header:tenant"],
    consumer = "every-argument",
    lease = "2m",
    max_run = "1m 30s",
    attempts = 5,
    backoff = "100ms..1m",
    fingerprint = ["amount", customer.country],
    domain_unique = "uq_invoices_order_id",
    on_conflict = "skip",
    lock = ["header:tenant", customer.id, "kind"],
    probe = probed
)]
async fn set_everything(event: OrderPaid) -> Result<(), InvoiceError> {
    drop(event);
    Ok(())
}

async fn probed(event: &OrderPaid) -> Probe {
    if event.amount == 5 { Probe::Done } else { Probe::Unknown }
}

#[idempotent(key = "order_id", consumer = "shipping", lock = "customer.id", probe = "probes::shipped")]
async fn ship(seen: State<Seen>, event: OrderPaid, job: &Job) -> Result<Customer, InvoiceError> {
    seen.lock().unwrap().push(format!("{} shipped", job.key()));
    Ok(event.customer)
}

mod probes {
    use super::*;

    pub async fn shipped(seen: State<Seen>, event: &OrderPaid, job: &Job) -> Result<Probe, InvoiceError> {
        seen.lock().unwrap().push(format!("{} asked for {}", job.key(), event.amount));
        match event.amount {
            0 => Err(InvoiceError::NoLines),
            1 => Ok(Probe::Done),
            _ => Ok(Probe::NotDone),
        }
    }
}

/// One header.
struct Tenant(&'static [u8]);

impl Headers for Tenant {
    fn value(&self, name: &str) -> Option<&[u8]> {
        (name == "tenant").then_some(self.0)
    }
}

fn text(key: Result<EventKey, KeyError>) -> String {
    key.unwrap().to_string()
}

#[test]
fn k1_a_key_is_taken_from_fields_and_headers() {
    assert_eq!(text(issue_invoice::key(&order("A-1"), &())), "A-1");
    assert_eq!(text(greet::key(&order("A-1"), &())), "7");
    assert_eq!(text(set_everything::key(&order("A|1"), &Tenant(b"north"))), r"A\|1|paid|north");
}

#[test]
fn k4_a_part_that_is_missing_is_named() {
    let no_kind = OrderPaid { kind: None, ..order("A-1") };
    let missing = |field: &str| Err(KeyError::Missing { field: field.into() });
    assert_eq!(set_everything::key(&order("A-1"), &()), missing("tenant"));
    assert_eq!(set_everything::key(&no_kind, &Tenant(b"north")), missing("kind"));
    assert_eq!(issue_invoice::key(&order(""), &()), Err(KeyError::Empty { field: "order_id".into() }));
    let not_text = KeyError::NotText { field: "tenant".into() };
    assert_eq!(set_everything::key(&order("A-1"), &Tenant(b"\xff")), Err(not_text));
}

#[test]
fn a_fingerprint_covers_the_chosen_fields_only() {
    let of = |event: &OrderPaid| -> Fingerprint { set_everything::fingerprint(event).unwrap().unwrap() };
    let same = OrderPaid { customer: Customer { id: 8, country: "ID".into() }, ..order("A-2") };
    let other = OrderPaid { customer: Customer { id: 7, country: "NL".into() }, ..order("A-1") };
    assert_eq!(of(&order("A-1")), of(&same));
    assert_ne!(of(&order("A-1")), of(&other));
    assert!(issue_invoice::fingerprint(&order("A-1")).is_none(), "the whole payload counts");
}

#[test]
fn the_attribute_is_kept_as_data() {
    let spec = set_everything::SPEC;
    assert_eq!(
        (spec.name, spec.consumer, spec.mode, spec.batch),
        ("set_everything", "every-argument", Mode::Lease, false)
    );
    assert_eq!(spec.lease, Some(Duration::from_secs(120)));
    assert_eq!(spec.max_run, Some(Duration::from_secs(90)));
    assert_eq!(spec.attempts, Some(5));
    assert_eq!(spec.backoff, Some((Duration::from_millis(100), Duration::from_secs(60))));
    assert_eq!(spec.domain_unique, ["uq_invoices_order_id"]);
    assert_eq!((spec.on_conflict, spec.lock, spec.probe), (OnConflict::Skip, true, true));

    let spec = issue_invoice::SPEC;
    assert_eq!((spec.name, spec.consumer, spec.mode, spec.batch), ("issue_invoice", "invoice", Mode::Atomic, false));
    assert_eq!((spec.lease, spec.max_run, spec.attempts, spec.backoff), (None, None, None, None));
    assert!(spec.domain_unique.is_empty());
    assert_eq!((spec.on_conflict, spec.lock, spec.probe), (OnConflict::DeadLetter, false, false));
    let batch = [issue_invoice::SPEC.batch, greet::SPEC.batch];
    assert_eq!(batch, [false, true]);
}

#[test]
fn what_a_handler_lacks_is_told_at_start() {
    fn missing<H: Handler>(_: H, states: &States) -> Vec<String> {
        let mut requirements = Requirements::new(states, Engine::Memory);
        H::require(&mut requirements);
        requirements.missing()
    }
    let missing_state = missing(issue_invoice, &States::default());
    assert_eq!(missing_state.len(), 1);
    assert!(missing_state[0].contains("State<alloc::sync::Arc<"), "{missing_state:?}");
    assert_eq!(missing(issue_invoice, &states()), [""; 0]);
    assert_eq!(missing(set_everything, &States::default()), [""; 0]);
}

fn states() -> States {
    let mut states = States::default();
    states.insert(Seen::default());
    states
}

fn job(key: &str) -> Job {
    Job::detached(ConsumerName::new("invoice").unwrap(), EventKey::from_parts([key]).unwrap())
}

/// Runs a handler in a transaction, and tells how it ended and what it saw.
async fn run<H: Handler>(_: H, events: Vec<H::Event>, jobs: &[Job]) -> (Result<(), FailureKind>, Vec<String>) {
    let (mut tx, mut states, seen) =
        (MemoryStore::default().begin().await.unwrap(), States::default(), Seen::default());
    states.insert(Arc::clone(&seen));
    let call = Call { events, jobs, tx: Some(&mut tx), states: &states };
    let ended = H::call(call).await.map(drop).map_err(|failure| failure.kind);
    let seen = seen.lock().unwrap().clone();
    (ended, seen)
}

#[tokio::test]
async fn a_call_hands_over_every_parameter() {
    let (ended, seen) = run(issue_invoice, vec![order("A-1")], &[job("A-1")]).await;
    assert_eq!(ended, Ok(()));
    assert_eq!(seen, ["A-1 for 5 in Tx(in-memory)"]);
}

#[test]
fn l5_a_lock_is_named_by_paths_and_values_not_by_consumer() {
    let name = |parts: &[(&str, &str)]| LockName::from_parts(parts.iter().copied()).unwrap();
    let several = set_everything::lock(&order("A-1"), &Tenant(b"north")).unwrap().unwrap();
    assert_eq!(several, name(&[("customer.id", "7"), ("header:tenant", "north"), ("kind", "paid")]));
    assert_eq!(ship::lock(&order("A-1"), &()).unwrap().unwrap(), name(&[("customer.id", "7")]));
    assert!(issue_invoice::lock(&order("A-1"), &()).is_none());
}

#[test]
fn k4_a_message_that_does_not_name_its_lock_is_refused_as_one_without_a_key() {
    let missing = |field: &str| Some(Err(KeyError::Missing { field: field.into() }));
    let no_kind = OrderPaid { kind: None, ..order("A-1") };
    let empty = OrderPaid { kind: Some(String::new()), ..order("A-1") };
    assert_eq!(set_everything::lock(&order("A-1"), &()), missing("tenant"));
    assert_eq!(set_everything::lock(&no_kind, &Tenant(b"north")), missing("kind"));
    let refused = Some(Err(KeyError::Empty { field: "kind".into() }));
    assert_eq!(set_everything::lock(&empty, &Tenant(b"north")), refused);
    let refused = Some(Err(KeyError::NotText { field: "tenant".into() }));
    assert_eq!(set_everything::lock(&order("A-1"), &Tenant(b"\xff")), refused);
}

/// Asks a handler's probe, and tells what it answered and what it saw.
async fn ask<H: Handler>(_: H, event: H::Event, job: &Job) -> (Result<Probe, FailureKind>, Vec<String>) {
    let (mut states, seen) = (States::default(), Seen::default());
    states.insert(Arc::clone(&seen));
    let call = Call { events: vec![event], jobs: std::slice::from_ref(job), tx: None, states: &states };
    let answer = H::probe(call).await.map_err(|failure| failure.kind);
    let seen = seen.lock().unwrap().clone();
    (answer, seen)
}

#[tokio::test]
async fn t2_a_probe_gets_what_its_handler_gets() {
    let job = job("A-1");
    for (amount, answer) in [(0, Err(FailureKind::Terminal)), (1, Ok(Probe::Done)), (2, Ok(Probe::NotDone))] {
        let event = OrderPaid { amount, ..order("A-1") };
        assert_eq!(ask(ship, event, &job).await, (answer, vec![format!("A-1 asked for {amount}")]));
    }
    assert_eq!(ask(set_everything, order("A-1"), &job).await.0, Ok(Probe::Done));
}

#[tokio::test]
async fn t2_without_a_probe_nothing_is_known_to_be_done() {
    assert_eq!(ask(issue_invoice, order("A-1"), &job("A-1")).await, (Ok(Probe::NotDone), vec![]));
}

#[tokio::test]
async fn what_a_handler_returns_is_kept_as_json() {
    async fn output<H: Handler>(_: H, event: H::Event) -> Output {
        let mut tx = MemoryStore::default().begin().await.unwrap();
        let call = Call { events: vec![event], jobs: &[job("A-1")], tx: Some(&mut tx), states: &states() };
        H::call(call).await.unwrap()
    }
    assert_eq!(output(issue_invoice, order("A-1")).await.as_json(), Some(&b"5"[..]));
    assert_eq!(output(ship, order("A-1")).await.as_json(), Some(&br#"{"id":7,"country":"ID"}"#[..]));
    assert_eq!(output(set_everything, order("A-1")).await.as_json(), None);
}

#[tokio::test]
async fn a_batch_handler_gets_all_events_with_their_jobs() {
    let (ended, seen) = run(greet, vec![order("A-1"), order("A-2")], &[job("7"), job("8")]).await;
    assert_eq!(ended, Ok(()));
    assert_eq!(seen, ["A-1 by 7", "A-2 by 8"]);
}

#[tokio::test]
async fn an_error_says_whether_trying_again_is_of_use() {
    for (amount, kind) in [(0, FailureKind::Terminal), (-1, FailureKind::Transient)] {
        let event = OrderPaid { amount, ..order("A-1") };
        let (ended, _) = run(issue_invoice, vec![event], &[job("A-1")]).await;
        assert_eq!(ended, Err(kind));
    }
}

#[tokio::test]
async fn the_body_can_be_called_by_itself() {
    let mut tx = MemoryStore::default().begin().await.unwrap();
    let seen = Seen::default();
    let state = State::new(Arc::clone(&seen));
    assert_eq!(issue_invoice::body(order("A-1"), &mut tx, &job("A-1"), state).await, Ok(5));
    assert_eq!(*seen.lock().unwrap(), ["A-1 for 5 in Tx(in-memory)"]);
}
