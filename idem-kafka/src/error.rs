//! Why a consumer did not start, or ended.

use std::error::Error as StdError;

use idem_core::SetupError;
use idem_core::store::{StoreError, StoreErrorKind};

/// A consumer did not start, or ended for another reason than being asked to.
///
/// Offsets stand behind everything undecided: start again and nothing is lost.
#[derive(Debug, thiserror::Error)]
#[error("{context}")]
pub struct Error {
    kind: ErrorKind,
    context: String,
    #[source]
    cause: Option<Box<dyn StdError + Send + Sync>>,
}

/// What the caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting is missing, malformed, or clashes with another; a handler lacks something. Exit code 2.
    Configuration,
    /// A topic does not exist. Exit code 3.
    NotFound,
    /// A broker or the store cannot be reached. Worth retrying. Exit code 6.
    Unreachable,
    /// The deadline for draining came before all handlers had ended. Nothing is lost: what was cut is delivered again. Exit
    /// code 5.
    DrainCutShort,
    /// A person must decide: committed offsets that are gone, a schema of another version. Exit code 4.
    Refused,
    /// Anything else. Exit code 1.
    Failed,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), cause: None }
    }

    pub(crate) fn with_cause(
        kind: ErrorKind,
        context: impl Into<String>,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self { kind, context: context.into(), cause: Some(cause.into()) }
    }

    /// What the caller can do.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The exit code that says so to a supervisor.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            ErrorKind::Configuration => 2,
            ErrorKind::NotFound => 3,
            ErrorKind::Unreachable => 6,
            ErrorKind::DrainCutShort => 5,
            ErrorKind::Refused => 4,
            ErrorKind::Failed => 1,
        }
    }

    /// The error and its causes on one line.
    pub fn describe(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let said = error.to_string();
            if !text.contains(&said) {
                text.push_str(": ");
                text.push_str(&said);
            }
            cause = error.source();
        }
        text
    }
}

impl From<SetupError> for Error {
    fn from(error: SetupError) -> Self {
        Self::new(ErrorKind::Configuration, error.to_string())
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let kind = match error.kind() {
            StoreErrorKind::Configuration => ErrorKind::Configuration,
            StoreErrorKind::Schema => ErrorKind::Refused,
            StoreErrorKind::Unavailable | StoreErrorKind::Contention => ErrorKind::Unreachable,
            _ => ErrorKind::Failed,
        };
        Self::with_cause(kind, "the store cannot be used", error)
    }
}
