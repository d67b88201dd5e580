//! One batch: runs it behind the guard and reports.

use std::sync::Mutex;

use idem_core::{Clock, Delivery, Guarded, Mode, Outcome, Report, SystemClock};
use tokio::sync::mpsc::UnboundedSender;
use tokio_util::sync::CancellationToken;

use super::Occurrence;

/// Runs `deliveries`, all of one handler. Outcomes are reported as they are decided: in atomic mode all at once.
pub(super) async fn run(
    route: usize,
    guarded: Guarded,
    deliveries: Vec<Delivery>,
    stop: CancellationToken,
    occurrences: UnboundedSender<Occurrence>,
) {
    let messages = deliveries.len();
    let started = SystemClock.monotonic();
    let reporter = Reporter {
        route,
        together: guarded.spec().mode == Mode::Atomic,
        decided: Mutex::new(Vec::with_capacity(messages)),
        occurrences,
    };
    guarded.run(deliveries, &stop, &reporter).await;
    reporter.flush();
    let elapsed = SystemClock.monotonic().duration_since(started);
    // The loop ends only after all batches, or because it was dropped: then nobody needs to know.
    reporter.occurrences.send(Occurrence::BatchEnded { route, messages, elapsed }).ok();
}

struct Reporter {
    route: usize,
    together: bool,
    decided: Mutex<Vec<(Delivery, Outcome)>>,
    occurrences: UnboundedSender<Occurrence>,
}

impl Reporter {
    fn flush(&self) {
        let decided = std::mem::take(&mut *self.decided.lock().expect("nothing panics while it is held"));
        if !decided.is_empty() {
            self.occurrences.send(Occurrence::Decided(decided)).ok();
        }
    }
}

impl Report for Reporter {
    fn decided(&self, delivery: Delivery, outcome: Outcome) {
        self.decided.lock().expect("nothing panics while it is held").push((delivery, outcome));
        if !self.together {
            self.flush();
        }
    }

    fn claimed(&self) {
        self.occurrences.send(Occurrence::Claimed { route: self.route }).ok();
    }
}
