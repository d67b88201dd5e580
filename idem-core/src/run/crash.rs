//! The places where a crash can fall between two steps.

/// A place between two steps of [`run`](super). Tests stop the process at each of them and check the promise afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CrashPoint {
    /// Atomic: the transaction is open, nothing is claimed.
    Begun,
    /// The claims are made (lease: committed; atomic: inside the transaction), no handler has begun.
    Claimed,
    /// The handlers have returned, nothing is recorded.
    Handled,
    /// Atomic: everything is written, COMMIT is not sent.
    BeforeCommit,
    /// The outcome is durable, nobody has been told.
    Recorded,
}

impl CrashPoint {
    /// All of them, in their order.
    pub const ALL: [CrashPoint; 5] =
        [CrashPoint::Begun, CrashPoint::Claimed, CrashPoint::Handled, CrashPoint::BeforeCommit, CrashPoint::Recorded];

    /// Its name, as the environment variable of the tests has it.
    pub fn as_str(self) -> &'static str {
        match self {
            CrashPoint::Begun => "begun",
            CrashPoint::Claimed => "claimed",
            CrashPoint::Handled => "handled",
            CrashPoint::BeforeCommit => "before-commit",
            CrashPoint::Recorded => "recorded",
        }
    }

    /// Ends the process here, as SIGKILL would, if `IDEM_CRASH_AT=name:n` says so and this is the n-th time.
    #[cfg(feature = "test-util")]
    pub(super) fn pass(self) {
        use std::sync::OnceLock;
        use std::sync::atomic::{AtomicI64, Ordering};

        static PLAN: OnceLock<Option<(String, AtomicI64)>> = OnceLock::new();
        let plan = PLAN.get_or_init(|| {
            let plan = std::env::var("IDEM_CRASH_AT").ok()?;
            let (name, times) = plan.split_once(':').unwrap_or((&plan, "1"));
            Some((name.to_owned(), AtomicI64::new(times.parse().ok()?)))
        });
        if let Some((name, left)) = plan
            && name == self.as_str()
            && left.fetch_sub(1, Ordering::SeqCst) == 1
        {
            std::process::abort();
        }
    }

    #[cfg(not(feature = "test-util"))]
    pub(super) fn pass(self) {}
}
