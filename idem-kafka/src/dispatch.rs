//! PURE: which records may run now.
//!
//! Records of one key run one after another, in the order they came. Everything else runs side by side: a record that runs
//! or waits holds up its own key and no other.

use std::collections::{BTreeSet, HashMap, VecDeque};

use idem_core::EventKey;

/// Names a record that is waiting or running. Grows with each record that comes.
pub(crate) type Ticket = u64;

/// The waiting records of one handler.
#[derive(Debug, Default)]
pub(crate) struct Dispatch {
    /// By key: the record that is ready, running or waiting for its time, and those behind it.
    lanes: HashMap<EventKey, VecDeque<Ticket>>,
    /// At the head of their lanes, free to run: the oldest first, since the oldest hold the commit point back.
    ready: BTreeSet<Ticket>,
}

impl Dispatch {
    /// A record has come. Answers whether it may run now: not behind another one of its key.
    pub fn push(&mut self, key: &EventKey, ticket: Ticket) -> bool {
        let lane = self.lanes.entry(key.clone()).or_default();
        lane.push_back(ticket);
        let is_head = lane.len() == 1;
        if is_head {
            self.ready.insert(ticket);
        }
        is_head
    }

    /// Takes up to `most` records that may run, the oldest first. Their keys are all different.
    pub fn take(&mut self, most: usize) -> Vec<Ticket> {
        std::iter::from_fn(|| self.ready.pop_first()).take(most).collect()
    }

    /// A taken record did not get to run, or its time has come: it is ready again.
    pub fn put_back(&mut self, ticket: Ticket) {
        self.ready.insert(ticket);
    }

    /// A record is done with, wherever it stands: the next one of its key becomes ready if it was at the head.
    pub fn remove(&mut self, key: &EventKey, ticket: Ticket) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        if lane.front() != Some(&ticket) {
            lane.retain(|other| *other != ticket);
            return;
        }
        lane.pop_front();
        match lane.front() {
            Some(next) => {
                self.ready.insert(*next);
            }
            None => {
                self.lanes.remove(key);
            }
        }
    }

    /// Removes all records that are `gone`; none of them may be running.
    pub fn withdraw(&mut self, gone: impl Fn(Ticket) -> bool) {
        let Self { lanes, ready } = self;
        ready.retain(|ticket| !gone(*ticket));
        lanes.retain(|_, lane| {
            let head_gone = lane.front().is_some_and(|ticket| gone(*ticket));
            lane.retain(|ticket| !gone(*ticket));
            if head_gone {
                ready.extend(lane.front());
            }
            !lane.is_empty()
        });
    }

    /// Records that may run now.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> EventKey {
        EventKey::from_parts([text]).unwrap()
    }

    #[test]
    fn records_of_one_key_run_in_turn_and_others_beside_them() {
        let mut dispatch = Dispatch::default();
        for (name, ticket) in [("a", 1), ("a", 2), ("b", 3), ("a", 4)] {
            dispatch.push(&key(name), ticket);
        }
        assert_eq!(dispatch.take(10), [1, 3]);
        dispatch.remove(&key("b"), 3);
        assert_eq!(dispatch.take(10), [0; 0]);
        dispatch.remove(&key("a"), 1);
        assert_eq!(dispatch.take(10), [2]);
        dispatch.remove(&key("a"), 2);
        assert_eq!(dispatch.take(10), [4]);
    }

    #[test]
    fn a_second_record_of_a_key_does_not_queue_behind_all_later_ones() {
        let mut dispatch = Dispatch::default();
        dispatch.push(&key("a"), 1);
        dispatch.push(&key("a"), 2);
        for ticket in 3..100 {
            dispatch.push(&key(&ticket.to_string()), ticket);
        }
        assert_eq!(dispatch.take(1), [1]);
        dispatch.remove(&key("a"), 1);
        assert_eq!(dispatch.take(2), [2, 3], "it would hold the commit point back");
    }

    #[test]
    fn a_record_that_waits_keeps_its_place() {
        let mut dispatch = Dispatch::default();
        dispatch.push(&key("a"), 1);
        dispatch.push(&key("a"), 2);
        dispatch.push(&key("b"), 3);
        assert_eq!(dispatch.take(1), [1]);
        dispatch.put_back(1);
        assert_eq!(dispatch.take(10), [1, 3]);
    }

    #[test]
    fn withdrawn_records_leave_no_trace() {
        let mut dispatch = Dispatch::default();
        dispatch.push(&key("a"), 1);
        dispatch.push(&key("a"), 2);
        dispatch.push(&key("a"), 3);
        dispatch.withdraw(|ticket| ticket < 3);
        assert_eq!(dispatch.take(10), [3]);
        dispatch.remove(&key("a"), 3);
        assert_eq!(dispatch.ready(), 0);
        assert!(dispatch.lanes.is_empty());
    }
}
