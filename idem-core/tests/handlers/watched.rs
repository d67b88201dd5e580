//! A store that notes what is asked of it, and loses answers.

use std::any::Any;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use idem_core::machine::{OperatorAction, State, Token};
use idem_core::store::{
    Answer, ClaimRequest, Completion, Engine, FailedTry, FailureWritten, Fenced, LockRequest, Operated, Purge, Renewal,
    Returned, Statement, Store, StoreError, StoreErrorKind, StoreTx, Terms, Tx,
};
use idem_core::{ConsumerName, EventKey, LockName};

/// Hands everything on to another store.
pub struct Watched {
    inner: Arc<dyn Store>,
    line: Line,
}

/// What went over to the store. Clones share it.
#[derive(Clone, Default)]
pub struct Line(Arc<Mutex<Traffic>>);

#[derive(Default)]
struct Traffic {
    calls: Vec<&'static str>,
    cuts: Vec<Cut>,
}

struct Cut {
    call: &'static str,
    times: u32,
    takes_effect: bool,
}

impl Watched {
    pub fn new(inner: Arc<dyn Store>) -> (Arc<Self>, Line) {
        let line = Line::default();
        (Arc::new(Self { inner, line: line.clone() }), line)
    }
}

impl Line {
    /// The next so many of these calls fail, before or after they took effect.
    pub fn cut(&self, call: &'static str, times: u32, takes_effect: bool) {
        self.0.lock().unwrap().cuts.push(Cut { call, times, takes_effect });
    }

    /// All is well again.
    pub fn mend(&self) {
        self.0.lock().unwrap().cuts.clear();
    }

    /// How often this was called.
    pub fn count(&self, call: &str) -> usize {
        self.0.lock().unwrap().calls.iter().filter(|called| **called == call).count()
    }

    /// Everything that was called since the last time.
    pub fn take_calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }

    /// Whether this call fails, and if so whether it takes effect all the same.
    fn note(&self, call: &'static str) -> Option<bool> {
        let mut traffic = self.0.lock().unwrap();
        traffic.calls.push(call);
        let cut = traffic.cuts.iter_mut().find(|cut| cut.call == call && cut.times > 0)?;
        cut.times -= 1;
        Some(cut.takes_effect)
    }

    fn carry<'a, T: Send + 'a>(
        &self,
        call: &'static str,
        answer: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        let lost = || StoreError::new(StoreErrorKind::Unavailable, "the reply was lost");
        match self.note(call) {
            None => answer,
            Some(false) => async move { Err(lost()) }.boxed(),
            Some(true) => async move { answer.await.and_then(|_| Err(lost())) }.boxed(),
        }
    }
}

macro_rules! handed_on {
    ($life:lifetime: $($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        fn $name<$life>(&$life self, $($argument: $type),*) -> BoxFuture<$life, Result<$answer, StoreError>> {
            self.line.carry(stringify!($name), self.inner.$name($($argument),*))
        }
    )*};
}

impl Store for Watched {
    fn engine(&self) -> Engine {
        self.inner.engine()
    }

    fn begin(&self) -> BoxFuture<'_, Result<Tx, StoreError>> {
        let begin = async {
            let inner = self.inner.begin().await?.into_inner();
            Ok(Tx::new(WatchedTx { inner, line: self.line.clone() }))
        };
        self.line.carry("begin", begin.boxed())
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }

    handed_on! { 'a:
        migrate() -> ();
        claim(terms: &'a Terms, requests: &'a [ClaimRequest]) -> Vec<Answer>;
        renew(terms: &'a Terms, held: &'a [(EventKey, Token)]) -> Vec<Renewal>;
        complete(terms: &'a Terms, done: &'a [Completion]) -> Vec<Fenced>;
        fail(terms: &'a Terms, failed: &'a [FailedTry]) -> Vec<FailureWritten>;
        release(terms: &'a Terms, held: &'a [(EventKey, Token)]) -> Vec<Fenced>;
        lock(terms: &'a Terms, requests: &'a [LockRequest]) -> Vec<bool>;
        extend_locks(terms: &'a Terms, requests: &'a [LockRequest]) -> Vec<Renewal>;
        unlock(requests: &'a [LockRequest]) -> ();
        make_locks(names: &'a [LockName]) -> ();
        read(consumer: &'a ConsumerName, keys: &'a [EventKey]) -> Vec<State>;
        result(consumer: &'a ConsumerName, key: &'a EventKey) -> Option<Vec<u8>>;
        count_duplicates(consumer: &'a ConsumerName, counts: &'a [(EventKey, u64)]) -> ();
        operate(terms: &'a Terms, key: &'a EventKey, action: OperatorAction, reason: &'a str) -> Operated;
        purge(purge: &'a Purge) -> u64;
        check_schema() -> ();
        ping() -> ();
    }
}

struct WatchedTx {
    inner: Box<dyn StoreTx>,
    line: Line,
}

macro_rules! handed_on_mutably {
    ($life:lifetime: $($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        fn $name<$life>(&$life mut self, $($argument: $type),*) -> BoxFuture<$life, Result<$answer, StoreError>> {
            self.line.carry(concat!("tx.", stringify!($name)), self.inner.$name($($argument),*))
        }
    )*};
}

impl StoreTx for WatchedTx {
    fn engine(&self) -> Engine {
        self.inner.engine()
    }

    handed_on_mutably! { 'a:
        claim(terms: &'a Terms, requests: &'a [ClaimRequest]) -> Vec<Answer>;
        overwrite(terms: &'a Terms, rows: &'a [(EventKey, State, String)]) -> ();
        lock(names: &'a [LockName]) -> Vec<bool>;
        keep_results(consumer: &'a ConsumerName, results: &'a [(EventKey, Returned)]) -> ();
        savepoint() -> ();
        rollback_to_savepoint() -> ();
        release_savepoint() -> ();
    }

    fn execute(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, sqlx::Error>> {
        self.inner.execute(statement)
    }

    fn connection(&mut self) -> &mut (dyn Any + Send) {
        self.inner.connection()
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        // Not before it is carried: where it is called, it may take effect.
        let Self { inner, line } = *self;
        line.carry("tx.commit", async move { inner.commit().await }.boxed())
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        let Self { inner, line } = *self;
        line.carry("tx.rollback", async move { inner.rollback().await }.boxed())
    }
}
