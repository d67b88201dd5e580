//! The checked description of one handler: what the attribute sets and what the function takes. Each check is a function of
//! its own, and all of them run, so that every mistake is reported at once.

mod minted;
mod settings;
mod signature;

use std::time::Duration;

use proc_macro2::Span;
use syn::{Ident, Member, Path, Type};

use crate::diagnostics::Diagnostics;
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
    pub(crate) on_conflict: Option<OnConflict>,
    pub(crate) lock: Vec<Source>,
    pub(crate) probe: Option<Probe>,
}

/// What becomes of a message whose key was used for another payload.
#[derive(Clone, Copy)]
pub(crate) enum OnConflict {
    DeadLetter,
    Skip,
    Stop,
}

/// The function that is asked before a takeover or a retry.
pub(crate) struct Probe {
    pub(crate) function: Path,
    /// Of the argument's name.
    name_span: Span,
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

impl Source {
    /// Its name as an identifier, if that tells of a value made when a message comes (K2), and as it was written.
    pub(crate) fn minted(&self) -> Option<(String, &Text)> {
        let (name, written) = match self {
            Source::Field(field) => (field.path.text.rsplit('.').next()?, &field.path),
            Source::Header(header) => (&*header.text, header),
        };
        Some((minted::at_receipt(name)?, written))
    }
}

impl Settings {
    /// Checks the settings against the function. What does not fit is left out, and `diagnostics` says so.
    pub(crate) fn fit(&mut self, handler: &HandlerFn, diagnostics: &mut Diagnostics) {
        self.probe = self.probe.take().filter(|probe| probe_fits(probe, handler, diagnostics));
    }
}

/// A probe answers for one job whose effect is elsewhere.
fn probe_fits(probe: &Probe, handler: &HandlerFn, diagnostics: &mut Diagnostics) -> bool {
    if handler.is_atomic() {
        let message = "`probe` is for an effect elsewhere: the transaction that this handler takes tells whether its effect \
                       took place; remove `probe`";
        diagnostics.error(probe.name_span, message);
    }
    if handler.batch {
        diagnostics.error(probe.name_span, "`probe` answers for one job: a batch handler cannot have one");
    }
    !handler.is_atomic() && !handler.batch
}

impl HandlerFn {
    /// Whether the function takes the transaction.
    pub(crate) fn is_atomic(&self) -> bool {
        self.parameters.iter().any(|parameter| matches!(parameter.role, Role::Transaction(_)))
    }
}
