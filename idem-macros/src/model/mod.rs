//! The checked description of one handler: what the attribute sets and what the function takes. Each check is a function of
//! its own, and all of them run, so that every mistake is reported at once.

mod settings;
mod signature;

use std::time::Duration;

use syn::{Ident, Member, Path, Type};

use crate::parse::{Function, Text};

/// What the attribute says.
pub(crate) struct Settings {
    /// Where idem-core is.
    pub(crate) krate: Path,
    pub(crate) key: Vec<Source>,
    pub(crate) consumer: String,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_run: Option<Duration>,
    pub(crate) attempts: Option<u32>,
    pub(crate) backoff: Option<(Duration, Duration)>,
    pub(crate) fingerprint: Vec<Field>,
    pub(crate) domain_unique: Vec<String>,
}

/// Where one part of the key comes from.
pub(crate) enum Source {
    Field(Field),
    Header(Text),
}

/// A field of the event, or of a field of it.
pub(crate) struct Field {
    /// As it was written.
    pub(crate) path: Text,
    /// Its segments, with the literal's span, so that the compiler's own errors point there.
    pub(crate) members: Vec<Member>,
}

/// The function and what its parameters are for.
pub(crate) struct HandlerFn {
    pub(crate) function: Function,
    /// The type of one event.
    pub(crate) event: Type,
    /// Whether it takes many events at once.
    pub(crate) batch: bool,
    pub(crate) parameters: Vec<Parameter>,
}

/// One parameter of the function.
pub(crate) struct Parameter {
    /// Its name in the signature of `body`.
    pub(crate) name: Ident,
    pub(crate) ty: Type,
    pub(crate) role: Role,
}

/// What a parameter is for, which its form tells.
pub(crate) enum Role {
    /// The first owned one that is no `State<T>`.
    Event,
    /// The same as `Vec<T>`.
    Events,
    /// `&T`
    Job(Box<Type>),
    /// `&[T]`
    Jobs(Box<Type>),
    /// `&mut T`
    Transaction(Box<Type>),
    /// Every other owned one.
    Shared,
}

impl HandlerFn {
    /// Whether the function takes the transaction.
    pub(crate) fn is_atomic(&self) -> bool {
        self.parameters.iter().any(|parameter| matches!(parameter.role, Role::Transaction(_)))
    }
}
