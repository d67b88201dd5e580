//! Whether the guard becomes slower as its table grows, and what its index costs for each row.

use crate::Failure;
use crate::args::Args;
use crate::handlers::{CONSUMER, Kind};
use crate::report::{Report, median};
use crate::tables::{Table, Tables, key};
use crate::work::{Source, Variant};

/// Rows of the table that the others are compared with.
const SMALL: u64 = 10_000;

pub async fn measure(args: &Args, tables: &Tables, report: &mut Report) -> Result<(), Failure> {
    let small = tables.table("small", SMALL, false).await?;
    let huge = tables.table("huge", args.rows, false).await?;
    let parts = tables.table("parts", args.rows, true).await?;

    let mut sizes = Vec::new();
    for (table, what) in [(&huge, "whole"), (&parts, "in 16 parts")] {
        sizes.push(size(report, table, &format!("keys in no order, {what}"), RANDOM).await?);
    }
    report.section("Index", &["rows", "number", "bytes for each", "theory", "measured to theory"], sizes);

    let all = [&small, &huge, &parts];
    rates(args, tables, report, Kind::Lease, State::JustCheckpointed, all).await?;
    // From here on most pages have had their image in the log, as they have most of the time between two checkpoints.
    for table in [&huge, &parts] {
        table.fill(args.rows / 16).await?;
    }
    for kind in [Kind::Lease, Kind::LeaseBatch, Kind::Atomic, Kind::AtomicBatch] {
        rates(args, tables, report, kind, State::Settled, all).await?;
    }
    for table in [&huge, &parts] {
        table.note_progress().await?;
    }
    Ok(())
}

/// How full the pages of a B-tree are when its keys came in no order, and when it was built of sorted ones.
pub const RANDOM: f64 = 0.69;
pub const SORTED: f64 = 0.90;

/// Bytes of the primary key for each row: a header of 8, the two texts with one byte of length each, rounded up to 8, and
/// four of the page's directory; in pages that are filled so far.
pub fn theory(fill: f64) -> f64 {
    let texts = 1 + CONSUMER.len() + 1 + key(0).len();
    ((8 + texts).next_multiple_of(8) + 4) as f64 / fill
}

/// A row of the table of index sizes.
pub async fn size(report: &mut Report, table: &Table, what: &str, fill: f64) -> Result<Vec<String>, Failure> {
    let (rows, bytes) = (table.row_count().await?, table.key_bytes().await?);
    let each = bytes as f64 / rows as f64;
    let ratio = each / theory(fill);
    report.at_most(&format!("bytes of index against theory: {what}"), 0.15, (ratio - 1.0).abs());
    Ok(vec![
        what.to_owned(),
        rows.to_string(),
        format!("{each:.1}"),
        format!("{:.1}", theory(fill)),
        format!("{ratio:.2}"),
    ])
}

/// The first change of a page after a checkpoint writes all of the page to the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    JustCheckpointed,
    Settled,
}

/// Fresh jobs in batches, on each table in turn.
async fn rates(
    args: &Args,
    tables: &Tables,
    report: &mut Report,
    kind: Kind,
    state: State,
    of: [&Table; 3],
) -> Result<(), Failure> {
    let mut variants = Vec::new();
    for table in of {
        variants.push(Variant {
            name: table.name.to_owned(),
            table,
            guarded: table.bind(kind)?,
            source: Source::Fresh,
        });
    }
    let mut figures: Vec<Figures> = variants.iter().map(|_| Figures::default()).collect();
    for _ in 0..args.rounds() {
        // It would have grown several times over.
        of[0].restore(SMALL).await?;
        for (variant, figures) in variants.iter().zip(&mut figures) {
            if state == State::JustCheckpointed {
                tables.checkpoint().await?;
            }
            let before = tables.wal().await?;
            let slice = variant.slice().await?;
            figures.rates.push(slice.rate());
            figures.wal.push((tables.wal().await? - before) as f64 / slice.jobs as f64);
        }
    }
    let when = match state {
        State::JustCheckpointed => "right after a checkpoint",
        State::Settled => "between checkpoints",
    };
    let mut rows = Vec::new();
    for (variant, these) in variants.iter().zip(&figures) {
        let ratio = these.against(&figures[0]);
        rows.push(vec![
            variant.name.clone(),
            format!("{:.0}", median(these.rates.clone())),
            format!("{:.0}", median(these.wal.clone())),
            format!("{ratio:.2}"),
        ]);
        if state == State::Settled && !std::ptr::eq(variant.table, of[0]) {
            report.at_least(&format!("rate on {} against small: {}", variant.name, kind.name()), 0.90, ratio);
        }
    }
    let title = format!("Rate by size of the table: {}, {when}", kind.name());
    report.section(&title, &["table", "jobs a second", "WAL bytes for each", "to small"], rows);
    Ok(())
}

/// Of the slices of one variant.
#[derive(Default)]
pub struct Figures {
    pub rates: Vec<f64>,
    wal: Vec<f64>,
}

impl Figures {
    /// The median of the ratios within each round: what disturbs a round disturbs both.
    pub fn against(&self, other: &Self) -> f64 {
        median(self.rates.iter().zip(&other.rates).map(|(this, other)| this / other).collect())
    }
}
