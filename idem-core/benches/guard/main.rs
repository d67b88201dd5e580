//! What the guard costs in PostgreSQL, through the public API: statements for each job, rates on small and huge tables,
//! duplicates against fresh messages, bytes of index for each row, memory over a million jobs.
//!
//! `docs/guard-figures.md` says what came out and what may be concluded. Run by hand:
//!
//! ```text
//! cargo bench -p idem-core --features postgres --bench guard -- [--only PART,…] [--rows N] [--seconds N] [--json] [--keep]
//! ```
//!
//! It needs `IDEM_TEST_POSTGRES_URL`, of a server in which schemas may be made. The exit status is 1 if a target is missed.

mod args;
mod duplicates;
mod growth;
mod handlers;
mod memory;
mod report;
mod statements;
mod tables;
mod wire;
mod work;

use std::process::ExitCode;

use args::{Args, Part};
use report::Report;
use tables::Tables;

/// What ends the program early: a figure of a run that went wrong is worth nothing.
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let args = match Args::read(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(misuse) => {
            eprintln!("{misuse}\n{}", args::USAGE);
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    match runtime.block_on(run(&args)) {
        Ok(report) => {
            report.print(args.json);
            ExitCode::from(u8::from(report.has_missed()))
        }
        Err(failure) => {
            eprintln!("guard: {failure}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<Report, Failure> {
    let mut report = Report::default();
    let tables = Tables::new(args)?;
    let measured = measure(args, &tables, &mut report).await;
    // Also of a run that went wrong.
    tables.drop_used().await?;
    measured.map(|()| report)
}

async fn measure(args: &Args, tables: &Tables, report: &mut Report) -> Result<(), Failure> {
    for part in &args.parts {
        match part {
            Part::Statements => statements::measure(tables, report).await?,
            Part::Memory => memory::measure(args, tables, report).await?,
            Part::Duplicates => duplicates::measure(args, tables, report).await?,
            Part::Growth => growth::measure(args, tables, report).await?,
        }
    }
    Ok(())
}
