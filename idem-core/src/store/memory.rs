//! The store in this process's memory: for documentation, models and tests.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::locks::{self, LockRequest, LockRows};
use super::rows::{self, ClaimAs, Inserted, Loaded, Locked, Replacement, Rows, Snapshot};
use super::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, Operated, Purge, Renewal, Returned,
    Statement, Store, StoreError, StoreTx, Terms, Tx,
};
use crate::clock::{Clock, SystemClock};
use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::{Decision, Failure, Input, OperatorAction, Record, State, Token, step};
use crate::timestamp::Timestamp;

/// Rows in this process's memory. Nothing outlives the process, so this guards nothing that matters: use it in
/// documentation and tests.
///
/// One transaction at a time; everything else waits for it.
///
/// ```
/// use std::sync::Arc;
/// use idem_core::ManualClock;
/// use idem_core::store::MemoryStore;
///
/// let clock = Arc::new(ManualClock::default());
/// let store = MemoryStore::with_clock(clock.clone());
/// # drop(store);
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    table: Arc<Mutex<Table>>,
}

type Place = (ConsumerName, EventKey);

struct Table {
    rows: BTreeMap<Place, Snapshot>,
    /// Who holds which lock, and until when. There is one transaction at a time, so a lock that is free when it begins is its.
    locks: HashMap<LockName, (Token, Timestamp)>,
    /// What stands beside the state in a row, and decides nothing.
    beside: HashMap<Place, Beside>,
    clock: Arc<dyn Clock>,
}

#[derive(Clone, Debug)]
struct Beside {
    returned: Returned,
    duplicates: u64,
    /// When the row was last written.
    written_at: Timestamp,
}

impl Default for Beside {
    fn default() -> Self {
        Self { returned: Returned::default(), duplicates: 0, written_at: Timestamp::EPOCH }
    }
}

impl Table {
    fn beside(&mut self, consumer: &ConsumerName, key: &EventKey) -> &mut Beside {
        self.beside.entry((consumer.clone(), key.clone())).or_default()
    }

    fn note_write(&mut self, consumer: &ConsumerName, key: &EventKey) {
        let now = self.clock.timestamp();
        self.beside(consumer, key).written_at = now;
    }

    fn remove(&mut self, place: &Place) {
        self.rows.remove(place);
        self.beside.remove(place);
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::with_clock(Arc::new(SystemClock))
    }
}

impl MemoryStore {
    /// With a clock that plays the database's.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        Self {
            table: Arc::new(Mutex::new(Table {
                rows: BTreeMap::new(),
                locks: HashMap::new(),
                beside: HashMap::new(),
                clock,
            })),
        }
    }

    /// Removes a row, as a purge does.
    pub async fn remove(&self, consumer: &ConsumerName, key: &EventKey) {
        self.table.lock().await.remove(&(consumer.clone(), key.clone()));
    }

    /// How many duplicates were counted on a row.
    pub async fn duplicates(&self, consumer: &ConsumerName, key: &EventKey) -> u64 {
        self.table.lock().await.beside(consumer, key).duplicates
    }
}

impl Store for MemoryStore {
    fn engine(&self) -> Engine {
        Engine::Memory
    }

    fn migrate(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async { Ok(()) }.boxed()
    }

    fn claim<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        async move { rows::claim(&mut *self.table.lock().await, terms, requests, ClaimAs::Processing).await }.boxed()
    }

    fn renew<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        async move { rows::renew(&mut *self.table.lock().await, terms, held).await }.boxed()
    }

    fn complete<'a>(
        &'a self,
        terms: &'a Terms,
        done: &'a [Completion],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        async move { rows::complete(&mut *self.table.lock().await, terms, done).await }.boxed()
    }

    fn fail<'a>(
        &'a self,
        terms: &'a Terms,
        failed: &'a [FailedTry],
    ) -> BoxFuture<'a, Result<Vec<FailureWritten>, StoreError>> {
        async move { rows::fail(&mut *self.table.lock().await, terms, failed).await }.boxed()
    }

    fn release<'a>(
        &'a self,
        terms: &'a Terms,
        held: &'a [(EventKey, Token)],
    ) -> BoxFuture<'a, Result<Vec<Fenced>, StoreError>> {
        async move { rows::release(&mut *self.table.lock().await, terms, held).await }.boxed()
    }

    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>> {
        async {
            let table = Arc::clone(&self.table).lock_owned().await;
            Ok(Tx::new(MemoryTx { table, undo: Vec::new(), savepoints: Vec::new() }))
        }
        .boxed()
    }

    fn lock<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        async move { locks::take(&mut *self.table.lock().await, terms, requests).await }.boxed()
    }

    fn extend_locks<'a>(
        &'a self,
        terms: &'a Terms,
        requests: &'a [LockRequest],
    ) -> BoxFuture<'a, Result<Vec<Renewal>, StoreError>> {
        async move { locks::extend(&mut *self.table.lock().await, terms, requests).await }.boxed()
    }

    fn unlock<'a>(&'a self, requests: &'a [LockRequest]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { locks::free(&mut *self.table.lock().await, requests).await }.boxed()
    }

    fn make_locks<'a>(&'a self, names: &'a [LockName]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { locks::make(&mut *self.table.lock().await, names).await }.boxed()
    }

    fn read<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        keys: &'a [EventKey],
    ) -> BoxFuture<'a, Result<Vec<State>, StoreError>> {
        async move { rows::read(&mut *self.table.lock().await, consumer, keys).await }.boxed()
    }

    fn result<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        key: &'a EventKey,
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        async move { self.table.lock().await.result(consumer, key).await }.boxed()
    }

    fn count_duplicates<'a>(
        &'a self,
        consumer: &'a ConsumerName,
        counts: &'a [(EventKey, u64)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { rows::count_duplicates(&mut *self.table.lock().await, consumer, counts).await }.boxed()
    }

    fn operate<'a>(
        &'a self,
        terms: &'a Terms,
        key: &'a EventKey,
        action: OperatorAction,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<Operated, StoreError>> {
        async move { rows::operate(&mut *self.table.lock().await, terms, key, action, reason).await }.boxed()
    }

    fn purge<'a>(&'a self, purge: &'a Purge) -> BoxFuture<'a, Result<u64, StoreError>> {
        async move {
            let table = &mut *self.table.lock().await;
            let now = table.clock.timestamp();
            let most = usize::try_from(purge.most).unwrap_or(usize::MAX);
            let beside = &table.beside;
            let is_old =
                |place: &Place| beside.get(place).is_some_and(|beside| beside.written_at.plus(purge.older_than) <= now);
            let is_asked_for = |place: &Place| purge.consumer.as_ref().is_none_or(|consumer| *consumer == place.0);
            let ended: Vec<_> = table
                .rows
                .iter()
                .filter(|(place, row)| has_ended(&row.state) && is_asked_for(place) && is_old(place))
                .map(|(place, _)| place.clone())
                .take(most)
                .collect();
            ended.iter().for_each(|place| table.remove(place));
            Ok(ended.len() as u64)
        }
        .boxed()
    }

    fn check_schema(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async { Ok(()) }.boxed()
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        async { Ok(()) }.boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async {}.boxed()
    }
}

/// Whether a job is over for good, so that its row only keeps copies of its message away.
fn has_ended(state: &State) -> bool {
    match state {
        State::Completed { .. } | State::Failed { failure: Failure::Terminal | Failure::Exhausted, .. } => true,
        State::Absent
        | State::Received(_)
        | State::Processing { .. }
        | State::Failed { failure: Failure::Due(_), .. } => false,
    }
}

impl Rows for Table {
    async fn insert(
        &mut self,
        terms: &Terms,
        requests: &[&ClaimRequest],
        claim_as: ClaimAs,
    ) -> Result<HashMap<EventKey, Inserted>, StoreError> {
        let now = self.clock.timestamp();
        let mut inserted = HashMap::new();
        for request in requests {
            let place = (terms.consumer.clone(), request.key.clone());
            if self.rows.contains_key(&place) {
                continue;
            }
            let record = Record { payload: request.payload, attempts: 1, fence: 1 };
            let state = match claim_as {
                ClaimAs::Completed => State::Completed { record, token: Some(request.token) },
                ClaimAs::Processing => {
                    State::Processing { record, token: request.token, locked_until: now.plus(terms.lease) }
                }
            };
            self.rows.insert(place, Snapshot { state, message_id: Some(request.message_id.to_string()), error: None });
            self.note_write(&terms.consumer, &request.key);
            inserted.insert(request.key.clone(), Inserted { now, waited: Duration::ZERO });
        }
        Ok(inserted)
    }

    async fn load(&mut self, consumer: &ConsumerName, keys: &[&EventKey]) -> Result<Loaded, StoreError> {
        let row = |key: &&EventKey| self.rows.get(&(consumer.clone(), (*key).clone())).cloned();
        Ok(Loaded { now: self.clock.timestamp(), rows: keys.iter().map(row).collect() })
    }

    async fn replace(
        &mut self,
        terms: &Terms,
        Replacement { key, from, to, error }: Replacement<'_>,
        _locked: Locked,
    ) -> Result<bool, StoreError> {
        let place = (terms.consumer.clone(), key.clone());
        let Some(row) = self.rows.get_mut(&place).filter(|row| row.state == *from) else { return Ok(false) };
        row.state = *to;
        if let Some(error) = error {
            row.error = Some(error.to_owned());
        }
        self.note_write(&terms.consumer, key);
        Ok(true)
    }

    async fn complete(&mut self, terms: &Terms, done: &[&Completion]) -> Result<HashSet<EventKey>, StoreError> {
        let mut applied = HashSet::new();
        for Completion { request, attempt, fence, returned } in done {
            let place = (terms.consumer.clone(), request.key.clone());
            let row = self.rows.entry(place).or_insert_with(|| {
                let record = Record { payload: request.payload, attempts: *attempt, fence: *fence };
                let state = State::Processing { record, token: request.token, locked_until: Timestamp::EPOCH };
                Snapshot { state, message_id: Some(request.message_id.to_string()), error: None }
            });
            let moved = step(&row.state, Input::Complete { token: request.token });
            if let Some(moved) = moved.ok().filter(|moved| moved.decision == Decision::Applied) {
                row.state = moved.next;
                self.beside(&terms.consumer, &request.key).returned = returned.clone();
                self.note_write(&terms.consumer, &request.key);
                applied.insert(request.key.clone());
            }
        }
        Ok(applied)
    }

    async fn renew(&mut self, terms: &Terms, held: &[(&EventKey, Token)]) -> Result<HashSet<EventKey>, StoreError> {
        let now = self.clock.timestamp();
        let mut renewed = HashSet::new();
        for (key, token) in held {
            let Some(row) = self.rows.get_mut(&(terms.consumer.clone(), (*key).clone())) else { continue };
            let moved = step(&row.state, Input::Renew { token: *token, now, lease: terms.lease });
            if let Some(moved) = moved.ok().filter(|moved| moved.decision == Decision::Applied) {
                row.state = moved.next;
                renewed.insert((*key).clone());
            }
        }
        Ok(renewed)
    }

    async fn result(&mut self, consumer: &ConsumerName, key: &EventKey) -> Result<Option<Vec<u8>>, StoreError> {
        let place = (consumer.clone(), key.clone());
        let is_completed = self.rows.get(&place).is_some_and(|row| matches!(row.state, State::Completed { .. }));
        let kept = self.beside.get(&place).and_then(|beside| beside.returned.value.as_ref());
        Ok(kept.filter(|_| is_completed).map(|value| value.to_vec()))
    }

    async fn count_duplicates(
        &mut self,
        consumer: &ConsumerName,
        counts: &[(&EventKey, u64)],
    ) -> Result<(), StoreError> {
        for (key, times) in counts {
            if let Some(beside) = self.beside.get_mut(&(consumer.clone(), (*key).clone())) {
                beside.duplicates += times;
            }
        }
        Ok(())
    }
}

impl LockRows for Table {
    async fn make(&mut self, _names: &[&LockName]) -> Result<(), StoreError> {
        Ok(())
    }

    async fn take(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let now = self.clock.timestamp();
        let mut taken = HashSet::new();
        for LockRequest { name, token, .. } in requests {
            let held = self.locks.get(name);
            if held.is_none_or(|(holder, until)| holder == token || *until <= now) {
                self.locks.insert(name.clone(), (*token, now.plus(terms.lease)));
                taken.insert(name.clone());
            }
        }
        Ok(taken)
    }

    async fn extend(&mut self, terms: &Terms, requests: &[&LockRequest]) -> Result<HashSet<LockName>, StoreError> {
        let now = self.clock.timestamp();
        let mut extended = HashSet::new();
        for LockRequest { name, token, .. } in requests {
            if let Some((_, until)) = self.locks.get_mut(name).filter(|(holder, until)| holder == token && *until > now)
            {
                *until = now.plus(terms.lease);
                extended.insert(name.clone());
            }
        }
        Ok(extended)
    }

    async fn free(&mut self, requests: &[&LockRequest]) -> Result<(), StoreError> {
        for LockRequest { name, token, .. } in requests {
            if self.locks.get(name).is_some_and(|(holder, _)| holder == token) {
                self.locks.remove(name);
            }
        }
        Ok(())
    }

    async fn hold(&mut self, names: &[&LockName]) -> Result<HashSet<LockName>, StoreError> {
        let now = self.clock.timestamp();
        let is_free = |name: &&&LockName| self.locks.get(**name).is_none_or(|(_, until)| *until <= now);
        Ok(names.iter().filter(is_free).map(|name| (*name).clone()).collect())
    }
}

/// Holds the table's lock, and remembers what rows were before. Dropping it puts them back.
struct MemoryTx {
    table: OwnedMutexGuard<Table>,
    undo: Vec<(Place, Option<Snapshot>)>,
    /// How much of `undo` there was at each savepoint.
    savepoints: Vec<usize>,
}

impl MemoryTx {
    fn remember(&mut self, consumer: &ConsumerName, keys: impl Iterator<Item = EventKey>) {
        for key in keys {
            let place = (consumer.clone(), key);
            let row = self.table.rows.get(&place).cloned();
            self.undo.push((place, row));
        }
    }

    fn undo_to(&mut self, length: usize) {
        for (place, row) in self.undo.drain(length..).rev() {
            match row {
                Some(row) => drop(self.table.rows.insert(place, row)),
                None => self.table.remove(&place),
            };
        }
    }
}

impl Drop for MemoryTx {
    fn drop(&mut self) {
        self.undo_to(0);
    }
}

impl StoreTx for MemoryTx {
    fn engine(&self) -> Engine {
        Engine::Memory
    }

    fn claim<'a>(
        &'a mut self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>> {
        async move {
            self.remember(&terms.consumer, requests.iter().map(|request| request.key.clone()));
            rows::claim(&mut *self.table, terms, requests, ClaimAs::Completed).await
        }
        .boxed()
    }

    fn overwrite<'a>(
        &'a mut self,
        terms: &'a Terms,
        rows: &'a [(EventKey, State, String)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            self.remember(&terms.consumer, rows.iter().map(|(key, ..)| key.clone()));
            for (key, state, error) in rows {
                if *state == State::Absent {
                    return Err(rows::absent());
                }
                if let Some(row) = self.table.rows.get_mut(&(terms.consumer.clone(), key.clone())) {
                    row.state = *state;
                    row.error = Some(error.clone());
                }
            }
            Ok(())
        }
        .boxed()
    }

    fn lock<'a>(&'a mut self, names: &'a [LockName]) -> BoxFuture<'a, Result<Vec<bool>, StoreError>> {
        async move { locks::hold(&mut *self.table, names).await }.boxed()
    }

    fn keep_results<'a>(
        &'a mut self,
        consumer: &'a ConsumerName,
        results: &'a [(EventKey, Returned)],
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            for (key, returned) in results {
                self.table.beside(consumer, key).returned = returned.clone();
            }
            Ok(())
        }
        .boxed()
    }

    fn savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async {
            self.savepoints.push(self.undo.len());
            Ok(())
        }
        .boxed()
    }

    fn rollback_to_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async {
            let length = self.savepoints.pop().ok_or_else(rows::no_savepoint)?;
            self.undo_to(length);
            Ok(())
        }
        .boxed()
    }

    fn release_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>> {
        async { self.savepoints.pop().map(|_| ()).ok_or_else(rows::no_savepoint) }.boxed()
    }

    fn execute(&mut self, _statement: Statement) -> BoxFuture<'_, Result<u64, sqlx::Error>> {
        async { Err(sqlx::Error::Configuration("the in-memory store has no SQL".into())) }.boxed()
    }

    fn connection(&mut self) -> &mut (dyn Any + Send) {
        &mut self.savepoints
    }

    fn commit(mut self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.undo.clear();
        async { Ok(()) }.boxed()
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        drop(self);
        async { Ok(()) }.boxed()
    }
}
