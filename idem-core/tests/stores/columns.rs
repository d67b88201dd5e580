//! What people read of a row and no decision depends on: who claimed last, the last error, and when things happened.

use std::time::Duration;

use idem_core::machine::{Decision, Record, State, Token};
use idem_core::store::contract::{claim_in, commit, overwrite_in};
use idem_core::store::{ClaimRequest, Completion, FailedTry, Fenced, Renewal, Retry, Returned, Terms};
use uuid::Uuid;

use crate::subjects::{LEASE, Readable, key, request, terms};

macro_rules! on_every_engine {
    ($($check:ident)+) => {
        mod sqlite {
            $(
                #[tokio::test]
                async fn $check() {
                    super::$check(&crate::subjects::sqlite().await).await;
                }
            )+
        }

        mod postgres {
            $(
                #[tokio::test]
                async fn $check() {
                    super::$check(&crate::subjects::postgres().await).await;
                }
            )+
        }
    };
}

on_every_engine! {
    the_owner_is_who_claimed_last
    the_last_error_stays_until_another_takes_its_place
    instants_tell_what_happened
    a_completion_without_a_row_tells_whose_it_is
}

const CONSUMER: &str = "columns";

fn by(owner: &str) -> Terms {
    Terms { owner: owner.into(), ..terms(CONSUMER) }
}

fn token(number: u128) -> Token {
    Token(Uuid::from_u128(number))
}

async fn claim(subject: &impl Readable, owner: &str, number: u128) {
    let answers = subject.store().claim(&by(owner), &[request("a", number)]).await.expect("the store works");
    assert!(matches!(answers[0].decision, Decision::Run(_)), "{:?}", answers[0]);
}

async fn fail(subject: &impl Readable, owner: &str, number: u128, error: &str) {
    let failed =
        FailedTry { key: key("a"), token: token(number), retry: Retry::After(Duration::ZERO), error: error.to_owned() };
    let written = subject.store().fail(&by(owner), &[failed]).await.expect("the store works");
    assert_eq!(written[0].fenced, Fenced::Applied);
}

async fn release(subject: &impl Readable, owner: &str, number: u128) {
    let released = subject.store().release(&by(owner), &[(key("a"), token(number))]).await.expect("the store works");
    assert_eq!(released, [Fenced::Applied]);
}

fn completion(text: &str, number: u128) -> Completion {
    Completion { request: request(text, number), attempt: 1, fence: 1, returned: Returned::default() }
}

async fn the_owner_is_who_claimed_last(subject: &impl Readable) {
    let owner = || subject.column("a", "owner");
    claim(subject, "first", 1).await;
    assert_eq!(owner().await.as_deref(), Some("first"));
    claim(subject, "asks again", 1).await;
    assert_eq!(owner().await.as_deref(), Some("first"));
    fail(subject, "writes", 1, "").await;
    assert_eq!(owner().await.as_deref(), Some("first"));
    claim(subject, "second", 2).await;
    assert_eq!(owner().await.as_deref(), Some("second"));
    subject.pass(LEASE).await;
    claim(subject, "third", 3).await;
    assert_eq!(owner().await.as_deref(), Some("third"));
    release(subject, "writes", 3).await;
    assert_eq!(owner().await.as_deref(), Some("third"));
    claim(subject, "fourth", 4).await;
    subject.store().complete(&by("writes"), &[completion("a", 4)]).await.expect("the store works");
    assert_eq!(owner().await.as_deref(), Some("fourth"));
    assert_eq!(subject.column("a", "message_id").await.as_deref(), Some("message 1"));
}

async fn the_last_error_stays_until_another_takes_its_place(subject: &impl Readable) {
    let error = || subject.column("a", "error_message");
    claim(subject, "tests", 1).await;
    assert_eq!(error().await, None);
    fail(subject, "tests", 1, "first").await;
    claim(subject, "tests", 2).await;
    assert_eq!(error().await.as_deref(), Some("first"));
    release(subject, "tests", 2).await;
    assert_eq!(error().await.as_deref(), Some("first"));
    claim(subject, "tests", 3).await;
    fail(subject, "tests", 3, "second").await;
    assert_eq!(error().await.as_deref(), Some("second"));
    claim(subject, "tests", 4).await;
    subject.store().complete(&terms(CONSUMER), &[completion("a", 4)]).await.expect("the store works");
    assert_eq!(error().await.as_deref(), Some("second"));
}

/// Runs what changes the row, after everything in it was long ago.
async fn changes(subject: &impl Readable, what: &str, doing: impl Future<Output = ()>) {
    subject.long_ago().await;
    let (created, updated) = (subject.column("a", "created_at").await, subject.column("a", "updated_at").await);
    assert!(created.is_some() && updated.is_some());
    doing.await;
    assert_eq!(subject.column("a", "created_at").await, created, "{what}");
    assert_ne!(subject.column("a", "updated_at").await, updated, "{what}");
    let is_completed = subject.column("a", "status").await.as_deref() == Some("COMPLETED");
    let completed_at = subject.column("a", "completed_at").await;
    assert_eq!(completed_at.is_some(), is_completed, "{what}");
    if is_completed {
        assert_eq!(completed_at, subject.column("a", "updated_at").await, "{what}");
    }
}

async fn instants_tell_what_happened(subject: &impl Readable) {
    let (store, terms) = (subject.store(), terms(CONSUMER));
    let held = |number| [(key("a"), token(number))];
    claim(subject, "tests", 1).await;
    assert_eq!(subject.column("a", "completed_at").await, None);
    assert_eq!(subject.column("a", "created_at").await, subject.column("a", "updated_at").await);
    changes(subject, "a renewal", async {
        assert_eq!(store.renew(&terms, &held(1)).await.expect("the store works"), [Renewal::Renewed]);
    })
    .await;
    changes(subject, "a failure", fail(subject, "tests", 1, "")).await;
    changes(subject, "a claim", claim(subject, "tests", 2)).await;
    changes(subject, "a release", release(subject, "tests", 2)).await;
    claim(subject, "tests", 3).await;
    changes(subject, "a completion", async {
        store.complete(&terms, &[completion("a", 3)]).await.expect("the store works");
    })
    .await;
    // A completion that comes second in its batch is written by another statement.
    subject.forget(&terms.consumer, &key("a")).await;
    claim(subject, "tests", 1).await;
    changes(subject, "a completion after a wrong one", async {
        let both = [completion("a", 9), completion("a", 1)];
        let written = store.complete(&terms, &both).await.expect("the store works");
        assert_eq!(written, [Fenced::LeaseLost, Fenced::Applied]);
    })
    .await;
    // As completed at once, over a row that is there and over none.
    for is_there in [true, false] {
        subject.forget(&terms.consumer, &key("a")).await;
        if is_there {
            claim(subject, "tests", 1).await;
            release(subject, "tests", 1).await;
            subject.long_ago().await;
        }
        let mut tx = store.begin().await.expect("the store works");
        claim_in(&mut tx, &terms, &[request("a", 2)]).await.expect("the store works");
        commit(tx).await.expect("the store works");
        assert_eq!(subject.column("a", "completed_at").await, subject.column("a", "updated_at").await);
        assert!(subject.column("a", "completed_at").await.is_some());
        assert_eq!(subject.column("a", "owner").await.as_deref(), Some("tests"));
    }
    for (what, state) in [
        ("overwritten as received", State::Received(Record { payload: None, attempts: 0, fence: 1 })),
        ("overwritten as completed", {
            State::Completed { record: Record { payload: None, attempts: 1, fence: 1 }, token: None }
        }),
    ] {
        changes(subject, what, async {
            let mut tx = store.begin().await.expect("the store works");
            let row = (key("a"), state, what.to_owned());
            overwrite_in(&mut tx, &terms, &[row]).await.expect("the store works");
            commit(tx).await.expect("the store works");
        })
        .await;
        assert_eq!(subject.column("a", "error_message").await.as_deref(), Some(what));
    }
}

async fn a_completion_without_a_row_tells_whose_it_is(subject: &impl Readable) {
    let done = Completion {
        request: ClaimRequest { payload: None, ..request("a", 5) },
        attempt: 1,
        fence: 1,
        returned: Returned::default(),
    };
    let written = subject.store().complete(&by("completer"), &[done]).await.expect("the store works");
    assert_eq!(written, [Fenced::Applied]);
    assert_eq!(subject.column("a", "owner").await.as_deref(), Some("completer"));
    assert_eq!(subject.column("a", "message_id").await.as_deref(), Some("message 5"));
    let instants = ["created_at", "updated_at", "completed_at"];
    let [created, updated, completed] = instants.map(|column| subject.column("a", column));
    let created = created.await;
    assert!(created.is_some());
    assert_eq!((updated.await, completed.await), (created.clone(), created));
}
