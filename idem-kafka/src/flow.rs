//! PURE: how much may be read ahead, taken together, and how long to wait.

use std::time::Duration;

/// How much more a restart may have to read again than is undecided, as a multiple of the records in memory: one slow key
/// must not stop its partition at once, nor let it run ahead without end.
const SPAN_FACTOR: usize = 10;

/// Whether more of a partition may be read.
///
/// `undecided` and `span` are the partition's; `bytes` is what all partitions hold in memory.
pub(crate) fn may_read(undecided: usize, span: usize, bytes: usize, run_ahead: usize, run_ahead_bytes: usize) -> bool {
    undecided < run_ahead && span < longest_span(run_ahead) && bytes < run_ahead_bytes
}

/// How far beyond the first undecided record of a partition any other may be that was read.
pub(crate) fn longest_span(run_ahead: usize) -> usize {
    run_ahead.saturating_mul(SPAN_FACTOR)
}

/// How many messages share a transaction: as many as there are, but no more than fit into a short one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchSize {
    most: usize,
    /// What one message took lately, smoothed.
    per_message: Duration,
}

/// A transaction should not hold its locks and its connection for longer.
const SHORT: Duration = Duration::from_millis(250);

impl BatchSize {
    pub fn new(most: usize) -> Self {
        Self { most, per_message: Duration::ZERO }
    }

    /// A batch of `messages` took `elapsed`.
    pub fn measured(&mut self, messages: usize, elapsed: Duration) {
        let Ok(messages) = u32::try_from(messages.max(1)) else { return };
        self.per_message = (self.per_message * 3 + elapsed / messages) / 4;
    }

    /// How many of `ready` messages to take for one of `free` transactions: shared out, so that a few messages do not wait
    /// for each other while transactions stand idle.
    pub fn next(&self, ready: usize, free: usize) -> usize {
        let fitting = match self.per_message.as_nanos() {
            0 => self.most,
            nanos => usize::try_from(SHORT.as_nanos() / nanos).unwrap_or(self.most),
        };
        ready.div_ceil(free.max(1)).min(fitting.clamp(1, self.most))
    }
}

/// How long to wait before asking again for a job that another worker holds: gently longer each time, no longer than its
/// lease, and never all at once (`random` is 0 to 1).
pub(crate) fn in_progress_wait(lease_left: Duration, times: u32, random: f64) -> Duration {
    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(2);
    let step = FIRST.saturating_mul(1 << times.min(10)).min(LONGEST);
    step.mul_f64(0.5 + random / 2.0).min(lease_left.max(FIRST))
}

/// How long to wait between two looks at a store that is away: from 100 ms, doubling to 5 s, with jitter.
pub(crate) fn probe_wait(times: u32, random: f64) -> Duration {
    let longest = Duration::from_millis(100).saturating_mul(1 << times.min(10)).min(Duration::from_secs(5));
    longest.mul_f64(0.5 + random / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bound_stops_reading() {
        assert!(may_read(9, 99, 999, 10, 1000));
        assert!(!may_read(10, 10, 0, 10, 1000));
        assert!(!may_read(1, 100, 0, 10, 1000), "one slow key cannot grow memory");
        assert!(!may_read(0, 0, 1000, 10, 1000));
    }

    #[test]
    fn a_lone_message_never_waits_for_company() {
        let size = BatchSize::new(128);
        assert_eq!(size.next(1, 4), 1);
        assert_eq!(size.next(4, 4), 1);
        assert_eq!(size.next(100, 4), 25);
        assert_eq!(size.next(1000, 4), 128);
    }

    #[test]
    fn slow_handlers_shrink_their_batches() {
        let mut size = BatchSize::new(128);
        for _ in 0..20 {
            size.measured(1, Duration::from_secs(1));
        }
        assert_eq!(size.next(1000, 1), 1);
        for _ in 0..40 {
            size.measured(100, Duration::from_millis(100));
        }
        assert_eq!(size.next(1000, 1), 128);
    }

    #[test]
    fn waits_are_bounded() {
        for times in [0, 1, 5, 100] {
            assert!(in_progress_wait(Duration::from_secs(300), times, 1.0) <= Duration::from_secs(2));
            assert!(probe_wait(times, 1.0) <= Duration::from_secs(5));
            assert!(probe_wait(times, 0.0) >= Duration::from_millis(50));
        }
        assert_eq!(in_progress_wait(Duration::ZERO, 9, 1.0), Duration::from_millis(50));
    }
}
