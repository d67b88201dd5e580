//! A run in numbers, as one JSON object.

use std::time::Duration;

use serde::Serialize;

use crate::verdict::Verdict;

/// The numbers of one command. What a command cannot know is `null`: a worker does not know how many orders there are.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Gains fields within a number, never loses or changes one.
    pub schema: &'static str,
    /// Records in the topic; for `run`, records received.
    pub messages: u64,
    /// Jobs that the topic asks for.
    pub distinct_jobs: Option<u64>,
    /// Effects that are there; for `run`, jobs completed.
    pub effects: u64,
    /// Messages that repeat a job and ask for the same; for `run`, duplicates skipped.
    pub duplicates: u64,
    /// Deliveries of a record whose job was done already, counted by the workers.
    pub redelivered: Option<u64>,
    /// Messages with a used key and another payload.
    pub conflicts: u64,
    /// Claims whose former holder's lease had run out, counted by the workers.
    pub takeovers: Option<u64>,
    /// Failed tries that were repeated, counted by the workers.
    pub retries: Option<u64>,
    /// Records with a dead letter.
    pub dead_letters: u64,
    /// Of those, records that could not ask for a job.
    pub rejected: u64,
    /// Jobs without effect, all of whose messages have a dead letter.
    pub jobs_set_aside: Option<u64>,
    /// Jobs without effect that nothing tells of.
    pub lost: Option<u64>,
    /// Effects beyond the first of their job.
    pub double_effects: Option<u64>,
    /// Workers that were killed.
    pub kills: Option<u64>,
    /// From the workers' start until everything was committed.
    pub seconds: Option<f64>,
    /// Messages in that time.
    pub messages_per_second: Option<f64>,
}

/// What workers counted, over how long.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// All workers together.
    pub workers: idem_kafka::Summary,
    /// Workers that were killed.
    pub kills: u64,
    /// From the workers' start until everything was committed.
    pub took: Duration,
}

impl Summary {
    /// What a check found, and what the workers counted if it is known.
    pub fn of_check(verdict: &Verdict, counted: Option<&Counted>) -> Self {
        let per_second = |counted: &Counted| rate(verdict.messages, counted.took);
        Self {
            schema: "idem.summary/1",
            messages: verdict.messages,
            distinct_jobs: Some(verdict.distinct_jobs),
            effects: verdict.effects,
            duplicates: verdict.duplicates(),
            redelivered: counted.map(|counted| counted.workers.duplicates_redelivered),
            conflicts: verdict.conflicts,
            takeovers: counted.map(|counted| counted.workers.takeovers),
            retries: counted.map(|counted| counted.workers.retries),
            dead_letters: verdict.dead_letters,
            rejected: verdict.rejected,
            jobs_set_aside: Some(verdict.jobs_set_aside),
            lost: Some(verdict.lost),
            double_effects: Some(verdict.double_effects),
            kills: counted.map(|counted| counted.kills),
            seconds: counted.map(|counted| seconds(counted.took)),
            messages_per_second: counted.and_then(per_second),
        }
    }

    /// What one worker counted.
    pub fn of_worker(counted: &Counted) -> Self {
        let Counted { workers, took, .. } = *counted;
        Self {
            schema: "idem.summary/1",
            messages: workers.received,
            distinct_jobs: None,
            effects: workers.completed,
            duplicates: workers.duplicates_redelivered + workers.duplicates_produced,
            redelivered: Some(workers.duplicates_redelivered),
            conflicts: workers.conflicts,
            takeovers: Some(workers.takeovers),
            retries: Some(workers.retries),
            dead_letters: workers.dead_letters,
            rejected: workers.rejected,
            jobs_set_aside: None,
            lost: None,
            double_effects: None,
            kills: None,
            seconds: Some(seconds(took)),
            messages_per_second: rate(workers.received, took),
        }
    }

    /// Writes it as one line on standard output.
    pub fn print(&self) {
        println!("{}", serde_json::json!(self));
    }
}

/// To the millisecond.
fn seconds(took: Duration) -> f64 {
    took.as_millis() as f64 / 1000.0
}

fn rate(messages: u64, took: Duration) -> Option<f64> {
    let seconds = took.as_secs_f64();
    (seconds > 0.0).then(|| (messages as f64 / seconds).round())
}
