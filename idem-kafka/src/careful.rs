//! PURE: which records of a partition run carefully after it was assigned.
//!
//! An atomic handler's claim is rolled back with a crash, and the attempt with it: a message that kills its process would be
//! tried for ever. Wherever the process before ended, such a message is among the first that are not decided, or becomes so
//! when those before it are done. So the first records after an assignment commit their claims before they run, one at a
//! time, and those behind them wait until each of them has been tried once.

use std::collections::VecDeque;

use crate::dispatch::Ticket;

/// The first records of one assignment of one partition.
#[derive(Debug)]
pub(crate) struct Careful {
    /// How many more will run carefully.
    left: usize,
    /// How many do, and have not been tried yet.
    untried: usize,
    /// Those behind them.
    waiting: VecDeque<Ticket>,
}

/// What to do with a record that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Run it carefully.
    Careful,
    /// Run it like any other.
    Free,
    /// Keep it: [`Careful::tried`] says when it may run.
    Wait,
}

impl Careful {
    /// The first `records` run carefully.
    pub fn new(records: usize) -> Self {
        Self { left: records, untried: 0, waiting: VecDeque::new() }
    }

    /// The next record, in the order of the partition.
    pub fn admit(&mut self, ticket: Ticket) -> Admission {
        if self.left > 0 {
            self.left -= 1;
            self.untried += 1;
            Admission::Careful
        } else if self.untried > 0 {
            self.waiting.push_back(ticket);
            Admission::Wait
        } else {
            Admission::Free
        }
    }

    /// A careful record came back for the first time, decided or not, or left memory before. Answers those that may run now.
    pub fn tried(&mut self) -> VecDeque<Ticket> {
        self.untried = self.untried.saturating_sub(1);
        if self.left == 0 && self.untried == 0 { std::mem::take(&mut self.waiting) } else { VecDeque::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_behind_wait_until_each_careful_one_was_tried() {
        let mut careful = Careful::new(2);
        let admitted: Vec<_> = (1..=4).map(|ticket| careful.admit(ticket)).collect();
        assert_eq!(admitted, [Admission::Careful, Admission::Careful, Admission::Wait, Admission::Wait]);
        assert!(careful.tried().is_empty());
        assert_eq!(careful.tried(), [3, 4]);
        assert_eq!(careful.admit(5), Admission::Free);
    }

    #[test]
    fn few_records_leave_the_rest_to_later_ones() {
        let mut careful = Careful::new(2);
        assert_eq!(careful.admit(1), Admission::Careful);
        assert!(careful.tried().is_empty());
        assert_eq!(careful.admit(2), Admission::Careful);
        assert_eq!(careful.admit(3), Admission::Wait);
        assert_eq!(careful.tried(), [3]);
    }

    #[test]
    fn none_is_careful_if_none_is_asked_for() {
        let mut careful = Careful::new(0);
        assert_eq!(careful.admit(1), Admission::Free);
        assert!(careful.tried().is_empty());
    }
}
