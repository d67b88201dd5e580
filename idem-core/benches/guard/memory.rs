//! What a million jobs leave: memory of this process, rows that were completed in place, bytes of index.

use crate::Failure;
use crate::args::Args;
use crate::growth::{RANDOM, SORTED, size};
use crate::handlers::Kind;
use crate::report::Report;
use crate::tables::{Table, Tables};
use crate::work::{Source, Variant};

/// How often it is looked at.
const LOOKS: u64 = 10;
/// What an allocator may still come to hold after a tenth of the jobs.
const SLACK_MIB: f64 = 4.0;

pub async fn measure(args: &Args, tables: &Tables, report: &mut Report) -> Result<(), Failure> {
    let table = tables.table("memory", 0, false).await?;
    let (lease, atomic) = (fresh(&table, Kind::Lease)?, fresh(&table, Kind::Atomic)?);
    let (mut jobs, mut looks) = (0, Vec::new());
    for look in 1..=LOOKS {
        while jobs < args.jobs / LOOKS * look {
            let (one, other) = futures_util::try_join!(lease.batch(), atomic.batch())?;
            jobs += one + other;
        }
        looks.push((jobs, resident_mib()?));
    }
    let first = looks[0].1;
    let most = looks.iter().map(|(_, mib)| *mib).fold(first, f64::max);
    let rows = looks.iter().map(|(jobs, mib)| vec![jobs.to_string(), format!("{mib:.1}")]).collect();
    report.section("Memory", &["jobs so far", "resident MiB"], rows);
    report.at_most("MiB that the process grows by, after the first tenth of its jobs", SLACK_MIB, most - first);

    let [updates, in_place] = updates(&table).await?;
    let rows = vec![vec![updates.to_string(), in_place.to_string()]];
    report.section("Completions in lease mode", &["updates", "of them within their page, no index changed"], rows);

    let mut sizes = vec![size(report, &table, "keys in no order, by the guard itself", RANDOM).await?];
    table.reindex().await?;
    sizes.push(size(report, &table, "the same, index built anew", SORTED).await?);
    report.section(
        "Index after these jobs",
        &["rows", "number", "bytes for each", "theory", "measured to theory"],
        sizes,
    );
    Ok(())
}

fn fresh(table: &Table, kind: Kind) -> Result<Variant<'_>, Failure> {
    Ok(Variant { name: kind.name().to_owned(), table, guarded: table.bind(kind)?, source: Source::Fresh })
}

/// What this process has in memory, as Linux tells it.
fn resident_mib() -> Result<f64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("the system does not tell VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib / 1024.0)
}

/// How many rows were updated, and how many of them in place. Sessions report when they are idle for a second, or end.
async fn updates(table: &Table) -> Result<[i64; 2], Failure> {
    table.guard.store().close().await;
    let query = "SELECT n_tup_upd FROM pg_stat_user_tables
                 WHERE relname = 'processed_jobs' AND schemaname = current_schema()";
    Ok([table.number(query).await?, table.number(&query.replace("n_tup_upd", "n_tup_hot_upd")).await?])
}
