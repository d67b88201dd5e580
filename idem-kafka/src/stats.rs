//! What a consumer has done so far, in numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Live counters of a running [`App`](crate::App). Cheap to clone; all clones count together.
#[derive(Clone, Debug, Default)]
pub struct Stats(Arc<Counters>);

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        struct Counters {
            $($name: AtomicU64,)*
        }

        /// The counters at one moment. They count what this process saw: a process that was killed takes its own along.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        #[non_exhaustive]
        pub struct Summary {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// The counters now.
            pub fn snapshot(&self) -> Summary {
                Summary { $($name: self.0.$name.load(Ordering::Relaxed),)* }
            }

            $(pub(crate) fn $name(&self) {
                self.0.$name.fetch_add(1, Ordering::Relaxed);
            })*
        }

        impl Summary {
            /// These and `other`'s together.
            pub fn plus(self, other: Summary) -> Summary {
                Summary { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

counters! {
    /// Records received, each delivery once.
    received,
    /// Jobs completed here.
    completed,
    /// Of those, claims whose former holder's lease had run out.
    takeovers,
    /// Of those, effects that the domain's own UNIQUE constraint said were there before.
    already_done,
    /// Of those, effects that the handler's probe found.
    found_by_probe,
    /// Duplicates skipped: the very delivery that made the row.
    duplicates_redelivered,
    /// Duplicates skipped: another message for the same job.
    duplicates_produced,
    /// Duplicates skipped: a message that an operator sent again.
    duplicates_replayed,
    /// Messages with a used key and another payload.
    conflicts,
    /// Claims that found another worker's living lease.
    in_progress,
    /// Tries that failed.
    failed,
    /// Failed tries that will be repeated.
    retries,
    /// Claims that were taken over while the handler ran here.
    lease_lost,
    /// Records whose dead letter was acknowledged.
    dead_letters,
    /// Of those, records that could not ask for a job: undecodable, or without a usable key.
    rejected,
    /// Times the store was found away.
    outages,
    /// Offset commits that the broker acknowledged.
    offset_commits,
    /// Offset commits that the broker refused, to be repeated.
    offset_commits_refused,
}
