//! `check`: reads topic, dead letters and effects back, and says whether every job has exactly one effect.

use idem_kafka::Settings;
use tokio::task::block_in_place;

use crate::brokers::Brokers;
use crate::cli::CheckOptions;
use crate::evidence;
use crate::example::{Example, ReadBack};
use crate::failure::{FAILED, Failure};
use crate::group::GroupOffsets;
use crate::produce::dead_letter_topic;
use crate::summary::Summary;
use crate::table::{sentence, table};
use crate::verdict::judge;

/// Checks the topic that `options` name, on the brokers of `settings`.
///
/// # Errors
/// It does not hold, or something cannot be read.
pub async fn check(
    example: &Example,
    options: &CheckOptions,
    settings: &Settings,
    effects: &impl ReadBack,
) -> Result<(), Failure> {
    let brokers = Brokers::of(settings)?;
    let topic = options.topic.as_deref().unwrap_or(example.topic);
    let dead_letters = dead_letter_topic(settings, topic, example.consumer);
    block_in_place(|| brokers.partitions_of_existing(&brokers.reader(example.consumer)?, topic))?;
    // The effects first: what is done meanwhile must not look as if nobody had asked for it.
    let effects = effects.effects().await?;
    let evidence = block_in_place(|| evidence::gather(&brokers, example, topic, &dead_letters, effects))?;
    let mut verdict = judge(&evidence);
    if let Some(group) = &options.group {
        let committed = block_in_place(|| GroupOffsets::new(&brokers, group, topic)?.committed())?;
        verdict.not_committed(group, committed.all - committed.done);
    }

    if options.json {
        verdict.findings().iter().for_each(|finding| eprintln!("{finding}"));
        Summary::of_check(&verdict, None).print();
    } else {
        println!("{}", table(example, topic, &verdict, None));
        println!("{}", sentence(example, &verdict));
    }
    if verdict.holds() { Ok(()) } else { Err(Failure::new(FAILED, "the sums do not hold")) }
}
