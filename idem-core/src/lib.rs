//! core
#![allow(missing_docs)]
#[doc(hidden)]
pub mod __private;
mod clock;
mod delivery;
mod fingerprint;
mod handler;
mod key;
pub mod machine;
mod policy;
pub mod run;
pub mod store;
mod timestamp;

pub use clock::{Clock, ManualClock, SystemClock};
pub use delivery::{Delivery, Payload, Rejection};
pub use fingerprint::{Fingerprint, FingerprintError, FingerprintParseError};
pub use handler::{
    Call, Classify, Disposition, FailureKind, Handler, HandlerFailure, HeaderList, Headers, IntoOutcome, Job,
    MAX_ERROR_BYTES, Mode, Parameter, Requirements, Spec, State, States, Transactional, UniqueViolation,
};
pub use key::{
    ConsumerName, ConsumerNameError, EventKey, KeyBuilder, KeyError, KeyField, MAX_CONSUMER_CHARS, MAX_KEY_CHARS,
};
pub use policy::{Backoff, MAX_LEASE, MIN_LEASE, Policy, PolicyError};
pub use run::{DuplicateKind, Guard, Guarded, Outcome, Report, RunError, RunGuarded, SetupError, Undecided};
pub use timestamp::Timestamp;

#[cfg(feature = "macros")]
#[doc(inline)]
pub use idem_macros::{Classify, idempotent};
