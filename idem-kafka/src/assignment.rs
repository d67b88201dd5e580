//! PURE: owned partitions, assignment epochs, and what must drain.
//!
//! The broker does not check that the member which commits a partition owns it, so this is the only place where an answer
//! that comes too late is kept from moving an offset: every record carries the epoch in which it was delivered, and an
//! answer of another epoch is ignored.

use std::collections::HashMap;

use crate::offsets::Offsets;

/// A partition of one of the consumer's topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PartitionId {
    /// Position among the consumer's topics.
    pub topic: usize,
    pub partition: i32,
}

/// Grows whenever a partition begins anew: assigned, or its topic created again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Epoch(u64);

#[derive(Debug, Default)]
pub(crate) struct Assignment {
    owned: HashMap<PartitionId, Owned>,
    epochs: u64,
}

#[derive(Debug)]
struct Owned {
    epoch: Epoch,
    offsets: Offsets,
    /// On its way to another member: nothing new begins.
    revoked: bool,
    /// Records whose handler is running, or whose dead letter is on its way.
    running: usize,
}

impl Assignment {
    /// The partition is ours from now on.
    pub fn assign(&mut self, id: PartitionId, committed: Option<i64>) {
        let epoch = self.next_epoch();
        self.owned.insert(id, Owned { epoch, offsets: Offsets::new(committed), revoked: false, running: 0 });
    }

    /// The partition moves to another member: what runs may end, nothing new begins.
    pub fn revoke(&mut self, id: PartitionId) {
        if let Some(owned) = self.owned.get_mut(&id) {
            owned.revoked = true;
        }
    }

    /// The partition is no longer ours, and nothing of it counts any more.
    pub fn remove(&mut self, id: PartitionId) {
        self.owned.remove(&id);
    }

    /// A record was delivered: the epoch it belongs to, and whether that epoch began with it because the topic was created
    /// anew. Nothing if the partition is not ours, or on its way.
    pub fn deliver(&mut self, id: PartitionId, offset: i64) -> Option<(Epoch, bool)> {
        let next = Epoch(self.epochs + 1);
        let owned = self.owned.get_mut(&id).filter(|owned| !owned.revoked)?;
        if owned.offsets.deliver(offset).is_ok() {
            return Some((owned.epoch, false));
        }
        self.epochs += 1;
        *owned = Owned { epoch: next, offsets: Offsets::new(None), revoked: false, running: 0 };
        owned.offsets.deliver(offset).ok()?;
        Some((next, true))
    }

    /// The end of the partition was reached.
    pub fn reach_end(&mut self, id: PartitionId, end: i64) {
        if let Some(owned) = self.owned.get_mut(&id) {
            owned.offsets.reach_end(end);
        }
    }

    /// Work on a record begins. False if it must not: the record is of another epoch, or its partition is on its way.
    pub fn begin(&mut self, id: PartitionId, epoch: Epoch) -> bool {
        match self.owned.get_mut(&id) {
            Some(owned) if owned.epoch == epoch && !owned.revoked => {
                owned.running += 1;
                true
            }
            _ => false,
        }
    }

    /// Work on a record ended, decided or not.
    pub fn end(&mut self, id: PartitionId, epoch: Epoch) {
        if let Some(owned) = self.current(id, epoch) {
            owned.running = owned.running.saturating_sub(1);
        }
    }

    /// The record's outcome is durable. False if the record is of another epoch: nothing moved.
    pub fn decide(&mut self, id: PartitionId, epoch: Epoch, offset: i64) -> bool {
        match self.current(id, epoch) {
            Some(owned) => {
                owned.offsets.decide(offset);
                true
            }
            None => false,
        }
    }

    /// Whether a record still counts.
    pub fn is_current(&self, id: PartitionId, epoch: Epoch) -> bool {
        self.owned.get(&id).is_some_and(|owned| owned.epoch == epoch)
    }

    /// Offsets that the broker does not have yet, with the epoch that their confirmation must name.
    pub fn to_commit(&self) -> Vec<(PartitionId, Epoch, i64)> {
        let due = |(id, owned): (&PartitionId, &Owned)| Some((*id, owned.epoch, owned.offsets.to_commit()?));
        self.owned.iter().filter_map(due).collect()
    }

    /// The broker has confirmed a commit.
    pub fn confirm(&mut self, id: PartitionId, epoch: Epoch, next_offset: i64) {
        if let Some(owned) = self.current(id, epoch) {
            owned.offsets.confirm(next_offset);
        }
    }

    /// The partition's committed offset is gone, and reading goes on elsewhere.
    pub fn lose_offset(&mut self, id: PartitionId) {
        if let Some(owned) = self.owned.get_mut(&id) {
            owned.offsets.forget_committed();
        }
    }

    /// Whether nothing of these partitions runs any more.
    pub fn is_drained(&self, ids: &[PartitionId]) -> bool {
        ids.iter().all(|id| self.owned.get(id).is_none_or(|owned| owned.running == 0))
    }

    /// Every partition that is ours.
    pub fn ids(&self) -> Vec<PartitionId> {
        self.owned.keys().copied().collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.owned.len()
    }

    /// Records delivered and not decided, and records that a restart would deliver again.
    pub fn load(&self, id: PartitionId) -> (usize, usize) {
        self.owned.get(&id).map_or((0, 0), |owned| (owned.offsets.undecided(), owned.offsets.span()))
    }

    /// Whether every partition is decided up to its end.
    pub fn is_at_end(&self) -> bool {
        self.owned.values().all(|owned| owned.offsets.is_at_end())
    }

    fn current(&mut self, id: PartitionId, epoch: Epoch) -> Option<&mut Owned> {
        self.owned.get_mut(&id).filter(|owned| owned.epoch == epoch)
    }

    fn next_epoch(&mut self) -> Epoch {
        self.epochs += 1;
        Epoch(self.epochs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P0: PartitionId = PartitionId { topic: 0, partition: 0 };

    fn owned() -> (Assignment, Epoch) {
        let mut assignment = Assignment::default();
        assignment.assign(P0, None);
        let (epoch, anew) = assignment.deliver(P0, 0).unwrap();
        assert!(!anew);
        (assignment, epoch)
    }

    #[test]
    fn an_answer_of_an_earlier_assignment_moves_nothing() {
        let (mut assignment, before) = owned();
        assert!(assignment.begin(P0, before));
        assignment.remove(P0);
        assignment.assign(P0, None);
        let (now, _) = assignment.deliver(P0, 0).unwrap();
        assert_ne!(before, now);
        assert!(!assignment.decide(P0, before, 0), "the partition left and came back");
        assert_eq!(assignment.to_commit(), vec![(P0, now, 0)]);
        assignment.confirm(P0, before, 7);
        assert!(assignment.decide(P0, now, 0));
        assert_eq!(assignment.to_commit(), vec![(P0, now, 1)]);
    }

    #[test]
    fn a_topic_created_anew_starts_a_new_epoch() {
        let (mut assignment, before) = owned();
        assignment.decide(P0, before, 0);
        assignment.confirm(P0, before, 1);
        let (now, anew) = assignment.deliver(P0, 0).unwrap();
        assert!(anew && now != before);
        assert!(assignment.decide(P0, now, 0));
        assert_eq!(assignment.to_commit(), vec![(P0, now, 1)], "commits may go back with the new life");
    }

    #[test]
    fn a_revoked_partition_begins_nothing_and_drains() {
        let (mut assignment, epoch) = owned();
        assert!(assignment.begin(P0, epoch));
        assignment.revoke(P0);
        assert!(!assignment.begin(P0, epoch));
        assert_eq!(assignment.deliver(P0, 1), None);
        assert!(!assignment.is_drained(&[P0]));
        assignment.decide(P0, epoch, 0);
        assignment.end(P0, epoch);
        assert!(assignment.is_drained(&[P0]));
        assert_eq!(assignment.to_commit(), vec![(P0, epoch, 1)]);
    }

    #[test]
    fn a_lost_partition_commits_nothing() {
        let (mut assignment, epoch) = owned();
        assignment.decide(P0, epoch, 0);
        assignment.remove(P0);
        assert_eq!(assignment.to_commit(), vec![]);
        assert!(assignment.is_drained(&[P0]));
    }
}
