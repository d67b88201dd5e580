//! How long to wait before the next try.

use std::time::Duration;

use crate::policy::Backoff;

/// The wait after failed try number `attempt` (from 1): between half and the whole of `base × 2^(attempt-1)`, at most
/// `cap`; `random` of 0 to 1 chooses.
///
/// The jitter keeps jobs that failed together from coming back together. It has a floor, so that the tries of a job span a
/// time that can be relied on: with a wait drawn from zero, all of them may be used up within seconds of an outage.
///
/// ```
/// use std::time::Duration;
/// use idem_core::Backoff;
/// use idem_core::machine::backoff;
///
/// let policy = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(5) };
/// assert_eq!(backoff(&policy, 1, 1.0), Duration::from_secs(1));
/// assert_eq!(backoff(&policy, 3, 0.5), Duration::from_secs(3));
/// assert_eq!(backoff(&policy, 3, 0.0), Duration::from_secs(2));
/// assert_eq!(backoff(&policy, 60, 1.0), Duration::from_secs(5));
/// ```
pub fn backoff(policy: &Backoff, attempt: u32, random: f64) -> Duration {
    let doublings = attempt.saturating_sub(1).min(31);
    let longest = policy.base.saturating_mul(1 << doublings).min(policy.cap);
    longest.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_cap_and_keep_a_floor_of_half() {
        let seconds = Duration::from_secs;
        let policy = Backoff { base: seconds(2), cap: seconds(50) };
        for (attempt, longest) in [(0, 2), (1, 2), (2, 4), (3, 8), (5, 32), (6, 50), (40, 50), (u32::MAX, 50)] {
            let wait = |random| backoff(&policy, attempt, random);
            assert_eq!(wait(1.0), seconds(longest), "{attempt}");
            assert_eq!(wait(0.5), seconds(longest).mul_f64(0.75), "{attempt}");
            assert_eq!(wait(0.0), seconds(longest) / 2, "{attempt}");
            assert_eq!((wait(-1.0), wait(2.0)), (wait(0.0), wait(1.0)), "{attempt}");
        }
    }
}
