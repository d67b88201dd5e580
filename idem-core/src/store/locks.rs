//! Locks on states other than a job's key (L5): only one run at a time may change such a state, in whichever process.
//!
//! A job whose effect is elsewhere holds its lock as it holds its claim: until an instant of the database's clock, under the
//! claim's token, extended while it runs. An atomic job holds the lock's row in its transaction. Both respect each other, and
//! neither waits: whoever finds a lock held comes back.

use std::collections::HashSet;
use std::future::Future;

use super::{Renewal, StoreError, Terms};
use crate::key::{EventKey, LockName};
use crate::machine::Token;

/// A job asks for its lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockRequest {
    /// The lock.
    pub name: LockName,
    /// The claim's.
    pub token: Token,
    /// The job's key, for people.
    pub key: EventKey,
}

/// What an engine can do with locks on one connection. All names come sorted by their bytes and each once. Nothing here
/// waits for a row that another transaction has locked.
pub(crate) trait LockRows: Send {
    /// Makes the rows that are not there, as free.
    fn make(&mut self, names: &[&LockName]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Takes the locks that are free, have run out or are held under the request's token, from now for `terms.lease`;
    /// answers which.
    fn take(
        &mut self,
        terms: &Terms,
        requests: &[&LockRequest],
    ) -> impl Future<Output = Result<HashSet<LockName>, StoreError>> + Send;

    /// Extends the locks that are held under the request's token and have not run out; answers which.
    fn extend(
        &mut self,
        terms: &Terms,
        requests: &[&LockRequest],
    ) -> impl Future<Output = Result<HashSet<LockName>, StoreError>> + Send;

    /// Frees the locks that are held under the request's token.
    fn free(&mut self, requests: &[&LockRequest]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Holds the rows of the locks that are free or have run out until the transaction ends; answers which.
    fn hold(&mut self, names: &[&LockName]) -> impl Future<Output = Result<HashSet<LockName>, StoreError>> + Send;
}

/// Takes locks; answers which of the requests hold theirs. Of several for one lock the first may get it.
pub(crate) async fn take(
    rows: &mut impl LockRows,
    terms: &Terms,
    requests: &[LockRequest],
) -> Result<Vec<bool>, StoreError> {
    let firsts = firsts(requests);
    if firsts.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<_> = firsts.iter().map(|request| &request.name).collect();
    rows.make(&names).await?;
    let taken = rows.take(terms, &firsts).await?;
    let is_first = |request: &LockRequest| firsts.iter().any(|first| std::ptr::eq(*first, request));
    Ok(requests.iter().map(|request| taken.contains(&request.name) && is_first(request)).collect())
}

/// Extends locks. One that is not extended is lost, or another transaction keeps its row locked for a moment.
pub(crate) async fn extend(
    rows: &mut impl LockRows,
    terms: &Terms,
    requests: &[LockRequest],
) -> Result<Vec<Renewal>, StoreError> {
    let firsts = firsts(requests);
    let extended = if firsts.is_empty() { HashSet::new() } else { rows.extend(terms, &firsts).await? };
    let renewal = |request: &LockRequest| {
        // Whether it is lost or only looked at by somebody is told by the next attempt, or by its end.
        if extended.contains(&request.name) { Renewal::Renewed } else { Renewal::Unconfirmed }
    };
    Ok(requests.iter().map(renewal).collect())
}

/// Frees locks.
pub(crate) async fn free(rows: &mut impl LockRows, requests: &[LockRequest]) -> Result<(), StoreError> {
    let firsts = firsts(requests);
    if firsts.is_empty() { Ok(()) } else { rows.free(&firsts).await }
}

/// Makes the rows of locks that are not there.
pub(crate) async fn make(rows: &mut impl LockRows, names: &[LockName]) -> Result<(), StoreError> {
    let names = sorted(names);
    if names.is_empty() { Ok(()) } else { rows.make(&names).await }
}

/// Holds the rows of locks in a transaction; answers which of them it holds. Several for one lock all do.
pub(crate) async fn hold(rows: &mut impl LockRows, names: &[LockName]) -> Result<Vec<bool>, StoreError> {
    let distinct = sorted(names);
    let held = if distinct.is_empty() { HashSet::new() } else { rows.hold(&distinct).await? };
    Ok(names.iter().map(|name| held.contains(name)).collect())
}

/// The first request for each lock, in the order of the names' bytes: batches that lock in one order do not deadlock.
fn firsts(requests: &[LockRequest]) -> Vec<&LockRequest> {
    let mut firsts: Vec<_> = requests.iter().collect();
    firsts.sort_by(|a, b| a.name.cmp(&b.name));
    firsts.dedup_by(|later, first| later.name == first.name);
    firsts
}

fn sorted(names: &[LockName]) -> Vec<&LockName> {
    let mut sorted: Vec<_> = names.iter().collect();
    sorted.sort();
    sorted.dedup();
    sorted
}
