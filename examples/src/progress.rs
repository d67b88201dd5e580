//! A live bar on standard error, if that is a terminal.

use std::fmt::Write as _;

use idem_kafka::Summary;
use indicatif::{ProgressBar, ProgressStyle};

use crate::group::Committed;
use crate::table::grouped;

/// The bar. Gone when it is dropped.
pub struct Progress {
    bar: ProgressBar,
    effects: &'static str,
}

impl Progress {
    /// A bar for so many messages. Hidden by itself where standard error is no terminal.
    pub fn new(messages: u64, effects: &'static str) -> Self {
        let bar = ProgressBar::new(messages);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3} %  {elapsed:>3}  {msg}") {
            bar.set_style(style);
        }
        Self { bar, effects }
    }

    /// Shows where the group is, and what the workers have counted so far.
    pub fn show(&self, committed: Committed, workers: &Summary, kills: u64) {
        let mut text = format!("{} {}", self.effects, grouped(workers.completed));
        let duplicates = workers.duplicates_redelivered + workers.duplicates_produced;
        for (count, name) in [
            (duplicates, "duplicates"),
            (workers.conflicts, "conflicts"),
            (workers.retries, "retries"),
            (workers.takeovers, "takeovers"),
            (kills, "killed"),
        ] {
            if count > 0 {
                // Writing to a `String` cannot fail.
                let _ = write!(text, " · {name} {}", grouped(count));
            }
        }
        self.bar.set_position(committed.done);
        self.bar.set_message(text);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
