//! From a message's bytes and headers to what its delivery asks for. No store is asked.

use std::sync::Arc;

use idem_core::store::MemoryStore;
use idem_core::{
    Delivery, Fingerprint, Guard, Guarded, HeaderList, KeyError, REPLAYED_BY, Rejection, RunGuarded, idempotent,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Deserialize, Serialize)]
struct Booking {
    booking_id: u64,
    account_id: Option<String>,
    amount: i64,
}

#[idempotent(key = "booking_id", consumer = "ledger", lock = "account_id")]
async fn book(event: Booking) -> Result<(), std::io::Error> {
    drop(event);
    Ok(())
}

#[idempotent(key = "booking_id", consumer = "audit", fingerprint = "amount", lock = ["account_id"])]
async fn audit(event: Booking) -> Result<(), std::io::Error> {
    drop(event);
    Ok(())
}

#[idempotent(key = "header:id", consumer = "archive")]
async fn archive(event: serde_json::Value) -> Result<(), std::io::Error> {
    drop(event);
    Ok(())
}

fn guard() -> Guard {
    Guard::new(Arc::new(MemoryStore::default()))
}

fn books() -> Guarded {
    guard().bind(book).unwrap()
}

fn audits() -> Guarded {
    guard().bind(audit).unwrap()
}

fn headers(pairs: &[(&str, &str)]) -> HeaderList {
    HeaderList(pairs.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect())
}

fn prepare(guarded: &Guarded, payload: &str, headers: &HeaderList) -> Result<Delivery, Rejection> {
    guarded.prepare(Some(Arc::new(payload.as_bytes().to_vec())), headers, "m".into())
}

fn prepared(guarded: &Guarded, payload: &str) -> Delivery {
    prepare(guarded, payload, &HeaderList::default()).unwrap()
}

const BOOKING: &str = r#"{"booking_id":9007199254740993,"account_id":"7","amount":5}"#;

#[test]
fn l5_a_delivery_names_its_lock_whoever_consumes_it() {
    let (one, other) = (prepared(&books(), BOOKING), prepared(&audits(), BOOKING));
    assert_eq!(one.lock().unwrap().as_str(), "account_id=7");
    assert_eq!(one.lock(), other.lock());
    let archived = prepare(&guard().bind(archive).unwrap(), BOOKING, &headers(&[("id", "1")])).unwrap();
    assert_eq!(archived.lock(), None);
}

#[test]
fn k4_a_message_without_its_lock_is_rejected() {
    for (account, error) in [
        ("null", KeyError::Missing { field: "account_id".into() }),
        (r#""""#, KeyError::Empty { field: "account_id".into() }),
        (r#""a\u0000""#, KeyError::Nul { field: "account_id".into() }),
    ] {
        let payload = format!(r#"{{"booking_id":1,"account_id":{account},"amount":5}}"#);
        let rejection = prepare(&books(), &payload, &HeaderList::default()).unwrap_err();
        assert!(matches!(&rejection, Rejection::NoLock(found) if *found == error), "{rejection:?}");
    }
}

#[test]
fn only_the_header_makes_a_replay() {
    let replayed = prepare(&books(), BOOKING, &headers(&[(REPLAYED_BY, "")])).unwrap();
    assert!(replayed.is_replay());
    let not = prepare(&books(), BOOKING, &headers(&[("Idem-Replayed-By", "me"), ("idem-key", "1")])).unwrap();
    assert!(!not.is_replay());
}

#[test]
fn k1_an_integer_key_is_exact() {
    assert_eq!(prepared(&books(), BOOKING).key().as_str(), "9007199254740993");
}

#[test]
fn k4_a_field_that_stands_twice_is_refused_whatever_counts() {
    let payload = r#"{"booking_id":1,"account_id":"7","amount":5,"more":[{"note":1,"\u006eote":1}]}"#;
    for guarded in [books(), audits()] {
        let rejection = prepare(&guarded, payload, &HeaderList::default()).unwrap_err();
        assert_eq!(
            rejection.describe(),
            "the message is not an event of this handler: field `note` stands twice in one object"
        );
    }
    let archives = guard().bind(archive).unwrap();
    let rejection = prepare(&archives, r#"{"a":1,"a":1}"#, &headers(&[("id", "1")])).unwrap_err();
    assert!(matches!(rejection, Rejection::Undecodable { .. }), "{rejection:?}");
}

#[test]
fn s4_long_integers_do_not_share_a_fingerprint() {
    let fingerprint = |number: &str| -> Fingerprint {
        let payload = format!(r#"{{"booking_id":1,"account_id":"7","amount":5,"wei":{number}}}"#);
        prepared(&books(), &payload).fingerprint().unwrap()
    };
    assert_ne!(fingerprint("100000000000000000001"), fingerprint("100000000000000000002"));
    assert_ne!(fingerprint("18446744073709551616"), fingerprint("18446744073709551617"));
    assert_ne!(fingerprint("7"), fingerprint(r#""7""#));
    assert_eq!(fingerprint("100000000000000000001"), fingerprint(" 100000000000000000001 "));
}

#[test]
fn s4_a_payload_and_its_value_have_one_fingerprint() {
    let value = json!({"amount": 5, "account_id": "\u{1}int:7", "booking_id": u64::MAX});
    let written = serde_json::to_string_pretty(&value).unwrap();
    assert_eq!(prepared(&books(), &written).fingerprint(), Some(Fingerprint::of(&value).unwrap()));
}

#[test]
fn s4_only_chosen_fields_count() {
    let of = |payload: &str| prepared(&audits(), payload).fingerprint();
    let noise = r#"{"amount":5,"booking_id":2,"account_id":"8","sent_at":1}"#;
    assert_eq!(of(BOOKING), of(noise));
    assert_ne!(of(BOOKING), of(&noise.replace("5", "6")));
}

#[derive(Deserialize)]
struct Transfer {
    id: u64,
    wei: u128,
}

#[idempotent(key = "id", consumer = "transfers", fingerprint = "wei")]
async fn transfer(_event: Transfer) -> Result<(), std::io::Error> {
    Ok(())
}

#[test]
fn s4_chosen_fields_count_to_the_last_digit() {
    let transfers = guard().bind(transfer).unwrap();
    let of = |wei: &str| prepared(&transfers, &format!(r#"{{"id":1,"wei":{wei}}}"#)).fingerprint();
    assert_ne!(of("100000000000000000001"), of("100000000000000000002"));
    assert_eq!(of("100000000000000000001"), of("100000000000000000001"));
}

#[tokio::test]
async fn a_direct_call_is_rejected_like_a_message() {
    let event = Booking { booking_id: 1, account_id: None, amount: 5 };
    let error = book.run(&guard(), event).await.unwrap_err();
    assert_eq!(error.to_string(), "the message does not name its lock");
}
