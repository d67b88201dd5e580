//! One call of a handler under a lease: its probe first, where an earlier try may have had the effect.

use std::sync::Arc;

use crate::handler::{FailureKind, HandlerFailure, Job, Output, Probe};
use crate::machine::{Run, RunKind};
use crate::run::{Delivery, Inner, caught};

/// How a call ended without failing.
#[derive(Clone, Debug)]
pub(super) enum Handled {
    /// The handler ran.
    Ran(Output),
    /// It did not need to: the probe found its effect.
    Found,
}

pub(super) type CallResult = Result<Handled, HandlerFailure>;

/// The events of one call, with what each is for.
pub(super) struct HandlerCall {
    jobs: Vec<Job>,
    events: Vec<crate::delivery::RawEvent>,
    /// What the probe reads the event from, if it is to be asked.
    probed: Option<crate::delivery::Payload>,
}

impl HandlerCall {
    /// For these jobs, whose deliveries give up their events.
    pub(super) fn new<'d>(
        inner: &Inner,
        jobs: Vec<Job>,
        deliveries: impl Iterator<Item = (&'d mut Delivery, &'d Run)>,
    ) -> Self {
        let mut probed = None;
        let events = deliveries
            .map(|(delivery, run)| {
                // Asked of single jobs only: the attribute refuses a probe for batches.
                if inner.spec.probe && may_have_had_its_effect(run) {
                    probed = Some(Arc::clone(delivery.payload()));
                }
                delivery.take_event()
            })
            .collect();
        Self { jobs, events, probed }
    }

    /// Runs it to its end.
    pub(super) async fn run(self, inner: Arc<Inner>) -> CallResult {
        let states = &inner.guard.states;
        if let (Some(payload), Some(job)) = (self.probed, self.jobs.first()) {
            match caught(inner.handler.probe(job, payload, states)).await? {
                Probe::Done => return Ok(Handled::Found),
                Probe::NotDone => {}
                Probe::Unknown => return Err(unknown()),
            }
        }
        caught(inner.handler.call(&self.jobs, self.events, None, states)).await.map(Handled::Ran)
    }
}

fn may_have_had_its_effect(run: &Run) -> bool {
    match run.kind {
        RunKind::Fresh => false,
        RunKind::Retry | RunKind::Takeover => true,
    }
}

/// For a person: to try again could do it twice, not to try could leave it undone.
fn unknown() -> HandlerFailure {
    HandlerFailure {
        kind: FailureKind::Terminal,
        message: "the probe could not tell whether an earlier try had its effect".to_owned(),
        violated: None,
    }
}
