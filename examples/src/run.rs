//! `run`: one worker, as a user would deploy it. Everything about brokers and store comes from the environment.

use std::io::{IsTerminal, Read};
use std::time::{Duration, Instant};

use idem_kafka::{App, Settings, Stats};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::cli::RunOptions;
use crate::example::{Attach, Example};
use crate::failure::{Failure, MISUSED};
use crate::summary::{Counted, Summary};
use crate::table::grouped;

/// Consumes until it is asked to end, or is idle for as long as `options` say.
///
/// # Errors
/// The settings clash, or something it needs cannot be used.
pub async fn run(
    example: &Example,
    options: &RunOptions,
    settings: Settings,
    handler: &impl Attach,
) -> Result<(), Failure> {
    start_log(&settings)?;
    let topic = options.topic.as_deref().unwrap_or(example.topic);
    let group = options.group.as_deref().unwrap_or(example.consumer);
    let mut app = App::from_settings(settings)?.default_group(group);
    if let Some(idle) = options.until_idle {
        app = app.until_idle(idle);
    }
    if options.until_stdin_ends {
        app = app.shutdown(when_stdin_ends());
    }

    let app = handler.attach(app, topic);
    let reports = options.report_every.map(|pause| tokio::spawn(report(app.stats(), pause)));
    let begun = Instant::now();
    let ended = app.run().await;
    if let Some(reports) = reports {
        reports.abort();
    }
    let workers = ended?;
    if options.report_every.is_some() {
        println!("{}", serde_json::json!(workers));
    }
    if options.json {
        Summary::of_worker(&Counted { workers, took: begun.elapsed(), kills: 0 }).print();
    } else if options.report_every.is_none() {
        println!(
            "{} messages received, {} {} new",
            grouped(workers.received),
            grouped(workers.completed),
            example.effects
        );
    }
    Ok(())
}

/// The log, on standard error: for people on a terminal, else JSON.
fn start_log(settings: &Settings) -> Result<(), Failure> {
    let directives = settings.log.filter.clone().or_else(|| std::env::var("RUST_LOG").ok());
    let directives = directives.unwrap_or_else(|| "warn".to_owned());
    let filter = EnvFilter::try_new(&directives)
        .map_err(|error| Failure::new(MISUSED, format!("`log.filter` is {directives:?}: {error}")))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::io::stderr().is_terminal() {
        log.init()
    } else {
        log.json().init()
    }
    Ok(())
}

async fn report(stats: Stats, pause: Duration) {
    loop {
        println!("{}", serde_json::json!(stats.snapshot()));
        tokio::time::sleep(pause).await;
    }
}

/// Ends with whoever holds the other end of standard input, even if that process was killed: no worker is left behind.
pub fn when_stdin_ends() -> CancellationToken {
    let token = CancellationToken::new();
    let ended = token.clone();
    // A thread of its own, which nothing waits for: a read of standard input cannot be given up.
    std::thread::spawn(move || {
        // However it ends: whoever held the other side is gone.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ended.cancel();
    });
    token
}
