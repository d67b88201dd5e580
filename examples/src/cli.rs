//! Options that both examples have.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::plan::Shape;

/// Which messages to produce.
#[derive(Args, Clone, Debug)]
pub struct PlanOptions {
    /// Messages to produce, duplicates included
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub messages: u64,
    /// The part of them that repeats a job which another message asked for
    #[arg(long, value_name = "PART", default_value_t = 0.2, value_parser = part)]
    pub duplicates: f64,
    /// Another seed, other orders
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

impl PlanOptions {
    /// The plan's shape on a topic of so many partitions.
    pub fn shape(&self, partitions: i32) -> Shape {
        let Self { messages, duplicates, seed } = *self;
        Shape { messages, duplicates, seed, partitions }
    }
}

/// `demo`: everything in one go, with nothing installed.
#[derive(Args, Clone, Debug)]
pub struct DemoOptions {
    /// What to produce.
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Run so many worker processes, instead of one worker in this process
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: Option<u16>,
    /// Kill workers (SIGKILL) during the run, and start them again; implies --workers 3
    #[arg(long)]
    pub chaos: bool,
    /// Keep the database and other files in this folder, instead of a temporary one
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// `run`: one worker, as it would be deployed.
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// Topic to consume [default: the example's own]
    #[arg(long, value_name = "NAME")]
    pub topic: Option<String>,
    /// Consumer group, unless IDEM__KAFKA__GROUP is set [default: the consumer's name]
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// End once everything was handled and nothing came for so long, such as 5s
    #[arg(long, value_name = "SPAN", value_parser = humantime::parse_duration)]
    pub until_idle: Option<Duration>,
    /// End, as for SIGTERM, when standard input ends
    #[arg(long)]
    pub until_stdin_ends: bool,
    /// Print the counters as a JSON line every so often, such as 100ms
    #[arg(long, value_name = "SPAN", value_parser = humantime::parse_duration)]
    pub report_every: Option<Duration>,
    /// Print one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// `produce`: messages with duplicates among them.
#[derive(Args, Clone, Debug)]
pub struct ProduceOptions {
    /// What to produce.
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Produce the lines of this file instead, each a message
    #[arg(long, value_name = "FILE", conflicts_with_all = ["messages", "duplicates", "seed"])]
    pub file: Option<PathBuf>,
    /// Topic to produce to [default: the example's own]
    #[arg(long, value_name = "NAME")]
    pub topic: Option<String>,
    /// Create the topic and its dead-letter topic with so many partitions, unless they are there
    #[arg(long, value_name = "PARTITIONS", value_parser = clap::value_parser!(i32).range(1..))]
    pub create: Option<i32>,
}

/// `check`: whether every job has exactly one effect.
#[derive(Args, Clone, Debug)]
pub struct CheckOptions {
    /// Topic to check [default: the example's own]
    #[arg(long, value_name = "NAME")]
    pub topic: Option<String>,
    /// Check too that this group has committed everything
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// A number from 0 to below 1.
///
/// # Errors
/// It is not one.
pub fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(part) if (0.0..1.0).contains(&part) => Ok(part),
        _ => Err("expected a number from 0 to below 1, such as 0.2".to_owned()),
    }
}
