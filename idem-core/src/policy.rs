//! What a consumer allows its jobs: lease, attempts, back-off, running time.

use std::time::Duration;

/// The limits of one consumer's jobs.
///
/// ```
/// use std::time::Duration;
/// use idem_core::Policy;
///
/// let policy = Policy::default().lease(Duration::from_secs(120)).attempts(5).build()?;
/// assert_eq!(policy.attempts, 5);
/// assert!(Policy::default().attempts(0).lease(Duration::ZERO).build().is_err());
/// # Ok::<(), idem_core::PolicyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Policy {
    /// How long a claim holds without renewal (L1). It is renewed every third of this while the handler runs (L2), and a
    /// crashed worker's job can be taken over after it (L3).
    ///
    /// Default 30 s: renewals make a longer one needless, and a crash costs its jobs this much delay.
    pub lease: Duration,
    /// How often a job may be tried before it is set aside (R2). Default 12: with the default back-off two to four minutes,
    /// so that a service which is restarted meanwhile costs no job its last try.
    pub attempts: u32,
    /// Waits between tries. Default from 250 ms up to 1 min.
    pub backoff: Backoff,
    /// How long one run of a handler may take before it is stopped and counted as failed. Default 5 min: an end to a
    /// handler that hangs and would otherwise live on its own renewals.
    pub max_run: Duration,
}

/// Exponential back-off with jitter: the wait after the n-th failed try is between half and the whole of
/// `base × 2^(n-1)`, at most `cap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The longest wait after the first failure.
    pub base: Duration,
    /// The longest wait after any failure.
    pub cap: Duration,
}

/// The shortest lease: below it, ordinary scheduling delays would cost leases.
pub const MIN_LEASE: Duration = Duration::from_millis(300);
/// The longest lease and running time: a day and a job that hangs is noticed.
pub const MAX_LEASE: Duration = Duration::from_secs(24 * 3600);

/// Every clash of a [`Policy`], each naming its settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .clashes.join("; "))]
pub struct PolicyError {
    /// One sentence each.
    pub clashes: Vec<String>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            attempts: 12,
            backoff: Backoff { base: Duration::from_millis(250), cap: Duration::from_secs(60) },
            max_run: Duration::from_secs(300),
        }
    }
}

impl Policy {
    /// Sets how long a claim holds without renewal.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets how often a job may be tried.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the waits between tries.
    pub fn backoff(mut self, base: Duration, cap: Duration) -> Self {
        self.backoff = Backoff { base, cap };
        self
    }

    /// Sets how long one run of a handler may take.
    pub fn max_run(mut self, max_run: Duration) -> Self {
        self.max_run = max_run;
        self
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    /// All clashes at once.
    pub fn build(self) -> Result<Self, PolicyError> {
        let mut clashes = Vec::new();
        if self.lease < MIN_LEASE || self.lease > MAX_LEASE {
            clashes.push(format!("lease {:?} is not between {MIN_LEASE:?} and {MAX_LEASE:?}", self.lease));
        }
        if self.attempts == 0 {
            clashes.push("attempts is 0: no job would ever run".to_owned());
        }
        if self.backoff.base > self.backoff.cap {
            clashes.push(format!("backoff starts at {:?}, above its cap {:?}", self.backoff.base, self.backoff.cap));
        }
        if self.max_run.is_zero() || self.max_run > MAX_LEASE {
            clashes.push(format!("max_run {:?} is not between zero and {MAX_LEASE:?}", self.max_run));
        }
        if clashes.is_empty() { Ok(self) } else { Err(PolicyError { clashes }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clash_is_reported_at_once() {
        let second = Duration::from_secs(1);
        let policy =
            Policy::default().lease(Duration::ZERO).attempts(0).backoff(second, Duration::ZERO).max_run(Duration::ZERO);
        assert_eq!(policy.build().unwrap_err().clashes.len(), 4);
        assert!(Policy::default().build().is_ok());
    }
}
