//! How long to wait before the next try.

use std::time::Duration;

use crate::policy::Backoff;

/// The wait after failed try number `attempt` (from 1): `random` of 0 to 1, as a share of `base × 2^(attempt-1)`, at
/// most `cap`.
///
/// Full jitter: jobs that failed together do not come back together.
///
/// ```
/// use std::time::Duration;
/// use idem_core::Backoff;
/// use idem_core::machine::backoff;
///
/// let policy = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(5) };
/// assert_eq!(backoff(&policy, 1, 1.0), Duration::from_secs(1));
/// assert_eq!(backoff(&policy, 3, 0.5), Duration::from_secs(2));
/// assert_eq!(backoff(&policy, 60, 1.0), Duration::from_secs(5));
/// ```
pub fn backoff(policy: &Backoff, attempt: u32, random: f64) -> Duration {
    let doublings = attempt.saturating_sub(1).min(31);
    let longest = policy.base.saturating_mul(1 << doublings).min(policy.cap);
    longest.mul_f64(random.clamp(0.0, 1.0))
}
