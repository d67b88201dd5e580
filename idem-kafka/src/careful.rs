//! PURE: which records of a partition run carefully after it was assigned.
//!
//! An atomic handler's claim is rolled back with a crash, and the attempt with it: a message that kills its process would be
//! tried for ever. So the first records after an assignment that are not done yet commit their claims before they run, one
//! at a time, and those behind them wait until each of them has been tried. If the process dies all the same, the next one
//! finds these done, and gets as much further, until it is the deadly message's turn to run carefully: its attempts count.

use std::collections::VecDeque;

use crate::dispatch::Ticket;

/// The first records of one assignment of one partition.
#[derive(Debug)]
pub(crate) struct Careful {
    /// How many more must be tried that were not done already.
    quota: usize,
    /// How many more may be looked at, done or not: as many as the process before can have had in flight.
    span: usize,
    /// How many run carefully now.
    untried: usize,
    /// Those behind them.
    waiting: VecDeque<Ticket>,
}

/// What to do with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Run it carefully.
    Careful,
    /// Run it like any other.
    Free,
    /// Keep it: [`Careful::tried`] says when and how it may run.
    Wait,
}

impl Careful {
    /// The first `quota` that are not done run carefully, of the first `span` at most.
    pub fn new(quota: usize, span: usize) -> Self {
        Self { quota, span, untried: 0, waiting: VecDeque::new() }
    }

    /// The next record, in the order of the partition.
    pub fn admit(&mut self, ticket: Ticket) -> Admission {
        self.waiting.push_back(ticket);
        // It is the last one in, so it is the last one out.
        self.next().pop().map_or(Admission::Wait, |(_, admission)| admission)
    }

    /// A careful record was tried for the first time, or has left memory before. Answers those that may run now, and how.
    pub fn tried(&mut self, was_done: bool) -> Vec<(Ticket, Admission)> {
        self.untried = self.untried.saturating_sub(1);
        if !was_done {
            self.quota = self.quota.saturating_sub(1);
        }
        self.next()
    }

    fn next(&mut self) -> Vec<(Ticket, Admission)> {
        let mut next = Vec::new();
        while self.untried < self.quota && self.span > 0 {
            let Some(ticket) = self.waiting.pop_front() else { return next };
            self.untried += 1;
            self.span -= 1;
            next.push((ticket, Admission::Careful));
        }
        if self.untried == 0 {
            next.extend(self.waiting.drain(..).map(|ticket| (ticket, Admission::Free)));
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::Admission::{self, Careful as Carefully, Free, Wait};
    use super::Careful;

    fn admitted(careful: &mut Careful, tickets: std::ops::RangeInclusive<u64>) -> Vec<Admission> {
        tickets.map(|ticket| careful.admit(ticket)).collect()
    }

    #[test]
    fn those_behind_wait_until_each_careful_one_was_tried() {
        let mut careful = Careful::new(2, 100);
        assert_eq!(admitted(&mut careful, 1..=4), [Carefully, Carefully, Wait, Wait]);
        assert_eq!(careful.tried(false), []);
        assert_eq!(careful.tried(false), [(3, Free), (4, Free)]);
        assert_eq!(careful.admit(5), Free);
    }

    #[test]
    fn what_was_done_before_makes_room_for_the_next() {
        let mut careful = Careful::new(2, 100);
        assert_eq!(admitted(&mut careful, 1..=5), [Carefully, Carefully, Wait, Wait, Wait]);
        assert_eq!(careful.tried(true), [(3, Carefully)]);
        assert_eq!(careful.tried(true), [(4, Carefully)]);
        assert_eq!(careful.tried(false), []);
        assert_eq!(careful.tried(false), [(5, Free)]);
    }

    #[test]
    fn a_long_row_of_done_ones_ends_it() {
        let mut careful = Careful::new(2, 3);
        assert_eq!(admitted(&mut careful, 1..=5), [Carefully, Carefully, Wait, Wait, Wait]);
        assert_eq!(careful.tried(true), [(3, Carefully)]);
        assert_eq!(careful.tried(true), []);
        assert_eq!(careful.tried(true), [(4, Free), (5, Free)]);
        assert_eq!(careful.admit(6), Free);
    }

    #[test]
    fn few_records_leave_the_rest_to_later_ones() {
        let mut careful = Careful::new(2, 100);
        assert_eq!(careful.admit(1), Carefully);
        assert_eq!(careful.tried(false), []);
        assert_eq!(admitted(&mut careful, 2..=3), [Carefully, Wait]);
        assert_eq!(careful.tried(false), [(3, Free)]);
    }

    #[test]
    fn none_is_careful_if_none_is_asked_for() {
        let mut careful = Careful::new(0, 100);
        assert_eq!(admitted(&mut careful, 1..=2), [Free, Free]);
    }
}
