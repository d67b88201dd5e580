//! Charges one payment per request through a gateway, however often Kafka delivers the request. The effect is outside of
//! every database: an HTTP call.
//!
//! Start with `handlers.rs`. `cargo run --release --bin payment` shows it at work with nothing installed.

mod effects;
mod events;
mod gateway;
mod handlers;
mod payments;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use idem_examples::cli::{CheckOptions, DemoOptions, ProduceOptions, RunOptions};
use idem_examples::database::Database;
use idem_examples::demo::{Folder, Show};
use idem_examples::example::Attach;
use idem_examples::failure::{self, FAILED, Failure};
use idem_examples::workers::Launch;
use idem_examples::{check, produce, run};
use idem_kafka::{App, Settings};

use effects::Places;
use events::EXAMPLE;
use gateway::{Faults, Gateway, GatewayProcess, ServeOptions, serve};
use handlers::settle_payment;
use payments::{PAYMENTS, Payments};

/// How long the demonstration waits for the gateway's answer: short, since one call in twenty is not answered.
const DEMO_TIMEOUT: Duration = Duration::from_millis(250);

/// Charges one payment per request through a gateway, however often Kafka delivers the request.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    demo: Demo,
}

#[derive(Subcommand)]
enum Command {
    /// Everything in one go, with nothing installed (this is the default)
    Demo(Demo),
    /// One worker, with brokers and store from the environment: IDEM__KAFKA__BROKERS, IDEM__STORE__URL
    Run(Run),
    /// Produce payment requests, with duplicates of every kind among them
    Produce(ProduceOptions),
    /// Read topic, ledger and table back: has every payment exactly one charge?
    Check(Check),
    /// The payment gateway, which knows nothing of idem
    Gateway(ServeOptions),
}

#[derive(Args)]
struct Demo {
    #[command(flatten)]
    options: DemoOptions,
    #[command(flatten)]
    faults: Faults,
}

#[derive(Args)]
struct Run {
    #[command(flatten)]
    options: RunOptions,
    /// Where the gateway is
    #[arg(long, value_name = "URL", env = "PAYMENT_GATEWAY_URL")]
    gateway: String,
    /// How long one call may take
    #[arg(long, value_name = "SPAN", env = "PAYMENT_GATEWAY_TIMEOUT", default_value = "2s",
          value_parser = humantime::parse_duration)]
    gateway_timeout: Duration,
    #[command(flatten)]
    table: TableOptions,
}

#[derive(Args)]
struct Check {
    #[command(flatten)]
    options: CheckOptions,
    /// The gateway's ledger
    #[arg(long, value_name = "FILE")]
    ledger: PathBuf,
    #[command(flatten)]
    table: TableOptions,
}

#[derive(Args)]
struct TableOptions {
    /// Database of the payments' table [default: the store's]
    #[arg(long, value_name = "URL", env = "PAYMENT_DATABASE_URL", hide_env_values = true)]
    payments: Option<String>,
}

impl TableOptions {
    async fn connect(&self, settings: &Settings) -> Result<Database, Failure> {
        match &self.payments {
            Some(url) => Database::connect(url).await,
            None => Database::of(settings).await,
        }
    }
}

/// The handler, and what it takes.
#[derive(Clone)]
struct Settle {
    gateway: Gateway,
    payments: Payments,
}

impl Settle {
    fn new(gateway: &str, timeout: Duration, database: Database) -> Result<Self, Failure> {
        let gateway = Gateway::new(gateway, timeout)
            .map_err(|error| Failure::new(FAILED, format!("the gateway's client cannot be made: {error}")))?;
        Ok(Self { gateway, payments: Payments(database) })
    }
}

impl Attach for Settle {
    fn attach(&self, app: App, topic: &str) -> App {
        let Self { gateway, payments } = self.clone();
        app.state(gateway).state(payments).handle(topic, settle_payment)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let Cli { command, demo } = Cli::parse();
    failure::exit(match command.unwrap_or(Command::Demo(demo)) {
        Command::Demo(demo) => play(demo).await,
        Command::Run(run) => consume(run).await,
        Command::Produce(options) => produce::produce(&EXAMPLE, &options).await,
        Command::Check(check) => verify(check).await,
        Command::Gateway(options) => serve(options).await,
    })
}

async fn play(Demo { options, faults }: Demo) -> Result<(), Failure> {
    let mut folder = Folder::new(EXAMPLE.consumer, options.dir.as_deref())?;
    let ledger = folder.file("ledger.jsonl");
    let gateway = GatewayProcess::start(&ledger, &faults, options.plan.seed).await?;
    // The payments are in a database of their own: the guard shares no transaction with them.
    let payments = folder.sqlite("payments.db");
    let database = Database::connect(&payments).await?;
    database.create(&PAYMENTS).await?;
    let launch = Launch {
        arguments: Vec::new(),
        environment: vec![
            ("PAYMENT_GATEWAY_URL".to_owned(), gateway.url().to_owned()),
            ("PAYMENT_GATEWAY_TIMEOUT".to_owned(), format!("{}ms", DEMO_TIMEOUT.as_millis())),
            ("PAYMENT_DATABASE_URL".to_owned(), payments),
        ],
    };
    let handler = Settle::new(gateway.url(), DEMO_TIMEOUT, database.clone())?;
    let effects = Places { ledger, database };
    let store_url = folder.sqlite("idem.db");
    let show = Show { example: &EXAMPLE, handler, effects, store_url, launch };
    folder.keep_if_failed(show.play(&options).await)
}

async fn consume(run: Run) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    let database = run.table.connect(&settings).await?;
    database.create(&PAYMENTS).await?;
    let handler = Settle::new(&run.gateway, run.gateway_timeout, database)?;
    run::run(&EXAMPLE, &run.options, settings, &handler).await
}

async fn verify(check: Check) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    let places = Places { ledger: check.ledger, database: check.table.connect(&settings).await? };
    check::check(&EXAMPLE, &check.options, &settings, &places).await
}
