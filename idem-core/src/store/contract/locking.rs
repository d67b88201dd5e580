//! Locks on states other than the key (L5).

use super::*;

/// One has it until it is freed, under its token, whatever the others ask for.
pub async fn a_lock_is_held_by_one(subject: &impl Subject) {
    let job = Job::new(subject, "locked");
    let account = lock();
    let (one, other) = (job.locking(&account, 1), job.locking(&account, 2));
    assert!(job.lock(&one).await);
    assert!(!job.lock(&other).await, "it is held");
    assert!(job.lock(&one).await, "asked again because the reply was lost");
    assert_eq!(job.extend(&one).await, Renewal::Renewed);
    assert_eq!(job.extend(&other).await, Renewal::Unconfirmed, "not its holder");
    job.unlock(&other).await;
    assert!(!job.lock(&other).await, "only its holder can free it");
    job.unlock(&one).await;
    assert_eq!(job.extend(&one).await, Renewal::Unconfirmed, "free, so not held");
    // Another consumer asks for the same state.
    let elsewhere = Job::new(subject, "elsewhere");
    assert!(elsewhere.lock(&elsewhere.locking(&account, 3)).await);
    assert!(!job.lock(&one).await, "the state is the same for all consumers");

    // In one batch the first gets it, and other locks are apart.
    let (account, user) = (lock(), lock());
    let batch = [job.locking(&account, 4), job.locking(&user, 5), job.locking(&account, 6)];
    assert_eq!(job.store.lock(&job.terms, &batch).await.expect("the store works"), [true, true, false]);
    assert!(!job.lock(&job.locking(&account, 6)).await, "the first of the batch has it");
    assert!(job.store.lock(&job.terms, &[]).await.expect("the store works").is_empty());
    job.store.unlock(&[]).await.expect("the store works");
}

/// A holder that died keeps nobody away for longer than its lease, and can do nothing to its successor.
pub async fn a_lock_runs_out_with_its_lease(subject: &impl Subject) {
    let job = Job::new(subject, "locked");
    let account = lock();
    let (former, next) = (job.locking(&account, 1), job.locking(&account, 2));
    assert!(job.lock(&former).await);
    subject.pass(LEASE * 3 / 4).await;
    assert_eq!(job.extend(&former).await, Renewal::Renewed);
    subject.pass(LEASE * 3 / 4).await;
    assert!(!job.lock(&next).await, "it was extended");
    subject.pass(LEASE / 2).await;
    assert_eq!(job.extend(&former).await, Renewal::Unconfirmed, "it has run out");
    assert!(job.lock(&next).await);
    assert!(!job.lock(&former).await);
    job.unlock(&former).await;
    assert_eq!(job.extend(&next).await, Renewal::Renewed, "the former holder cannot free it");
}

/// Of many at once exactly one gets it.
pub async fn one_of_many_takes_a_lock(subject: &impl Subject) {
    let job = Job::new(subject, "locked");
    let account = lock();
    for round in 0..5u128 {
        let holders: Vec<_> = (1..=CROWD as u128).map(|number| job.locking(&account, 100 * round + number)).collect();
        let taken = join_all(holders.iter().map(|holder| job.lock(holder))).await;
        let winners: Vec<_> = holders.iter().zip(&taken).filter(|(_, taken)| **taken).collect();
        assert_eq!(winners.len(), 1, "round {round}: {taken:?}");
        job.unlock(winners[0].0).await;
    }
}

/// A transaction cannot hold what a job holds, and afterwards it can.
pub async fn a_transaction_and_a_job_exclude_each_other(subject: &impl Subject) {
    let job = Job::new(subject, "locked");
    let (account, free) = (lock(), lock());
    let holder = job.locking(&account, 1);
    assert!(job.lock(&holder).await);
    let names = [free.clone(), account.clone(), free.clone()];
    job.store.make_locks(&names).await.expect("the store works");
    for (is_held, expected) in [(true, [true, false, true]), (false, [true, true, true])] {
        if !is_held {
            job.unlock(&holder).await;
        }
        let mut tx = job.store.begin().await.expect("the store works");
        assert_eq!(tx.store().lock(&names).await.expect("the store works"), expected);
        assert!(tx.store().lock(&[]).await.expect("the store works").is_empty());
        tx.commit().await.expect("the store works");
    }
    // Nothing of the transaction's stays behind.
    assert!(job.lock(&holder).await);
}

/// What was free for long goes, and works as before when it is wanted again.
pub async fn a_purge_keeps_locks_that_are_held(subject: &impl Subject) {
    let job = Job::new(subject, "locked");
    let (held, free) = (lock(), lock());
    let holder = job.locking(&held, 1);
    assert!(job.lock(&holder).await && job.lock(&job.locking(&free, 2)).await);
    job.unlock(&job.locking(&free, 2)).await;
    for _ in 0..3 {
        subject.pass(LEASE / 2).await;
        assert_eq!(job.extend(&holder).await, Renewal::Renewed);
    }
    let purge = Purge { consumer: None, older_than: LEASE, most: 10 };
    assert_eq!(job.store.purge(&purge).await.expect("the store works"), 0, "locks are not counted");
    assert!(!job.lock(&job.locking(&held, 3)).await, "it is held");
    assert_eq!(job.extend(&holder).await, Renewal::Renewed);
    assert!(job.lock(&job.locking(&free, 4)).await);
}

fn lock() -> LockName {
    LockName::from_parts([("account", Uuid::new_v4().to_string())]).expect("a name")
}

impl Job<'_> {
    fn locking(&self, name: &LockName, number: u128) -> LockRequest {
        LockRequest { name: name.clone(), token: token(number), key: self.key.clone() }
    }

    async fn lock(&self, request: &LockRequest) -> bool {
        self.store.lock(&self.terms, std::slice::from_ref(request)).await.expect("the store works")[0]
    }

    async fn extend(&self, request: &LockRequest) -> Renewal {
        self.store.extend_locks(&self.terms, std::slice::from_ref(request)).await.expect("the store works")[0]
    }

    async fn unlock(&self, request: &LockRequest) {
        self.store.unlock(std::slice::from_ref(request)).await.expect("the store works");
    }
}
