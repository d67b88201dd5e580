//! Duplicates in batches against fresh messages in batches.

use crate::Failure;
use crate::args::Args;
use crate::growth::Figures;
use crate::handlers::Kind;
use crate::report::{Report, median};
use crate::tables::{Table, Tables};
use crate::work::{BATCH, Done, Expected, Source, Variant, run};

/// Rows that are there before, and batches that are completed first to be asked for again.
const ROWS: u64 = 100_000;
const BATCHES: u64 = 200;

pub async fn measure(args: &Args, tables: &Tables, report: &mut Report) -> Result<(), Failure> {
    let table = tables.table("duplicates", ROWS, false).await?;
    let mut rows = Vec::new();
    for kind in [Kind::Lease, Kind::LeaseBatch, Kind::Atomic, Kind::AtomicBatch] {
        rows.extend(of_kind(args, report, &table, kind).await?);
    }
    table.note_progress().await?;
    report.section("Duplicates in batches of 128", &["handler", "messages", "a second", "to fresh"], rows);
    Ok(())
}

async fn of_kind(args: &Args, report: &mut Report, table: &Table, kind: Kind) -> Result<Vec<Vec<String>>, Failure> {
    let guarded = table.bind(kind)?;
    let completed = table.fresh(BATCHES * BATCH);
    for first in completed.clone().step_by(BATCH as usize) {
        run(&guarded, first..first + BATCH, Expected::Completed).await?;
    }
    let done = || Done::new(completed.clone());
    let few = Done::new(completed.start..completed.start + 4 * BATCH);
    let sources = [
        ("fresh", Source::Fresh),
        ("duplicates of 25600 jobs", Source::Duplicates(done())),
        ("duplicates of 512 jobs, all counted", Source::Duplicates(few)),
        ("duplicates, only the store asked, nothing counted", Source::DuplicatesOfStore(done())),
    ];
    let variant =
        |(name, source): (&str, Source)| Variant { name: name.to_owned(), table, guarded: guarded.clone(), source };
    let variants = sources.map(variant);
    let mut figures: Vec<Figures> = variants.iter().map(|_| Figures::default()).collect();
    for _ in 0..args.rounds() {
        for (variant, figures) in variants.iter().zip(&mut figures) {
            figures.rates.push(variant.slice().await?.rate());
        }
    }
    let mut rows = Vec::new();
    for (variant, these) in variants.iter().zip(&figures) {
        let ratio = these.against(&figures[0]);
        let rate = format!("{:.0}", median(these.rates.clone()));
        rows.push(vec![kind.name().to_owned(), variant.name.clone(), rate, format!("{ratio:.2}")]);
        if matches!(variant.source, Source::Duplicates(_)) {
            report.at_least(&format!("rate against fresh: {}, {}", kind.name(), variant.name), 3.0, ratio);
        }
    }
    Ok(rows)
}
