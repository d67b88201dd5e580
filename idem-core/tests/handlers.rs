//! What handlers ask of the guard beyond a claim: results, probes, locks, completion in their own transaction, batches, and
//! care for messages that kill their process.

#[path = "handlers/bench.rs"]
mod bench;
#[path = "stores/subjects.rs"]
mod subjects;
#[path = "handlers/watched.rs"]
mod watched;

#[path = "handlers/results.rs"]
mod results;

#[path = "handlers/duplicates.rs"]
mod duplicates;

#[path = "handlers/probe.rs"]
mod probe;

#[path = "handlers/locks.rs"]
mod locks;

#[path = "handlers/hybrid.rs"]
mod hybrid;

#[path = "handlers/batches.rs"]
mod batches;

#[path = "handlers/careful.rs"]
mod careful;

#[path = "handlers/leases.rs"]
mod leases;

#[path = "handlers/retention.rs"]
mod retention;

/// Not a test of its own: what a child process does, for the tests that kill one. Without its task it has nothing to do.
#[tokio::test]
async fn child() {
    match bench::task() {
        Some(bench::Task::Careful(task)) => careful::work(task).await,
        Some(bench::Task::Hybrid(task)) => hybrid::work(task).await,
        None => {}
    }
}
