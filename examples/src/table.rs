//! A run in numbers, as a table that a person can check.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

use crate::example::Example;
use crate::summary::{Counted, Summary};
use crate::verdict::Verdict;

/// The numbers, one line each, with where each comes from.
pub fn table(example: &Example, topic: &str, verdict: &Verdict, counted: Option<&Counted>) -> String {
    let summary = Summary::of_check(verdict, counted);
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(["", "", "known from"]);
    let mut line = |name: &str, number: Option<u64>, from: &str| {
        if let Some(number) = number {
            table.add_row([name, &grouped(number), from]);
        }
    };
    line("messages in", Some(summary.messages), &format!("the topic {topic}"));
    line(example.jobs, summary.distinct_jobs, "the topic");
    line(example.effects, Some(summary.effects), "where they are written");
    line("duplicates", Some(summary.duplicates), "the topic");
    line("  produced twice", Some(verdict.produced_twice), "same bytes, two offsets");
    line("  retried by the producer", Some(verdict.retried), "another event id and partition");
    line("redelivered and skipped", summary.redelivered, "the workers' counters");
    line("conflicts", Some(summary.conflicts), "same key, another payload: dead letters");
    line("rejected", Some(summary.rejected).filter(|&rejected| rejected > 0), "no usable event or key: dead letters");
    line("takeovers", summary.takeovers, "the workers' counters");
    line("retries", summary.retries, "the workers' counters");
    line("workers killed", summary.kills.filter(|&kills| kills > 0), "this program");
    line("dead letters", Some(summary.dead_letters), "the dead-letter topic");
    line("jobs set aside", summary.jobs_set_aside.filter(|&jobs| jobs > 0), "the dead-letter topic");
    line("lost", summary.lost, "topic against effects");
    line("double effects", summary.double_effects, "topic against effects");
    if let Some(seconds) = summary.seconds {
        table.add_row(["seconds", &format!("{seconds:.2}"), "workers' start to the last commit"]);
    }
    if let Some(rate) = summary.messages_per_second {
        table.add_row(["messages/s", &grouped(rate as u64), ""]);
    }
    if let Some(numbers) = table.column_mut(1) {
        numbers.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// The sentence below the table.
pub fn sentence(example: &Example, verdict: &Verdict) -> String {
    let sums = format!("{} {}", grouped(verdict.effects), example.effects);
    let jobs = format!("{} {}", grouped(verdict.distinct_jobs), example.jobs);
    match (verdict.holds(), verdict.jobs_set_aside) {
        (true, 0) => format!("{sums} = {jobs}: it holds."),
        (true, aside) => format!("{sums} + {} set aside = {jobs}: it holds.", grouped(aside)),
        (false, _) => format!("{sums}, {jobs}: IT DOES NOT HOLD.\n  {}", verdict.findings().join("\n  ")),
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_are_set_apart() {
        for (number, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }
}
