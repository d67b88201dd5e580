//! Issues one invoice per paid order, however often Kafka delivers the order. The effect is in the guard's own database.
//!
//! Start with `handlers.rs`. `cargo run --release --bin invoice` shows it at work with nothing installed.

mod events;
mod handlers;
mod peer;
mod tables;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use idem_examples::cli::{CheckOptions, DemoOptions, ProduceOptions, RunOptions};
use idem_examples::database::Database;
use idem_examples::demo::{Folder, Show};
use idem_examples::example::Attach;
use idem_examples::failure::{self, Failure};
use idem_examples::workers::Launch;
use idem_examples::{check, produce, run};
use idem_kafka::{App, Settings};

use events::EXAMPLE;
use handlers::{issue_invoice, issue_invoices};
use tables::{INVOICES, Invoices};

/// Issues one invoice per paid order, however often Kafka delivers the order.
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
    /// Produce orders, with duplicates of every kind among them
    Produce(ProduceOptions),
    /// Read topic and table back: has every order exactly one invoice?
    Check(CheckOptions),
    /// One contender of a benchmark, which tells it by PEER_… variables what to do
    #[command(hide = true)]
    Peer(Handler),
}

#[derive(Args)]
struct Demo {
    #[command(flatten)]
    options: DemoOptions,
    #[command(flatten)]
    handler: Handler,
}

#[derive(Args)]
struct Run {
    #[command(flatten)]
    options: RunOptions,
    #[command(flatten)]
    handler: Handler,
}

/// Which of the two handlers.
#[derive(Args, Clone, Copy)]
struct Handler {
    /// Take all fresh orders of a batch at once, in one statement
    #[arg(long)]
    batch_handler: bool,
}

impl Attach for Handler {
    fn attach(&self, app: App, topic: &str) -> App {
        if self.batch_handler { app.handle(topic, issue_invoices) } else { app.handle(topic, issue_invoice) }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let Cli { command, demo } = Cli::parse();
    failure::exit(match command.unwrap_or(Command::Demo(demo)) {
        Command::Demo(demo) => play(demo).await,
        Command::Run(run) => consume(run).await,
        Command::Produce(options) => produce::produce(&EXAMPLE, &options).await,
        Command::Check(options) => verify(options).await,
        Command::Peer(handler) => peer::run(handler.batch_handler).await,
    })
}

async fn play(Demo { options, handler }: Demo) -> Result<(), Failure> {
    let mut folder = Folder::new(EXAMPLE.consumer, options.dir.as_deref())?;
    let store_url = folder.sqlite("idem.db");
    let database = Database::connect(&store_url).await?;
    database.create(&INVOICES).await?;
    let arguments = if handler.batch_handler { vec!["--batch-handler".to_owned()] } else { Vec::new() };
    let launch = Launch { arguments, environment: Vec::new() };
    let show = Show { example: &EXAMPLE, handler, effects: Invoices(database), store_url, launch };
    folder.keep_if_failed(show.play(&options).await)
}

async fn consume(Run { options, handler }: Run) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    Database::of(&settings).await?.create(&INVOICES).await?;
    run::run(&EXAMPLE, &options, settings, &handler).await
}

async fn verify(options: CheckOptions) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    let invoices = Invoices(Database::of(&settings).await?);
    check::check(&EXAMPLE, &options, &settings, &invoices).await
}
