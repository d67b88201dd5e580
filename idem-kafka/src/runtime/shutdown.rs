//! What asks a consumer to end, and how far it has come with ending.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Occurrence;
use crate::error::{Error, ErrorKind};

/// How long what was cut off may take to be gone.
pub(super) const AFTER_CUT: Duration = Duration::from_secs(2);
/// How long the last commit may take.
pub(super) const LAST_COMMIT: Duration = Duration::from_secs(5);

/// How far the consumer has come with ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing new begins; what runs may end until `until`.
    Draining { until: Instant },
    /// The deadline cut off what still ran, and it has until `until` to be gone.
    Cut { until: Instant },
    /// Offsets are on their way to the broker for the last time.
    Committing { until: Instant, cut: bool },
    /// Nothing is left to do.
    Done { cut: bool },
}

/// Moves on as far as it can now. Pure.
///
/// `busy`: handlers or dead letters are on their way. `unsaid`: offsets that the broker does not have yet.
pub(super) fn advance(stage: Stage, now: Instant, busy: bool, unsaid: bool) -> Stage {
    let commit = |cut| {
        if unsaid { Stage::Committing { until: now + LAST_COMMIT, cut } } else { Stage::Done { cut } }
    };
    match stage {
        Stage::Draining { .. } if !busy => commit(false),
        Stage::Draining { until } if now >= until => Stage::Cut { until: now + AFTER_CUT },
        Stage::Cut { until } if !busy || now >= until => commit(true),
        Stage::Committing { until, cut } if !unsaid || now >= until => Stage::Done { cut },
        stage => stage,
    }
}

/// When to look again.
pub(super) fn deadline(stage: Stage) -> Option<Instant> {
    match stage {
        Stage::Draining { until } | Stage::Cut { until } | Stage::Committing { until, .. } => Some(until),
        Stage::Done { .. } => None,
    }
}

/// Reports SIGTERM, SIGINT and the caller's own token. A second signal ends the process at once: whoever sends it does not
/// want to wait, and nothing is lost by it.
pub(super) fn listen(
    shutdown: CancellationToken,
    occurrences: UnboundedSender<Occurrence>,
) -> Result<ListenGuard, Error> {
    use tokio::signal::unix::{SignalKind, signal};
    let failed = |error| Error::with_cause(ErrorKind::Failed, "signals cannot be listened to", error);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let task = tokio::spawn(async move {
        let (mut asked, mut signals) = (false, 0);
        loop {
            let number = tokio::select! {
                _ = terminate.recv() => 15,
                _ = interrupt.recv() => 2,
                () = shutdown.cancelled(), if !asked => 0,
            };
            signals += i32::from(number != 0);
            if signals > 1 {
                std::process::exit(128 + number);
            }
            asked = true;
            occurrences.send(Occurrence::AskedToEnd).ok();
        }
    });
    Ok(ListenGuard(task.abort_handle()))
}

/// Ends the listening when dropped.
pub(super) struct ListenGuard(tokio::task::AbortHandle);

impl Drop for ListenGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use idem_core::{Clock, SystemClock};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ending_is_bounded_at_each_stage() {
        let now = SystemClock.monotonic();
        let later = now + Duration::from_secs(60);
        let draining = Stage::Draining { until: now + Duration::from_secs(25) };
        assert_eq!(advance(draining, now, true, true), draining);
        assert_eq!(advance(draining, now, false, false), Stage::Done { cut: false });
        let committing = advance(draining, now, false, true);
        assert_eq!(committing, Stage::Committing { until: now + LAST_COMMIT, cut: false });
        assert_eq!(advance(committing, now, false, true), committing);
        assert_eq!(advance(committing, now, false, false), Stage::Done { cut: false });
        assert_eq!(advance(committing, later, false, true), Stage::Done { cut: false });
        let cut = advance(draining, later, true, true);
        assert_eq!(cut, Stage::Cut { until: later + AFTER_CUT });
        assert_eq!(advance(cut, later + AFTER_CUT, true, false), Stage::Done { cut: true });
    }
}
