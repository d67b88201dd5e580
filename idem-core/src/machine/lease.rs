//! When a lease has ended, and when its holder's handler must be gone.

use std::time::Duration;

use crate::timestamp::Timestamp;

/// Whether a lease still holds at `now`. Both instants are the database's; at `locked_until` it is over.
pub(super) fn is_alive(locked_until: Timestamp, now: Timestamp) -> bool {
    now < locked_until
}

/// When a handler must be stopped, as a time on this process's monotonic clock, measured from any fixed point of it.
///
/// The database counts the lease from when it handled the claim or renewal, which is not before the request was *sent*.
/// So a handler that is gone one lease after the last **confirmed** request was sent is gone before anyone can take over.
/// A margin leaves time for the stopping itself.
///
/// ```
/// use std::time::Duration;
/// use idem_core::machine::RunDeadline;
///
/// let second = Duration::from_secs(1);
/// let mut deadline = RunDeadline::claimed(10 * second, 30 * second, 300 * second);
/// assert!(deadline.at() < 40 * second);
/// deadline.renewed(20 * second);
/// assert!(deadline.at() > 40 * second && deadline.at() < 50 * second);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunDeadline {
    confirmed_sent: Duration,
    lease: Duration,
    ceiling: Duration,
}

impl RunDeadline {
    /// For a claim that was sent at `sent` and confirmed; the handler may run for `max_run` at most.
    pub fn claimed(sent: Duration, lease: Duration, max_run: Duration) -> Self {
        Self { confirmed_sent: sent, lease, ceiling: sent.saturating_add(max_run) }
    }

    /// A renewal that was sent at `sent` has been confirmed.
    pub fn renewed(&mut self, sent: Duration) {
        self.confirmed_sent = self.confirmed_sent.max(sent);
    }

    /// When the handler must be gone.
    pub fn at(&self) -> Duration {
        self.lease_end().min(self.ceiling)
    }

    /// Whether what ends at [`at`](Self::at) is the handler's own time rather than its lease.
    pub fn is_ceiling(&self) -> bool {
        self.ceiling <= self.lease_end()
    }

    /// How long a handler may go on after it was told to stop at [`at`](Self::at): half of what is then left of the lease.
    pub fn grace(&self) -> Duration {
        margin(self.lease) / 2
    }

    /// How long after a confirmed request the next renewal is due.
    pub fn renewal_interval(lease: Duration) -> Duration {
        lease / 3
    }

    fn lease_end(&self) -> Duration {
        self.confirmed_sent.saturating_add(self.lease - margin(self.lease))
    }
}

/// A tenth of the lease, at most two seconds.
fn margin(lease: Duration) -> Duration {
    (lease / 10).min(Duration::from_secs(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_lease_is_over_at_its_end() {
        let end = Timestamp::from_micros(10);
        assert!(is_alive(end, Timestamp::from_micros(9)));
        assert!(!is_alive(end, end));
    }

    #[test]
    fn the_handler_is_gone_before_a_takeover_is_possible() {
        let lease = 30 * SECOND;
        let mut deadline = RunDeadline::claimed(100 * SECOND, lease, 1000 * SECOND);
        assert!(deadline.at() + deadline.grace() < 100 * SECOND + lease);
        deadline.renewed(110 * SECOND);
        assert!(deadline.at() < 110 * SECOND + lease);
        deadline.renewed(105 * SECOND); // an answer that comes late takes nothing back
        assert!(deadline.at() > 105 * SECOND + lease);
    }

    #[test]
    fn the_margin_is_a_tenth_of_the_lease_and_at_most_two_seconds() {
        for (lease, stop_at, grace) in [
            (Duration::from_millis(300), Duration::from_millis(270), Duration::from_millis(15)),
            (10 * SECOND, 9 * SECOND, SECOND / 2),
            (20 * SECOND, 18 * SECOND, SECOND),
            (600 * SECOND, 598 * SECOND, SECOND),
        ] {
            let deadline = RunDeadline::claimed(Duration::ZERO, lease, 1000 * SECOND);
            assert_eq!((deadline.at(), deadline.grace()), (stop_at, grace), "{lease:?}");
        }
    }

    #[test]
    fn a_renewal_may_fail_twice() {
        let (lease, interval) = (30 * SECOND, RunDeadline::renewal_interval(30 * SECOND));
        assert_eq!(interval, 10 * SECOND);
        assert!(2 * interval < RunDeadline::claimed(Duration::ZERO, lease, 1000 * SECOND).at());
    }

    #[test]
    fn renewals_cannot_keep_a_handler_beyond_its_ceiling() {
        let mut deadline = RunDeadline::claimed(SECOND, 30 * SECOND, 60 * SECOND);
        assert!(!deadline.is_ceiling());
        deadline.renewed(50 * SECOND);
        assert_eq!(deadline.at(), 61 * SECOND);
        assert!(deadline.is_ceiling());
    }
}
