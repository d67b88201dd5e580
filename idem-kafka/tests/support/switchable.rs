//! A store that can be switched off: every call then says that it does not answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use idem_core::machine::{OperatorAction, State, Token};
use idem_core::store::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, LockRequest, MemoryStore, Operated,
    Purge, Renewal, Store, StoreError, StoreErrorKind, Terms, Tx,
};
use idem_core::{ConsumerName, EventKey, LockName};

#[derive(Clone, Default)]
pub struct Switchable {
    store: MemoryStore,
    off: Arc<AtomicBool>,
    refused: Arc<AtomicU32>,
}

impl Switchable {
    pub fn switch_off(&self, off: bool) {
        self.off.store(off, Ordering::SeqCst);
    }

    /// Calls refused while off.
    pub fn refused(&self) -> u32 {
        self.refused.load(Ordering::SeqCst)
    }

    fn unless_off<'a, T: Send + 'a>(
        &self,
        call: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        if self.off.load(Ordering::SeqCst) {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return async { Err(StoreError::new(StoreErrorKind::Unavailable, "switched off")) }.boxed();
        }
        call
    }
}

type Answered<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

impl Store for Switchable {
    fn engine(&self) -> Engine {
        self.store.engine()
    }
    fn migrate(&self) -> Answered<'_, ()> {
        self.unless_off(self.store.migrate())
    }
    fn claim<'a>(&'a self, terms: &'a Terms, requests: &'a [ClaimRequest]) -> Answered<'a, Vec<Answer>> {
        self.unless_off(self.store.claim(terms, requests))
    }
    fn renew<'a>(&'a self, terms: &'a Terms, held: &'a [(EventKey, Token)]) -> Answered<'a, Vec<Renewal>> {
        self.unless_off(self.store.renew(terms, held))
    }
    fn complete<'a>(&'a self, terms: &'a Terms, done: &'a [Completion]) -> Answered<'a, Vec<Fenced>> {
        self.unless_off(self.store.complete(terms, done))
    }
    fn fail<'a>(&'a self, terms: &'a Terms, failed: &'a [FailedTry]) -> Answered<'a, Vec<FailureWritten>> {
        self.unless_off(self.store.fail(terms, failed))
    }
    fn release<'a>(&'a self, terms: &'a Terms, held: &'a [(EventKey, Token)]) -> Answered<'a, Vec<Fenced>> {
        self.unless_off(self.store.release(terms, held))
    }
    fn begin(&self) -> Answered<'_, Tx> {
        self.unless_off(self.store.begin())
    }
    fn lock<'a>(&'a self, terms: &'a Terms, requests: &'a [LockRequest]) -> Answered<'a, Vec<bool>> {
        self.unless_off(self.store.lock(terms, requests))
    }
    fn extend_locks<'a>(&'a self, terms: &'a Terms, requests: &'a [LockRequest]) -> Answered<'a, Vec<Renewal>> {
        self.unless_off(self.store.extend_locks(terms, requests))
    }
    fn unlock<'a>(&'a self, requests: &'a [LockRequest]) -> Answered<'a, ()> {
        self.unless_off(self.store.unlock(requests))
    }
    fn make_locks<'a>(&'a self, names: &'a [LockName]) -> Answered<'a, ()> {
        self.unless_off(self.store.make_locks(names))
    }
    fn read<'a>(&'a self, consumer: &'a ConsumerName, keys: &'a [EventKey]) -> Answered<'a, Vec<State>> {
        self.unless_off(self.store.read(consumer, keys))
    }
    fn result<'a>(&'a self, consumer: &'a ConsumerName, key: &'a EventKey) -> Answered<'a, Option<Vec<u8>>> {
        self.unless_off(self.store.result(consumer, key))
    }
    fn count_duplicates<'a>(&'a self, consumer: &'a ConsumerName, counts: &'a [(EventKey, u64)]) -> Answered<'a, ()> {
        self.unless_off(self.store.count_duplicates(consumer, counts))
    }
    fn operate<'a>(
        &'a self,
        terms: &'a Terms,
        key: &'a EventKey,
        action: OperatorAction,
        reason: &'a str,
    ) -> Answered<'a, Operated> {
        self.unless_off(self.store.operate(terms, key, action, reason))
    }
    fn purge<'a>(&'a self, purge: &'a Purge) -> Answered<'a, u64> {
        self.unless_off(self.store.purge(purge))
    }
    fn check_schema(&self) -> Answered<'_, ()> {
        self.unless_off(self.store.check_schema())
    }
    fn ping(&self) -> Answered<'_, ()> {
        self.unless_off(self.store.ping())
    }
    fn close(&self) -> BoxFuture<'_, ()> {
        self.store.close()
    }
}
