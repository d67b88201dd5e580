//! Whether every job that was asked for has exactly one effect. Pure: looks at [`Evidence`], knows nothing of idem.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::evidence::{Evidence, Position, Record};
use crate::example::{Effect, Effects, Terms};

/// Findings of one kind that are shown; the others are counted.
const SHOWN: usize = 10;

/// What can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Wrong {
    /// A job has no effect, and not all of its messages were set aside.
    Lost,
    /// A job has more than one effect.
    Double,
    /// An effect is what no message of its job asked for.
    OtherThanAsked,
    /// An effect whose job no message asked for.
    NotAsked,
    /// Two places tell different effects of one job.
    Disagree,
    /// A message asks for something else than what was done for its job, and has no dead letter.
    ConflictUnseen,
    /// A message that cannot be read or has no usable key has no dead letter.
    RejectedUnseen,
    /// A message has a dead letter although what it asked for was done.
    SetAsideForNothing,
    /// Records are not behind the group's committed offsets.
    NotCommitted,
}

impl Wrong {
    fn text(self) -> &'static str {
        match self {
            Wrong::Lost => "without effect (lost)",
            Wrong::Double => "with more than one effect",
            Wrong::OtherThanAsked => "with an effect that no message asked for",
            Wrong::NotAsked => "with an effect, but never asked for",
            Wrong::Disagree => "with effects that do not agree",
            Wrong::ConflictUnseen => "in conflict with what was done, without a dead letter",
            Wrong::RejectedUnseen => "unreadable or without a key, without a dead letter",
            Wrong::SetAsideForNothing => "with a dead letter, although the effect is there",
            Wrong::NotCommitted => "not behind the group's committed offsets",
        }
    }
}

/// What the evidence says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Records in the topic.
    pub messages: u64,
    /// Jobs that they ask for.
    pub distinct_jobs: u64,
    /// Effects in the first place.
    pub effects: u64,
    /// Messages that repeat another one of their job byte for byte.
    pub produced_twice: u64,
    /// Messages that repeat another one of their job under another event id.
    pub retried: u64,
    /// Messages that ask for something else than what was done for their job.
    pub conflicts: u64,
    /// Records that cannot be read, or have no usable key.
    pub rejected: u64,
    /// Records that have a dead letter.
    pub dead_letters: u64,
    /// Jobs without effect all of whose messages have a dead letter: visible, not lost.
    pub jobs_set_aside: u64,
    /// Jobs without effect that nothing tells of.
    pub lost: u64,
    /// Effects beyond the first of their job, over all places.
    pub double_effects: u64,
    /// What is wrong, with the keys it is wrong with.
    pub wrong: BTreeMap<Wrong, Vec<String>>,
}

/// Judges the evidence.
pub fn judge(evidence: &Evidence) -> Verdict {
    let mut verdict = Verdict {
        messages: evidence.records.len() as u64,
        dead_letters: evidence.set_aside.len() as u64,
        effects: evidence.effects.first().map_or(0, |place| place.found.len() as u64),
        ..Verdict::default()
    };
    let jobs = verdict.sort_by_job(evidence);
    verdict.distinct_jobs = jobs.len() as u64;
    let places: Vec<Place<'_>> = evidence.effects.iter().map(Place::new).collect();
    verdict.look_for_strangers(&jobs, &places);
    let mut keys: Vec<_> = jobs.keys().copied().collect();
    keys.sort_unstable();
    for key in keys {
        verdict.judge_job(key, &jobs[key], &places, &evidence.set_aside);
    }
    verdict
}

/// The effects of one place, by job.
struct Place<'a> {
    name: &'static str,
    by_key: HashMap<&'a str, Vec<&'a Effect>>,
}

impl<'a> Place<'a> {
    fn new(effects: &'a Effects) -> Self {
        let mut by_key: HashMap<&str, Vec<&Effect>> = HashMap::with_capacity(effects.found.len());
        for effect in &effects.found {
            by_key.entry(&effect.key).or_default().push(effect);
        }
        Self { name: effects.place, by_key }
    }

    fn of(&self, key: &str) -> &[&'a Effect] {
        self.by_key.get(key).map_or(&[], Vec::as_slice)
    }
}

type Jobs<'a> = HashMap<&'a str, Vec<&'a Record>>;

impl Verdict {
    /// Whether nothing is wrong.
    pub fn holds(&self) -> bool {
        self.wrong.is_empty()
    }

    /// Messages that repeat a job and ask for the same.
    pub fn duplicates(&self) -> u64 {
        self.produced_twice + self.retried
    }

    /// Records of the topic that the group has not committed.
    pub fn not_committed(&mut self, group: &str, records: u64) {
        if records > 0 {
            self.note(Wrong::NotCommitted, format!("{records} records for the group {group}"));
        }
    }

    /// One line for each kind of finding, with the first keys.
    pub fn findings(&self) -> Vec<String> {
        let line = |(wrong, keys): (&Wrong, &Vec<String>)| {
            let shown = keys.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = keys.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{} {}: {shown}{more}", keys.len(), wrong.text())
        };
        self.wrong.iter().map(line).collect()
    }

    fn note(&mut self, wrong: Wrong, key: impl Into<String>) {
        self.wrong.entry(wrong).or_default().push(key.into());
    }

    /// Groups the records by what they ask for, and sorts out those that ask for nothing.
    fn sort_by_job<'a>(&mut self, evidence: &'a Evidence) -> Jobs<'a> {
        let mut jobs: Jobs<'_> = HashMap::new();
        for record in &evidence.records {
            match &record.asked {
                Some(asked) => jobs.entry(&asked.key).or_default().push(record),
                None => {
                    self.rejected += 1;
                    if !evidence.set_aside.contains(&record.position) {
                        let (partition, offset) = record.position;
                        self.note(Wrong::RejectedUnseen, format!("partition {partition} offset {offset}"));
                    }
                }
            }
        }
        jobs
    }

    fn look_for_strangers(&mut self, jobs: &Jobs<'_>, places: &[Place<'_>]) {
        for place in places {
            let mut strangers: Vec<_> = place.by_key.keys().filter(|key| !jobs.contains_key(*key)).collect();
            strangers.sort_unstable();
            strangers.into_iter().for_each(|key| self.note(Wrong::NotAsked, format!("{key} ({})", place.name)));
        }
    }

    fn judge_job(&mut self, key: &str, records: &[&Record], places: &[Place<'_>], set_aside: &HashSet<Position>) {
        let found: Vec<&Effect> = places.iter().flat_map(|place| place.of(key)).copied().collect();
        let Some(done) = found.first() else {
            return self.judge_without_effect(key, records, set_aside);
        };
        for place in places {
            match place.of(key).len() {
                0 => {
                    self.lost += 1;
                    self.note(Wrong::Lost, format!("{key} (not among the {})", place.name));
                }
                1 => {}
                several => {
                    self.double_effects += several as u64 - 1;
                    self.note(Wrong::Double, format!("{key} ({several} {})", place.name));
                }
            }
        }
        if found.iter().any(|effect| effect.terms != done.terms || effect.receipt != done.receipt) {
            self.note(Wrong::Disagree, key);
        }
        if records.iter().all(|record| terms(record) != Some(&done.terms)) {
            self.note(Wrong::OtherThanAsked, key);
        }
        self.judge_messages(key, records, &done.terms, set_aside);
    }

    fn judge_without_effect(&mut self, key: &str, records: &[&Record], set_aside: &HashSet<Position>) {
        if records.iter().all(|record| set_aside.contains(&record.position)) {
            self.jobs_set_aside += 1;
        } else {
            self.lost += 1;
            self.note(Wrong::Lost, key);
        }
        // Against the job's first message, since nothing was done.
        let first = records.first().and_then(|record| terms(record));
        let (same, other): (Vec<&Record>, Vec<&Record>) = records.iter().partition(|record| terms(record) == first);
        self.count_duplicates(&same);
        self.conflicts += other.len() as u64;
    }

    fn judge_messages(&mut self, key: &str, records: &[&Record], done: &Terms, set_aside: &HashSet<Position>) {
        let (same, other): (Vec<&Record>, Vec<&Record>) =
            records.iter().partition(|record| terms(record) == Some(done));
        self.count_duplicates(&same);
        self.conflicts += other.len() as u64;
        for record in other.iter().filter(|record| !set_aside.contains(&record.position)) {
            let (partition, offset) = record.position;
            self.note(Wrong::ConflictUnseen, format!("{key} (partition {partition} offset {offset})"));
        }
        if same.iter().any(|record| set_aside.contains(&record.position)) {
            self.note(Wrong::SetAsideForNothing, key);
        }
    }

    /// All but one of the messages that ask for the same are duplicates.
    fn count_duplicates(&mut self, same: &[&Record]) {
        let ids: HashSet<_> = same.iter().filter_map(|record| record.asked.as_ref()).map(|a| &a.event_id).collect();
        self.retried += (ids.len() as u64).saturating_sub(1);
        self.produced_twice += (same.len() - ids.len()) as u64;
    }
}

fn terms(record: &Record) -> Option<&Terms> {
    record.asked.as_ref().map(|asked| &asked.terms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::Asked;

    fn terms_of(amount: i64) -> Terms {
        Terms { amount, currency: "IDR".into() }
    }

    /// A topic of one partition: `(key, amount, event id)`, or nothing for what cannot be read.
    fn topic(records: &[Option<(&str, i64, &str)>]) -> Vec<Record> {
        let asked = |&(key, amount, id): &(&str, i64, &str)| Asked {
            key: key.into(),
            terms: terms_of(amount),
            event_id: id.into(),
        };
        let records = records.iter().enumerate();
        records.map(|(at, record)| Record { position: (0, at as i64), asked: record.as_ref().map(asked) }).collect()
    }

    fn invoices(effects: &[(&str, i64)]) -> Effects {
        let effect = |&(key, amount): &(&str, i64)| Effect { key: key.into(), terms: terms_of(amount), receipt: None };
        Effects { place: "invoices", found: effects.iter().map(effect).collect() }
    }

    fn judged(records: &[Option<(&str, i64, &str)>], set_aside: &[i64], effects: Vec<Effects>) -> Verdict {
        let set_aside = set_aside.iter().map(|&offset| (0, offset)).collect();
        judge(&Evidence { records: topic(records), set_aside, effects })
    }

    fn wrongs(verdict: &Verdict) -> Vec<Wrong> {
        verdict.wrong.keys().copied().collect()
    }

    #[test]
    fn each_job_once_holds() {
        let verdict = judged(
            &[
                Some(("A", 5, "1")),
                Some(("A", 5, "1")),
                Some(("B", 7, "2")),
                Some(("A", 5, "3")),
                Some(("B", 8, "4")),
                None,
            ],
            &[4, 5],
            vec![invoices(&[("A", 5), ("B", 7)])],
        );
        assert!(verdict.holds(), "{:?}", verdict.wrong);
        assert_eq!((verdict.messages, verdict.distinct_jobs, verdict.effects), (6, 2, 2));
        assert_eq!((verdict.produced_twice, verdict.retried, verdict.conflicts, verdict.rejected), (1, 1, 1, 1));
        let accounted = verdict.distinct_jobs + verdict.duplicates() + verdict.conflicts + verdict.rejected;
        assert_eq!(accounted, verdict.messages);
    }

    #[test]
    fn either_payload_may_have_won_a_conflict() {
        let records = [Some(("A", 5, "1")), Some(("A", 6, "2"))];
        assert!(judged(&records, &[1], vec![invoices(&[("A", 5)])]).holds());
        assert!(judged(&records, &[0], vec![invoices(&[("A", 6)])]).holds());
        let both_wrong = judged(&records, &[0], vec![invoices(&[("A", 5)])]);
        assert_eq!(wrongs(&both_wrong), [Wrong::ConflictUnseen, Wrong::SetAsideForNothing]);
    }

    #[test]
    fn lost_and_double_effects_are_named() {
        let records = [Some(("A", 5, "1")), Some(("B", 5, "2")), Some(("C", 5, "3"))];
        let verdict = judged(&records, &[], vec![invoices(&[("A", 5), ("A", 5), ("C", 5)])]);
        assert_eq!((verdict.lost, verdict.double_effects), (1, 1));
        assert_eq!(verdict.wrong[&Wrong::Lost], ["B"]);
        assert_eq!(verdict.wrong[&Wrong::Double], ["A (2 invoices)"]);
        assert!(verdict.findings()[0].contains('B'), "{:?}", verdict.findings());
    }

    #[test]
    fn what_was_done_must_have_been_asked_for() {
        let verdict = judged(&[Some(("A", 5, "1"))], &[], vec![invoices(&[("A", 6), ("Z", 1)])]);
        assert_eq!(wrongs(&verdict), [Wrong::OtherThanAsked, Wrong::NotAsked, Wrong::ConflictUnseen]);
    }

    #[test]
    fn unreadable_records_must_be_set_aside() {
        assert_eq!(wrongs(&judged(&[None], &[], vec![invoices(&[])])), [Wrong::RejectedUnseen]);
        assert!(judged(&[None], &[0], vec![invoices(&[])]).holds());
    }

    #[test]
    fn a_job_all_of_whose_messages_are_set_aside_is_not_lost() {
        let records = [Some(("A", 5, "1")), Some(("A", 5, "1"))];
        let verdict = judged(&records, &[0, 1], vec![invoices(&[])]);
        assert!(verdict.holds());
        assert_eq!((verdict.jobs_set_aside, verdict.lost), (1, 0));
        assert_eq!(judged(&records, &[0], vec![invoices(&[])]).lost, 1);
    }

    #[test]
    fn every_place_has_each_effect_once_and_the_same() {
        let receipt = |text: &str| {
            let mut effects = invoices(&[("A", 5)]);
            effects.found[0].receipt = Some(text.into());
            effects
        };
        let records = [Some(("A", 5, "1"))];
        assert!(judged(&records, &[], vec![receipt("R1"), receipt("R1")]).holds());
        assert_eq!(wrongs(&judged(&records, &[], vec![receipt("R1"), receipt("R2")])), [Wrong::Disagree]);
        assert_eq!(wrongs(&judged(&records, &[], vec![receipt("R1"), invoices(&[])])), [Wrong::Lost]);
    }
}
