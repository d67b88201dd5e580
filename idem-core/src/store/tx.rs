//! The transaction that an atomic handler works in.

use std::any::Any;
use std::fmt;

use futures_util::future::BoxFuture;

use super::{Answer, ClaimRequest, Completion, Engine, Fenced, Returned, StoreError, Terms};
use crate::handler::Transactional;
use crate::key::{ConsumerName, EventKey, LockName};
use crate::machine::State;

/// An open transaction that holds the claims, the handlers' effects and the completions of one batch (T1).
///
/// Dropping it rolls it back. A handler takes it as `tx: &mut Tx` to run on any engine, or as `&mut PgConnection`,
/// `&mut MySqlConnection` or `&mut SqliteConnection` to be tied to one. It must not commit or roll back itself.
pub struct Tx(Box<dyn StoreTx>);

/// What a store puts behind a [`Tx`].
///
/// # Errors and cancel safety
/// As for [`Store`](super::Store). After an error of any method but [`commit`](Self::commit) the transaction can only be
/// rolled back, unless a savepoint was set before.
pub trait StoreTx: Send {
    /// Which engine this is.
    fn engine(&self) -> Engine;

    /// Asks for the jobs inside the transaction: claimed rows are written as completed at once, since nobody can see them
    /// before the commit. An expected conflict is an answer, not an error. Waits for transactions that hold one of the keys.
    fn claim<'a>(
        &'a mut self,
        terms: &'a Terms,
        requests: &'a [ClaimRequest],
    ) -> BoxFuture<'a, Result<Vec<Answer>, StoreError>>;

    /// Writes the states of rows that this transaction claimed, with their last error: those whose handler failed after all.
    fn overwrite<'a>(
        &'a mut self,
        terms: &'a Terms,
        rows: &'a [(EventKey, State, String)],
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Holds locks until the transaction ends (L5); answers which. Waits for nobody: a lock that a job or another transaction
    /// holds is not taken. Their rows must be there, see [`Store::make_locks`](super::Store::make_locks).
    fn lock<'a>(&'a mut self, names: &'a [LockName]) -> BoxFuture<'a, Result<Vec<bool>, StoreError>>;

    /// Keeps what the handlers of jobs returned that this transaction claimed.
    fn keep_results<'a>(
        &'a mut self,
        consumer: &'a ConsumerName,
        results: &'a [(EventKey, Returned)],
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Sets a savepoint. They nest.
    fn savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Undoes everything since the innermost savepoint, and removes it.
    fn rollback_to_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Keeps everything since the innermost savepoint, and removes it.
    fn release_savepoint(&mut self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Runs a statement of the application's; answers the number of rows it changed.
    fn execute(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, sqlx::Error>>;

    /// The engine's connection, as its sqlx type.
    fn connection(&mut self) -> &mut (dyn Any + Send);

    /// Makes everything durable.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unavailable`](super::StoreErrorKind::Unavailable): the reply was lost, and the transaction is
    /// committed or not. Claim again with the same tokens: the answer tells. Any other kind: it is rolled back.
    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>>;

    /// Undoes everything. An error means that the connection is gone, and the transaction with it.
    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>>;
}

/// A connection that [`Job::complete_in`](crate::Job::complete_in) can work on: one of sqlx's, of an engine that idem has a
/// store for.
pub trait JobConnection: Send + sealed::Sealed {
    /// Completes one job, fenced by its token as by [`Store::complete`](super::Store::complete), but only once: a job that is
    /// completed already, also by this claim, is answered as [`Fenced::LeaseLost`].
    ///
    /// # Errors
    /// The engine's. The transaction can then only be rolled back.
    fn complete<'a>(&'a mut self, terms: &'a Terms, done: &'a Completion) -> BoxFuture<'a, Result<Fenced, StoreError>>;
}

/// Only the engines' own connections.
pub(super) mod sealed {
    pub trait Sealed {}
}

/// The handler asks for a connection of another engine than the store's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the handler takes a {wanted} connection, but the store is {found}")]
pub struct WrongEngine {
    /// What the handler takes.
    pub wanted: Engine,
    /// What there is.
    pub found: Engine,
}

impl Tx {
    /// Wraps a store's transaction.
    pub fn new(inner: impl StoreTx + 'static) -> Self {
        Self(Box::new(inner))
    }

    /// Which engine this is.
    pub fn engine(&self) -> Engine {
        self.0.engine()
    }

    /// Runs one statement on whichever engine this is. Placeholders are `$1`, `$2`, …, also on MySQL.
    ///
    /// ```
    /// use idem_core::store::{sql, Tx};
    ///
    /// async fn insert_invoice(tx: &mut Tx, order_id: &str, amount: i64) -> Result<(), sqlx::Error> {
    ///     let invoice = sql("INSERT INTO invoices (order_id, amount) VALUES ($1, $2)").bind(order_id).bind(amount);
    ///     tx.execute(invoice).await?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// The engine's. On PostgreSQL the transaction is then aborted: return the error.
    ///
    /// # Cancel safety
    /// Dropping the future may leave the statement running; the transaction can then only be rolled back.
    pub async fn execute(&mut self, statement: Statement) -> Result<u64, sqlx::Error> {
        self.0.execute(statement).await
    }

    /// The engine's own connection, if it is a `C`.
    pub fn connection<C: Any>(&mut self) -> Option<&mut C> {
        self.0.connection().downcast_mut()
    }

    /// The store's side of it, for stores that wrap another one.
    pub fn into_inner(self) -> Box<dyn StoreTx> {
        self.0
    }

    /// The store's side of it.
    pub(crate) fn store(&mut self) -> &mut dyn StoreTx {
        &mut *self.0
    }

    pub(crate) async fn commit(self) -> Result<(), StoreError> {
        self.0.commit().await
    }

    pub(crate) async fn rollback(self) -> Result<(), StoreError> {
        self.0.rollback().await
    }
}

impl fmt::Debug for Tx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tx({})", self.engine())
    }
}

impl Transactional for Tx {
    const ENGINE: Option<Engine> = None;

    fn of(tx: &mut Tx) -> Result<&mut Self, WrongEngine> {
        Ok(tx)
    }
}

#[cfg(feature = "postgres")]
impl Transactional for sqlx::PgConnection {
    const ENGINE: Option<Engine> = Some(Engine::Postgres);

    fn of(tx: &mut Tx) -> Result<&mut Self, WrongEngine> {
        let found = tx.engine();
        tx.connection().ok_or(WrongEngine { wanted: Engine::Postgres, found })
    }
}

#[cfg(feature = "mysql")]
impl Transactional for sqlx::MySqlConnection {
    const ENGINE: Option<Engine> = Some(Engine::Mysql);

    fn of(tx: &mut Tx) -> Result<&mut Self, WrongEngine> {
        let found = tx.engine();
        tx.connection().ok_or(WrongEngine { wanted: Engine::Mysql, found })
    }
}

#[cfg(feature = "sqlite")]
impl Transactional for sqlx::SqliteConnection {
    const ENGINE: Option<Engine> = Some(Engine::Sqlite);

    fn of(tx: &mut Tx) -> Result<&mut Self, WrongEngine> {
        let found = tx.engine();
        tx.connection().ok_or(WrongEngine { wanted: Engine::Sqlite, found })
    }
}

/// One SQL statement with its values, for [`Tx::execute`].
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    pub(crate) text: &'static str,
    pub(crate) values: Vec<Value>,
}

/// A value bound to a placeholder.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `NULL`. On PostgreSQL it has the type text.
    Null,
    /// A truth value.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A floating point number.
    Float(f64),
    /// A text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
}

/// A statement without values yet. Only fixed texts: values are bound, never written into the text.
pub fn sql(text: &'static str) -> Statement {
    Statement { text, values: Vec::new() }
}

impl Statement {
    /// Binds the next placeholder.
    pub fn bind(mut self, value: impl Into<Value>) -> Self {
        self.values.push(value.into());
        self
    }
}

macro_rules! value_from {
    ($($from:ty => $variant:ident),* $(,)?) => {$(
        impl From<$from> for Value {
            fn from(value: $from) -> Self {
                Value::$variant(value.into())
            }
        }
    )*};
}
value_from!(bool => Bool, i64 => Int, i32 => Int, i16 => Int, u32 => Int, u16 => Int, f64 => Float, f32 => Float,
    String => Text, &str => Text, &String => Text, Vec<u8> => Bytes, &[u8] => Bytes);

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Value::Null, Into::into)
    }
}
