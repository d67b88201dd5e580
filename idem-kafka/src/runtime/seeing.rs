//! What people see of an outcome: counters and log lines. Decides nothing.

use super::*;

impl Loop {
    pub(super) fn count(&self, outcome: &Outcome) {
        let stats = &self.stats;
        match outcome {
            Outcome::Completed { takeover, already_done, .. } => {
                stats.completed();
                if *takeover {
                    stats.takeovers();
                }
                match already_done {
                    Some(AlreadyDone::Domain) => stats.already_done(),
                    Some(AlreadyDone::Probe) => stats.found_by_probe(),
                    None => {}
                }
            }
            Outcome::Duplicate(DuplicateKind::Redelivery) => stats.duplicates_redelivered(),
            Outcome::Duplicate(DuplicateKind::Replay) => stats.duplicates_replayed(),
            Outcome::Duplicate(_) => stats.duplicates_produced(),
            Outcome::Conflict => stats.conflicts(),
            Outcome::InProgress { .. } => stats.in_progress(),
            Outcome::Failed { retry_in, .. } => {
                stats.failed();
                if retry_in.is_some() {
                    stats.retries();
                }
            }
            Outcome::LeaseLost => stats.lease_lost(),
            _ => {}
        }
    }

    /// Levels: what is normal is quiet.
    pub(super) fn log(&self, delivery: &Delivery, outcome: &Outcome) {
        let (key, id) = (delivery.key().as_str(), &**delivery.message_id());
        macro_rules! say {
            ($level:ident, $event:literal, $($field:tt)*) => {
                tracing::$level!(event = $event, idempotencyKey = key, messageId = id, $($field)*)
            };
        }
        match outcome {
            Outcome::Completed { attempt, takeover: true, .. } => {
                say!(warn, "idem.takeover", attempt, "completed after a takeover")
            }
            Outcome::Completed { attempt, already_done: Some(AlreadyDone::Probe), .. } => {
                say!(info, "idem.completed", attempt, "the probe found the effect of an earlier try; completed");
            }
            Outcome::Completed { attempt, already_done: Some(AlreadyDone::Domain), .. } => {
                say!(
                    error,
                    "idem.constraint_violation",
                    attempt,
                    "the domain says that the effect was there before; completed"
                );
            }
            Outcome::Completed { attempt, .. } => say!(info, "idem.completed", attempt, "completed"),
            Outcome::Duplicate(_) => say!(debug, "idem.duplicate", "duplicate"),
            Outcome::Conflict => say!(error, "idem.fingerprint_mismatch", "the key was used for another payload"),
            Outcome::InProgress { .. } => say!(info, "idem.in_progress", "another worker holds the job"),
            Outcome::NotDue { .. } => say!(debug, "idem.retry_scheduled", "not due yet"),
            Outcome::Failed { attempt, failure, .. } => {
                say!(warn, "idem.failed", attempt, errorKind = failure.kind.as_str(), errorMessage = %failure.message, "a try failed");
            }
            Outcome::Exhausted { attempts, .. } => {
                say!(warn, "idem.failed", attempts, "the job had failed for good before")
            }
            Outcome::LeaseLost => say!(error, "idem.lease_lost", "the job was taken over while its handler ran"),
            Outcome::Undecided(Undecided::Broken(error)) => {
                say!(error, "idem.failed", errorMessage = %describe(error), "the store refuses the guard's own statement; a person must look");
            }
            _ => {}
        }
    }
}
