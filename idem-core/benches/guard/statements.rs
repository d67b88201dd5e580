//! How many statements a job costs: read from the wire, not from the source.

use std::sync::Arc;

use idem_core::Guard;
use idem_core::store::{PgStore, StoreOptions};

use crate::Failure;
use crate::handlers::Kind;
use crate::report::Report;
use crate::tables::Tables;
use crate::wire::{Counts, Relay};
use crate::work::{BATCH, Expected, run};

/// How often each is counted. The highest count is reported.
const TIMES: usize = 5;

pub async fn measure(tables: &Tables, report: &mut Report) -> Result<(), Failure> {
    let table = tables.table("statements", 1000, false).await?;
    let relay = Relay::new(&table.url).await?;
    let guard = Guard::new(Arc::new(PgStore::connect(&relay.url, &StoreOptions::default()).await?));

    let kinds = [
        Kind::Lease,
        Kind::LeaseBatch,
        Kind::LeaseResult,
        Kind::LeaseLock,
        Kind::Atomic,
        Kind::AtomicBatch,
        Kind::AtomicResult,
        Kind::AtomicLock,
    ];
    let mut rows = Vec::new();
    for kind in kinds {
        let guarded = kind.bind(&guard)?;
        for size in [1, BATCH] {
            // Connections are opened, and settings sent, before anything is counted. More than once: one that was just given
            // back may be late, and another one opened for it.
            for _ in 0..TIMES {
                run(&guarded, table.fresh(size), Expected::Completed).await?;
            }
            let (mut fresh, mut again) = (Counts::default(), Counts::default());
            for _ in 0..TIMES {
                let numbers = table.fresh(size);
                relay.take();
                run(&guarded, numbers.clone(), Expected::Completed).await?;
                fresh = fresh.max(relay.take());
                run(&guarded, numbers, Expected::Duplicate).await?;
                again = again.max(relay.take());
            }
            for (what, counts) in [("fresh", fresh), ("duplicates", again)] {
                rows.push(row(kind, size, what, counts));
            }
            judge(report, kind, size, fresh, again);
        }
    }
    let columns = ["handler", "messages", "", "guard's", "BEGIN and COMMIT", "handler's own"];
    report.section("Statements", &columns, rows);
    Ok(())
}

fn row(kind: Kind, size: u64, what: &str, counts: Counts) -> Vec<String> {
    let numbers = [counts.guard, counts.transaction, counts.handler].map(|number| number.to_string());
    let [guard, transaction, handler] = numbers;
    vec![kind.name().to_owned(), size.to_string(), what.to_owned(), guard, transaction, handler]
}

fn judge(report: &mut Report, kind: Kind, size: u64, fresh: Counts, again: Counts) {
    let mut most = |what: &str, wanted: u32, measured: u64| {
        report.at_most(&format!("statements: {}, {size} {what}", kind.name()), wanted.into(), measured as f64);
    };
    match kind {
        Kind::Lease if size == 1 => most("fresh", 2, fresh.guard),
        // Handlers of single messages end when they end: those that are late go with a second statement or a third.
        Kind::Lease => most("fresh", 4, fresh.guard),
        Kind::LeaseBatch => {
            most("fresh", 2, fresh.guard);
            most("duplicate", 2, again.guard);
        }
        Kind::Atomic | Kind::AtomicBatch => {
            most("fresh", 1, fresh.guard);
            most("duplicate", 2, again.guard);
            most("fresh, BEGIN and COMMIT", 2, fresh.transaction);
        }
        Kind::LeaseResult | Kind::LeaseLock | Kind::AtomicResult | Kind::AtomicLock => {}
    }
}
