//! What the command line asks for.

use std::time::Duration;

pub const USAGE: &str =
    "guard [--only statements,memory,duplicates,growth] [--rows N] [--seconds N] [--jobs N] [--json] [--keep]
  --only      these parts, in this order
  --rows      rows of the huge tables (10000000)
  --seconds   how long each variant is measured, in slices of half a second that alternate with the others' (20)
  --jobs      jobs of the part memory (1000000)
  --json      one JSON value instead of tables
  --keep      leave the tables, and use those that an earlier run with --keep has left";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Statements,
    Memory,
    Duplicates,
    Growth,
}

#[derive(Debug)]
pub struct Args {
    pub parts: Vec<Part>,
    pub rows: u64,
    pub seconds: u64,
    pub jobs: u64,
    pub json: bool,
    pub keep: bool,
}

/// Long enough for dozens of batches, short enough that what else the machine does meets all variants alike.
pub const SLICE: Duration = Duration::from_millis(500);

impl Args {
    pub fn read(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut args = Self {
            parts: vec![Part::Statements, Part::Memory, Part::Duplicates, Part::Growth],
            rows: 10_000_000,
            seconds: 20,
            jobs: 1_000_000,
            json: false,
            keep: false,
        };
        while let Some(word) = words.next() {
            match word.as_str() {
                // Cargo's own.
                "--bench" => {}
                "--json" => args.json = true,
                "--keep" => args.keep = true,
                "--only" => args.parts = value(&word, &mut words)?.split(',').map(part).collect::<Result<_, _>>()?,
                "--rows" => args.rows = number(&word, &mut words)?,
                "--seconds" => args.seconds = number(&word, &mut words)?,
                "--jobs" => args.jobs = number(&word, &mut words)?,
                unknown => return Err(format!("unknown argument {unknown}")),
            }
        }
        Ok(args)
    }

    /// How often each variant has a slice. At least three, so that there is a median.
    pub fn rounds(&self) -> usize {
        let slices = Duration::from_secs(self.seconds).as_millis() / SLICE.as_millis();
        usize::try_from(slices).unwrap_or(usize::MAX).max(3)
    }
}

fn value(name: &str, words: &mut impl Iterator<Item = String>) -> Result<String, String> {
    words.next().ok_or_else(|| format!("{name} needs a value"))
}

fn number(name: &str, words: &mut impl Iterator<Item = String>) -> Result<u64, String> {
    let text = value(name, words)?;
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| format!("{name} needs a number above 0, not {text}"))
}

fn part(name: &str) -> Result<Part, String> {
    match name {
        "statements" => Ok(Part::Statements),
        "memory" => Ok(Part::Memory),
        "duplicates" => Ok(Part::Duplicates),
        "growth" => Ok(Part::Growth),
        unknown => Err(format!("there is no part {unknown}")),
    }
}
