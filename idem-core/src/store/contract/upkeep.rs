//! What stands beside the state, what operators do, and what a purge removes.

use super::*;

/// What a handler returned, and its digest.
fn returned(text: &str) -> Returned {
    Returned { value: Some(text.as_bytes().into()), hash: Some(format!("sha256:{}", text.len())) }
}

/// A completion keeps it; before, and without a value, there is none.
pub async fn what_a_handler_returned_is_kept(subject: &impl Subject) {
    let job = Job::new(subject, "returned");
    let run = job.run(1).await;
    assert_eq!(job.result().await, None, "not completed yet");
    let value = r#"{"receipt":"R-1","é":" \u0000 "}"#;
    let completion = Completion { returned: returned(value), ..job.completion(&run) };
    let fenced = job.store.complete(&job.terms, std::slice::from_ref(&completion)).await.expect("the store works");
    assert_eq!(fenced, [Fenced::Applied]);
    assert_eq!(job.result().await.as_deref(), Some(value.as_bytes()));
    // A late twin of the same job cannot put another value in its place.
    let late = Completion { returned: returned("\"late\""), ..job.completion(&Run { token: token(2), ..run }) };
    assert_eq!(job.store.complete(&job.terms, &[late]).await.expect("the store works"), [Fenced::LeaseLost]);
    assert_eq!(job.result().await.as_deref(), Some(value.as_bytes()));

    let silent = Job::new(subject, "silent");
    let run = silent.run(1).await;
    assert_eq!(silent.complete(&run).await, Fenced::Applied);
    assert_eq!(silent.result().await, None);
}

/// A transaction keeps it with its commit, and not without.
pub async fn what_handlers_returned_in_a_transaction_is_kept(subject: &impl Subject) {
    for commits in [false, true] {
        let job = Job::new(subject, "returned");
        let mut tx = job.store.begin().await.expect("the store works");
        run_of(&job.claim_in(&mut tx, 1).await);
        let results = [(job.key.clone(), returned("17"))];
        tx.store().keep_results(&job.terms.consumer, &results).await.expect("the store works");
        if commits { tx.commit().await } else { tx.rollback().await }.expect("the store works");
        assert_eq!(job.result().await.as_deref(), commits.then_some(&b"17"[..]));
        assert_eq!(job.read().await == State::Absent, !commits);
    }
}

/// They add up, twins in one call included; a row that is gone is left out.
pub async fn duplicates_are_counted_on_their_rows(subject: &impl Subject) {
    let job = Job::new(subject, "counted");
    let run = job.run(1).await;
    job.complete(&run).await;
    let before = job.read().await;
    let gone = key("gone");
    let counts = [(job.key.clone(), 3), (gone.clone(), 5), (job.key.clone(), 4)];
    for _ in 0..2 {
        job.store.count_duplicates(&job.terms.consumer, &counts).await.expect("the store works");
    }
    job.store.count_duplicates(&job.terms.consumer, &[]).await.expect("the store works");
    assert_eq!(subject.duplicates(&job.terms.consumer, &job.key).await, 14);
    assert_eq!(job.read().await, before, "a count changes nothing else");
    let rows = job.store.read(&job.terms.consumer, &[gone]).await.expect("the store works");
    assert_eq!(rows, [State::Absent], "a count makes no row");
}

/// Each action does on a failed job what the machine says, and a completed job is left alone.
pub async fn an_operator_changes_what_nobody_holds(subject: &impl Subject) {
    for action in [OperatorAction::Release, OperatorAction::Retry, OperatorAction::Complete, OperatorAction::Fail] {
        let job = Job::new(subject, "failed");
        let run = job.run(1).await;
        job.fail(run.token, Retry::After(LEASE)).await;
        let before = job.read().await;
        let operated = job.operate(action).await;
        assert_eq!((operated.before, operated.refused), (before, None), "{action:?}");
        assert_eq!(operated.after, job.read().await, "what was answered is what is stored");
        let answer = job.claim(2).await;
        match action {
            OperatorAction::Release | OperatorAction::Retry => {
                let attempt = if action == OperatorAction::Retry { 1 } else { 2 };
                assert_eq!(run_of(&answer).attempt, attempt, "{action:?}");
            }
            OperatorAction::Complete => {
                assert_eq!(answer.decision, Decision::Duplicate);
                let again = job.operate(OperatorAction::Retry).await;
                assert!(matches!(again.refused, Some(Refusal::Illegal(_))), "done is done: {again:?}");
                assert_eq!(again.before, again.after);
            }
            OperatorAction::Fail => {
                assert_eq!(answer.decision, Decision::Exhausted);
                assert_eq!(answer.error.as_deref(), Some("a reason"));
            }
        }
    }
    let nobody = Job::new(subject, "nobody").operate(OperatorAction::Complete).await;
    assert!(matches!(nobody.refused, Some(Refusal::Illegal(_))), "{nobody:?}");
}

/// A job that is held is its holder's, whatever a person wants; once its lease has run out it is not.
pub async fn an_operator_is_refused_while_a_lease_is_alive(subject: &impl Subject) {
    for action in [OperatorAction::Release, OperatorAction::Retry, OperatorAction::Complete, OperatorAction::Fail] {
        let job = Job::new(subject, "held");
        let run = job.run(1).await;
        let refused = job.operate(action).await;
        assert_eq!(refused.refused, Some(Refusal::LeaseAlive { until: run.locked_until }), "{action:?}");
        assert_eq!(job.read().await, refused.before);
        subject.pass(2 * LEASE).await;
        assert_eq!(job.operate(action).await.refused, None, "{action:?}");
    }
}

/// A former holder's writes are too late after an operator's.
pub async fn a_worker_cannot_write_over_an_operator(subject: &impl Subject) {
    for action in [OperatorAction::Release, OperatorAction::Retry, OperatorAction::Complete, OperatorAction::Fail] {
        let job = Job::new(subject, "operated");
        let run = job.run(1).await;
        subject.pass(2 * LEASE).await;
        let after = job.operate(action).await.after;
        assert_eq!(job.complete(&run).await, Fenced::LeaseLost, "{action:?}");
        assert_eq!(job.fail(run.token, Retry::Never).await.fenced, Fenced::LeaseLost, "{action:?}");
        assert_eq!(job.renew(run.token).await, Renewal::LeaseLost, "{action:?}");
        assert_eq!(job.release(run.token).await, Fenced::LeaseLost, "{action:?}");
        assert_eq!(job.read().await, after, "{action:?}");
    }
}

/// One job in each state, all a long time ago: completed and dead ones go, the others stay.
pub async fn a_purge_removes_only_what_ended_long_ago(subject: &impl Subject) {
    let job = Job::new(subject, "unused");
    let of = |name: &str| Job { key: key(name), store: Arc::clone(&job.store), terms: job.terms.clone(), ..job };
    let all = ["completed", "terminal", "exhausted", "held", "released", "due", "young"];
    for name in all {
        of(name).run(1).await;
    }
    // The same claim asked again is answered as before.
    let completed = run_of(&of("completed").claim(1).await);
    of("completed").complete(&completed).await;
    of("terminal").fail(token(1), Retry::Never).await;
    of("released").release(token(1)).await;
    of("due").fail(token(1), Retry::After(Duration::ZERO)).await;
    for number in 1..=u128::from(MAX_ATTEMPTS) {
        of("exhausted").fail(token(number), Retry::After(Duration::ZERO)).await;
        of("exhausted").claim(number + 1).await;
    }
    subject.pass(10 * LEASE).await;
    let young = run_of(&of("young").claim(9).await);
    of("young").complete(&young).await;

    let purge = Purge { consumer: Some(job.terms.consumer.clone()), older_than: 5 * LEASE, most: 100 };
    let removed = job.store.purge(&purge).await.expect("the store works");
    let mut left = Vec::new();
    for name in all {
        if of(name).read().await != State::Absent {
            left.push(name);
        }
    }
    assert_eq!(left, ["held", "released", "due", "young"]);
    assert_eq!(removed, 3);
    assert_eq!(job.store.purge(&purge).await.expect("the store works"), 0);
    assert!(matches!(of("completed").claim(20).await.decision, Decision::Run(_)), "its row guards nothing any more");
}

/// At most so many at once, until none is left.
pub async fn a_purge_goes_in_batches(subject: &impl Subject) {
    let job = Job::new(subject, "unused");
    let requests: Vec<_> =
        (0..10u128).map(|number| ClaimRequest { key: key(&number.to_string()), ..job.request(number) }).collect();
    let answers = job.store.claim(&job.terms, &requests).await.expect("the store works");
    let done: Vec<_> =
        requests.iter().zip(&answers).map(|(request, answer)| completion(request, &run_of(answer))).collect();
    job.store.complete(&job.terms, &done).await.expect("the store works");
    subject.pass(2 * LEASE).await;
    let purge = Purge { consumer: Some(job.terms.consumer.clone()), older_than: LEASE, most: 4 };
    for expected in [4, 4, 2, 0] {
        assert_eq!(job.store.purge(&purge).await.expect("the store works"), expected);
    }
}

/// Another consumer's rows stay, although they are as old.
pub async fn a_purge_is_of_one_consumer_if_asked(subject: &impl Subject) {
    let (one, other) = (Job::new(subject, "same"), Job::new(subject, "same"));
    for job in [&one, &other] {
        let run = job.run(1).await;
        job.complete(&run).await;
    }
    subject.pass(2 * LEASE).await;
    let purge = Purge { consumer: Some(one.terms.consumer.clone()), older_than: LEASE, most: 100 };
    assert_eq!(one.store.purge(&purge).await.expect("the store works"), 1);
    assert_eq!(one.read().await, State::Absent);
    assert_ne!(other.read().await, State::Absent);
}

/// Jobs that are claimed and completed while others are purged all keep their rows.
pub async fn a_purge_beside_claims_harms_none(subject: &impl Subject) {
    let job = Job::new(subject, "unused");
    let request = |number: u128| ClaimRequest { key: key(&format!("k{number}")), ..job.request(number) };
    let complete = async |numbers: std::ops::Range<u128>| {
        for number in numbers {
            let request = request(number);
            let run = run_of(&job.claim_one(&request).await);
            let done = [completion(&request, &run)];
            assert_eq!(job.store.complete(&job.terms, &done).await.expect("the store works"), [Fenced::Applied]);
        }
    };
    complete(0..20).await;
    subject.pass(2 * LEASE).await;
    let purge = Purge { consumer: Some(job.terms.consumer.clone()), older_than: LEASE, most: 3 };
    let purging = async {
        let mut removed = 0;
        while removed < 20 {
            removed += job.store.purge(&purge).await.expect("the store works");
        }
        removed
    };
    let (removed, ()) = tokio::join!(purging, complete(20..40));
    assert_eq!(removed, 20);
    let keys: Vec<_> = (0..40).map(|number| request(number).key).collect();
    let states = job.store.read(&job.terms.consumer, &keys).await.expect("the store works");
    let gone = states.iter().filter(|state| **state == State::Absent).count();
    assert_eq!(gone, 20);
    assert!(states[20..].iter().all(|state| matches!(state, State::Completed { .. })));
}

impl Job<'_> {
    async fn result(&self) -> Option<Vec<u8>> {
        self.store.result(&self.terms.consumer, &self.key).await.expect("the store works")
    }

    async fn operate(&self, action: OperatorAction) -> crate::store::Operated {
        self.store.operate(&self.terms, &self.key, action, "a reason").await.expect("the store works")
    }
}
