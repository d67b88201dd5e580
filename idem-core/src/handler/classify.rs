//! Whether trying again is of use.

/// Whether trying again is of use (R1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Disposition {
    /// Yes: a time-out, a lock, a service that is away.
    Transient,
    /// No: the message asks for something that cannot be done.
    Terminal,
}

/// Says of an error whether trying again is of use (R1). Derive it, or write it:
///
/// ```
/// use idem_core::{Classify, Disposition};
///
/// #[derive(Debug, thiserror::Error)]
/// enum GatewayError {
///     #[error("the gateway did not answer")]
///     NoAnswer,
///     #[error("the card was declined")]
///     Declined,
/// }
///
/// impl Classify for GatewayError {
///     fn disposition(&self) -> Disposition {
///         match self {
///             GatewayError::NoAnswer => Disposition::Transient,
///             GatewayError::Declined => Disposition::Terminal,
///         }
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say whether trying again is of use",
    label = "the error type of an `#[idempotent]` handler",
    note = "derive it with `#[derive(Classify)]`, or implement `Classify` for `{Self}`"
)]
pub trait Classify {
    /// The answer for this error.
    fn disposition(&self) -> Disposition;
}

/// Constraint violations and refused values stay wrong; everything else may pass: locks, time-outs, lost connections.
impl Classify for sqlx::Error {
    fn disposition(&self) -> Disposition {
        use sqlx::error::ErrorKind;
        match self {
            sqlx::Error::Database(error) => match error.kind() {
                ErrorKind::UniqueViolation
                | ErrorKind::ForeignKeyViolation
                | ErrorKind::NotNullViolation
                | ErrorKind::CheckViolation => Disposition::Terminal,
                // Class 22 of SQLSTATE: a value that is too long, out of range, of a wrong form.
                _ if error.code().is_some_and(|code| code.len() == 5 && code.starts_with("22")) => {
                    Disposition::Terminal
                }
                _ => Disposition::Transient,
            },
            sqlx::Error::RowNotFound
            | sqlx::Error::TypeNotFound { .. }
            | sqlx::Error::ColumnIndexOutOfBounds { .. }
            | sqlx::Error::ColumnNotFound(_)
            | sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::Encode(_)
            | sqlx::Error::Decode(_) => Disposition::Terminal,
            _ => Disposition::Transient,
        }
    }
}

impl Classify for std::io::Error {
    fn disposition(&self) -> Disposition {
        use std::io::ErrorKind;
        match self.kind() {
            ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::Unsupported => Disposition::Terminal,
            _ => Disposition::Transient,
        }
    }
}

impl Classify for serde_json::Error {
    fn disposition(&self) -> Disposition {
        if self.is_io() { Disposition::Transient } else { Disposition::Terminal }
    }
}

impl Classify for std::convert::Infallible {
    fn disposition(&self) -> Disposition {
        match *self {}
    }
}

impl<E: Classify + ?Sized> Classify for Box<E> {
    fn disposition(&self) -> Disposition {
        (**self).disposition()
    }
}
