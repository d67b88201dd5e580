//! What a handler's author meets: the job, state, how errors are classified, and the trait that `#[idempotent]` fills in.

mod classify;
mod failure;
mod headers;
mod job;
mod outcome;
mod spec;
mod traits;

pub use classify::{Classify, Disposition};
pub use failure::{FailureKind, HandlerFailure, MAX_ERROR_BYTES, UniqueViolation};
pub use headers::{HeaderList, Headers};
pub use job::{CompleteError, Job, State, States};
pub use outcome::{IntoOutcome, IntoProbe, MAX_RESULT_BYTES, Output, Probe};
pub use spec::{Mode, OnConflict, Spec};
pub use traits::{Call, Handler, Parameter, Requirements, Transactional};

pub(crate) use failure::{capped, with_causes};
pub(crate) use job::HeldClaim;
