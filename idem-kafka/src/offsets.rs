//! PURE: offsets in flight → next offset safe to commit.
//!
//! Offsets are counted as they were *delivered*: holes left by compaction and transactions are not gaps. The commit point
//! is an offset to read next, never one that was read last.

use std::collections::VecDeque;

/// The delivered offsets of one partition in one assignment, and which of them are decided.
#[derive(Debug, Default)]
pub(crate) struct Offsets {
    /// From the lowest undecided offset on, in the order of delivery.
    delivered: VecDeque<(i64, Decision)>,
    last_delivered: Option<i64>,
    /// What the broker named as the end of the partition; behind the last delivered record, and behind the control records
    /// that follow it.
    end: Option<i64>,
    /// The next offset to read, as the broker has confirmed it.
    committed: Option<i64>,
    undecided: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    Pending,
    Made,
}

/// The partition has begun anew: a delivered offset was not above the last one, so the topic was deleted and created again.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BegunAnew;

impl Offsets {
    /// For a partition whose committed offset is `committed`.
    pub fn new(committed: Option<i64>) -> Self {
        Self { committed, ..Self::default() }
    }

    /// A record was delivered.
    ///
    /// # Errors
    /// The partition has begun anew. Nothing here holds for it: it needs a tracker of its own.
    pub fn deliver(&mut self, offset: i64) -> Result<(), BegunAnew> {
        if self.last_delivered.is_some_and(|last| offset <= last) {
            return Err(BegunAnew);
        }
        self.last_delivered = Some(offset);
        self.end = None;
        self.delivered.push_back((offset, Decision::Pending));
        self.undecided += 1;
        Ok(())
    }

    /// The outcome of a delivered record is durable.
    pub fn decide(&mut self, offset: i64) {
        let Ok(index) = self.delivered.binary_search_by_key(&offset, |(offset, _)| *offset) else { return };
        if self.delivered[index].1 == Decision::Pending {
            self.delivered[index].1 = Decision::Made;
            self.undecided -= 1;
        }
        while self.delivered.front().is_some_and(|(_, decision)| *decision == Decision::Made) {
            self.delivered.pop_front();
        }
    }

    /// The broker says that there is nothing below `end` left to deliver.
    pub fn reach_end(&mut self, end: i64) {
        if self.last_delivered.is_none_or(|last| end > last) {
            self.end = Some(end);
        }
    }

    /// The next offset to read if everything undecided were lost now.
    pub fn commit_point(&self) -> Option<i64> {
        let lowest_undecided = self.delivered.front().map(|(offset, _)| *offset);
        lowest_undecided.or(self.end).or(self.last_delivered.map(|last| last + 1))
    }

    /// The commit point, if the broker does not have it yet. Never goes back.
    pub fn to_commit(&self) -> Option<i64> {
        self.commit_point().filter(|point| self.committed.is_none_or(|committed| *point > committed))
    }

    /// The broker has confirmed `next_offset`.
    pub fn confirm(&mut self, next_offset: i64) {
        self.committed = self.committed.max(Some(next_offset));
    }

    /// What the broker has as committed is not there any more: any offset may be committed now.
    pub fn forget_committed(&mut self) {
        self.committed = None;
    }

    /// Records delivered and not decided.
    pub fn undecided(&self) -> usize {
        self.undecided
    }

    /// Records between the commit point and the last delivered one, decided or not: what a restart would deliver again.
    pub fn span(&self) -> usize {
        self.delivered.len()
    }

    /// Whether everything up to the partition's end is decided.
    pub fn is_at_end(&self) -> bool {
        self.end.is_some() && self.delivered.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn delivered(offsets: &[i64]) -> Offsets {
        let mut tracker = Offsets::new(None);
        for offset in offsets {
            tracker.deliver(*offset).unwrap();
        }
        tracker
    }

    #[test]
    fn the_commit_point_is_the_lowest_undecided_offset() {
        let mut tracker = delivered(&[5, 6, 7]);
        assert_eq!(tracker.commit_point(), Some(5));
        tracker.decide(6);
        tracker.decide(7);
        assert_eq!(tracker.commit_point(), Some(5), "seen is not done");
        tracker.decide(5);
        assert_eq!(tracker.commit_point(), Some(8), "the next to read, not the last read");
    }

    #[test]
    fn holes_are_not_gaps() {
        let mut tracker = delivered(&[0, 14, 24]);
        tracker.decide(0);
        assert_eq!(tracker.commit_point(), Some(14));
        tracker.decide(14);
        tracker.decide(24);
        assert_eq!(tracker.commit_point(), Some(25));
    }

    #[test]
    fn the_end_of_a_transactional_partition_is_reached() {
        let mut tracker = delivered(&[28]);
        tracker.reach_end(30);
        assert_eq!(tracker.commit_point(), Some(28), "the end does not pass undecided work");
        tracker.decide(28);
        assert_eq!(tracker.commit_point(), Some(30));
        assert!(tracker.is_at_end());
        tracker.deliver(30).unwrap();
        assert_eq!(tracker.commit_point(), Some(30));
        assert!(!tracker.is_at_end());
    }

    #[test]
    fn a_partition_without_records_commits_its_end() {
        let mut tracker = Offsets::new(Some(3));
        assert_eq!(tracker.to_commit(), None);
        tracker.reach_end(9);
        assert_eq!(tracker.to_commit(), Some(9));
    }

    #[test]
    fn commits_never_go_back() {
        let mut tracker = Offsets::new(Some(10));
        tracker.deliver(4).unwrap();
        tracker.decide(4);
        assert_eq!(tracker.to_commit(), None, "an operator's seek backwards is not committed over what is there");
        tracker.deliver(10).unwrap();
        tracker.decide(10);
        assert_eq!(tracker.to_commit(), Some(11));
        tracker.confirm(11);
        tracker.confirm(5);
        assert_eq!(tracker.to_commit(), None);
    }

    #[test]
    fn after_a_lost_offset_the_new_place_is_committed() {
        let mut tracker = Offsets::new(Some(100));
        tracker.forget_committed();
        tracker.deliver(50).unwrap();
        assert_eq!(tracker.to_commit(), Some(50));
        tracker.decide(50);
        assert_eq!(tracker.to_commit(), Some(51));
    }

    #[test]
    fn a_first_record_is_committed_as_the_place_to_begin_at() {
        let mut tracker = Offsets::new(None);
        tracker.deliver(100).unwrap();
        assert_eq!(tracker.to_commit(), Some(100), "else a crash would begin at the then latest record");
    }

    #[test]
    fn an_offset_again_means_a_new_life_of_the_partition() {
        let mut tracker = delivered(&[3]);
        assert_eq!(tracker.deliver(3), Err(BegunAnew));
        assert_eq!(tracker.deliver(0), Err(BegunAnew));
    }

    #[test]
    fn unknown_and_repeated_decisions_do_no_harm() {
        let mut tracker = delivered(&[1, 2]);
        tracker.decide(9);
        tracker.decide(2);
        tracker.decide(2);
        assert_eq!((tracker.undecided(), tracker.span()), (1, 2));
    }

    proptest! {
        /// However decisions are ordered, the commit point never passes an undecided record, and is exact.
        #[test]
        fn never_past_undecided_work(
            gaps in proptest::collection::vec(1i64..4, 1..60),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 0..120),
        ) {
            let offsets: Vec<i64> = gaps.iter().scan(0, |next, gap| { *next += gap; Some(*next) }).collect();
            let mut tracker = delivered(&offsets);
            let mut open = offsets.clone();
            for index in order {
                if !open.is_empty() {
                    let offset = open.remove(index.index(open.len()));
                    tracker.decide(offset);
                }
                let expected = open.first().copied().unwrap_or(offsets[offsets.len() - 1] + 1);
                prop_assert_eq!(tracker.commit_point(), Some(expected));
                prop_assert_eq!(tracker.undecided(), open.len());
            }
        }
    }
}
