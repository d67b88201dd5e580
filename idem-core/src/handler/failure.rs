//! A try that failed, without the handler's own types.

use std::any::Any;
use std::error::Error as StdError;
use std::time::Duration;

use super::{Classify, Disposition};

/// The longest error text that is kept, in bytes: enough to see what happened, small enough for a row and a header.
pub const MAX_ERROR_BYTES: usize = 1024;

/// A failed try, without the handler's own types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandlerFailure {
    /// How it ended.
    pub kind: FailureKind,
    /// The error and its causes, at most [`MAX_ERROR_BYTES`].
    pub message: String,
    /// The UNIQUE constraint that the handler's own statement violated, if that is what happened.
    pub violated: Option<UniqueViolation>,
}

/// How a try ended without its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The handler returned an error that may pass.
    Transient,
    /// The handler returned an error that stays.
    Terminal,
    /// The handler panicked. It may pass.
    Panicked,
    /// The handler ran longer than its `max_run`. It may pass.
    Timeout,
}

impl FailureKind {
    /// Whether trying again is of use.
    pub fn disposition(self) -> Disposition {
        match self {
            FailureKind::Terminal => Disposition::Terminal,
            FailureKind::Transient | FailureKind::Panicked | FailureKind::Timeout => Disposition::Transient,
        }
    }

    /// As it stands in logs, headers and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            FailureKind::Transient => "transient",
            FailureKind::Terminal => "terminal",
            FailureKind::Panicked => "panicked",
            FailureKind::Timeout => "timeout",
        }
    }
}

/// A UNIQUE constraint of the application's own tables said that the effect is already there (T3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UniqueViolation {
    /// Its name where the engine tells it (PostgreSQL), else its columns as `table.column, table.column` (SQLite).
    pub constraint: String,
}

impl HandlerFailure {
    /// What a handler returned.
    pub fn from_error<E: StdError + Classify + 'static>(error: &E) -> Self {
        let kind = match error.disposition() {
            Disposition::Transient => FailureKind::Transient,
            Disposition::Terminal => FailureKind::Terminal,
        };
        Self { kind, message: with_causes(error), violated: crate::store::unique_violation(error) }
    }

    /// A panic, with what it said.
    pub fn from_panic(payload: &(dyn Any + Send)) -> Self {
        let said = payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no text".to_owned());
        Self { kind: FailureKind::Panicked, message: capped(format!("the handler panicked: {said}")), violated: None }
    }

    /// The engine refused to keep what the handler did, at the end of its transaction.
    pub(crate) fn from_refused_commit(error: &(dyn StdError + 'static)) -> Self {
        let message = format!(
            "the transaction was refused, so a statement failed whose error was hidden, or a constraint \
            that is checked at its end is violated: {}",
            with_causes(error)
        );
        Self { kind: FailureKind::Transient, message: capped(message), violated: crate::store::unique_violation(error) }
    }

    /// The handler's connection was lost each time it ran, while the store answered others.
    pub(crate) fn from_cut_connection(error: &(dyn StdError + 'static)) -> Self {
        let message = format!("the connection is lost whenever the handler runs: {}", with_causes(error));
        Self { kind: FailureKind::Transient, message: capped(message), violated: None }
    }

    /// The handler returned, but the transaction in which it completed its job itself was not committed.
    pub(crate) fn from_uncommitted_completion() -> Self {
        let message =
            "the handler returned without committing the transaction in which it completed its job".to_owned();
        Self { kind: FailureKind::Transient, message, violated: None }
    }

    /// A handler that was stopped at its `max_run`.
    pub fn timeout(max_run: Duration) -> Self {
        Self {
            kind: FailureKind::Timeout,
            message: format!("the handler ran longer than max_run ({})", humantime::format_duration(max_run)),
            violated: None,
        }
    }
}

/// The error's text and its causes', each once, joined by `: `.
pub(crate) fn with_causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
        if text.len() > MAX_ERROR_BYTES {
            break;
        }
    }
    capped(text)
}

/// Cuts at a character's edge. NUL characters, which PostgreSQL cannot store, become spaces.
pub(crate) fn capped(mut text: String) -> String {
    if text.contains('\0') {
        text = text.replace('\0', " ");
    }
    if text.len() > MAX_ERROR_BYTES {
        let end = (0..=MAX_ERROR_BYTES - '…'.len_utf8()).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_are_bounded_and_storable() {
        let long = capped("é".repeat(2000));
        assert!(long.len() <= MAX_ERROR_BYTES && long.ends_with('…'));
        assert_eq!(capped("a\0b".into()), "a b");
    }
}
