//! Which messages to produce: orders, and duplicates of each kind among them. Pure: the seed decides everything but the time.

use std::collections::VecDeque;
use std::time::Duration;

use chrono::{DateTime, Utc};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::example::Order;

/// A duplicate repeats one of the last so many orders: near enough to meet its original in one batch, far enough to come
/// long after it.
const REPEATED: usize = 2_000;
/// Of how many duplicates one asks for something else under the same key.
const CONFLICTS: u64 = 50;
/// Orders of one seed, at most, so that seeds do not share orders.
const ORDERS_PER_SEED: u64 = 10_000_000;

/// How many messages, and how many of them are duplicates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// All messages.
    pub messages: u64,
    /// The part of them that repeats a job which another message asked for, from 0 to below 1.
    pub duplicates: f64,
    /// Another seed, other orders.
    pub seed: u64,
    /// Partitions of the topic.
    pub partitions: i32,
}

/// What a message is to its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The first that asks for it.
    Original,
    /// The same bytes produced twice, to the same partition.
    ProducedTwice,
    /// A producer that tried again after a time-out: a new event id, another partition.
    Retried,
    /// The same key, but another amount.
    OtherPayload,
}

/// One message to produce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// What it is to its job.
    pub kind: Kind,
    /// What it asks for.
    pub order: Order,
    /// Where it goes.
    pub partition: i32,
}

/// The messages, one after the other.
#[derive(Debug)]
pub struct Plan {
    shape: Shape,
    rng: StdRng,
    now: DateTime<Utc>,
    messages_left: u64,
    duplicates_left: u64,
    orders: u64,
    recent: VecDeque<Order>,
}

impl Shape {
    /// How many messages are duplicates.
    pub fn duplicates(&self) -> u64 {
        // The first message has nothing to repeat.
        ((self.messages as f64 * self.duplicates).round() as u64).min(self.messages.saturating_sub(1))
    }

    /// The messages; `now` is when the first order was paid.
    pub fn plan(self, now: DateTime<Utc>) -> Plan {
        Plan {
            shape: self,
            rng: StdRng::seed_from_u64(self.seed),
            now,
            messages_left: self.messages,
            duplicates_left: self.duplicates(),
            orders: 0,
            recent: VecDeque::new(),
        }
    }
}

impl Iterator for Plan {
    type Item = Planned;

    fn next(&mut self) -> Option<Planned> {
        let left = self.messages_left;
        self.messages_left = left.checked_sub(1)?;
        // Draws so many of the messages that are left: exact in the end, and spread evenly.
        let repeats = !self.recent.is_empty() && self.rng.random_range(0..left) < self.duplicates_left;
        Some(if repeats { self.duplicate() } else { self.original() })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.messages_left).ok();
        (left.unwrap_or(usize::MAX), left)
    }
}

impl Plan {
    fn original(&mut self) -> Planned {
        let number = self.shape.seed.wrapping_mul(ORDERS_PER_SEED).wrapping_add(1001 + self.orders);
        let order = Order {
            number,
            amount: self.rng.random_range(10..2_000) * 500,
            currency: ["IDR", "IDR", "SGD", "EUR"][self.rng.random_range(0..4)],
            event_id: self.event_id(),
            paid_at: self.now + Duration::from_millis(self.orders),
        };
        self.orders += 1;
        self.recent.push_back(order.clone());
        if self.recent.len() > REPEATED {
            self.recent.pop_front();
        }
        let partition = self.home_of(&order);
        Planned { kind: Kind::Original, order, partition }
    }

    fn duplicate(&mut self) -> Planned {
        let mut order = self.recent[self.rng.random_range(0..self.recent.len())].clone();
        let home = self.home_of(&order);
        let kind = match self.duplicates_left {
            left if left % CONFLICTS == 0 || (left == 1 && self.shape.duplicates() < CONFLICTS) => Kind::OtherPayload,
            _ if self.rng.random() => Kind::ProducedTwice,
            _ => Kind::Retried,
        };
        self.duplicates_left -= 1;
        let partition = match kind {
            Kind::Original | Kind::ProducedTwice => home,
            Kind::Retried | Kind::OtherPayload => self.elsewhere(home),
        };
        if kind != Kind::ProducedTwice {
            order.event_id = self.event_id();
        }
        if kind == Kind::OtherPayload {
            order.amount += 1;
        }
        Planned { kind, order, partition }
    }

    /// Where an order goes unless something goes wrong.
    fn home_of(&self, order: &Order) -> i32 {
        // Fibonacci hashing: orders in a row land on partitions in no order.
        let mixed = order.number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        (mixed % self.shape.partitions as u64) as i32
    }

    fn elsewhere(&mut self, home: i32) -> i32 {
        match self.shape.partitions {
            1 => home,
            partitions => (home + self.rng.random_range(1..partitions)) % partitions,
        }
    }

    fn event_id(&mut self) -> String {
        uuid::Builder::from_random_bytes(self.rng.random()).into_uuid().to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const SHAPE: Shape = Shape { messages: 5_000, duplicates: 0.2, seed: 7, partitions: 6 };

    fn plan(shape: Shape) -> Vec<Planned> {
        shape.plan(DateTime::UNIX_EPOCH).collect()
    }

    #[test]
    fn there_are_as_many_duplicates_as_asked_for() {
        for (messages, duplicates) in [(5_000, 0.2), (5_000, 0.0), (10, 0.5), (1, 0.9), (100, 0.9), (0, 0.2)] {
            let shape = Shape { messages, duplicates, ..SHAPE };
            let planned = plan(shape);
            assert_eq!(planned.len() as u64, messages);
            let found = planned.iter().filter(|planned| planned.kind != Kind::Original).count() as u64;
            assert_eq!(found, shape.duplicates(), "{shape:?}");
        }
    }

    #[test]
    fn each_kind_is_what_it_says() {
        let mut originals = HashMap::new();
        let mut kinds: HashMap<Kind, u32> = HashMap::new();
        for planned in plan(SHAPE) {
            *kinds.entry(planned.kind).or_default() += 1;
            let number = planned.order.number;
            if planned.kind == Kind::Original {
                assert!(originals.insert(number, planned).is_none(), "an order is planned twice");
                continue;
            }
            let original = &originals[&number];
            let same_event = planned.order.event_id == original.order.event_id;
            let same_amount = planned.order.amount == original.order.amount;
            let same_partition = planned.partition == original.partition;
            match planned.kind {
                Kind::Original | Kind::ProducedTwice => assert!(planned.order == original.order && same_partition),
                Kind::Retried => assert!(!same_event && same_amount && !same_partition),
                Kind::OtherPayload => assert!(!same_event && !same_amount && !same_partition),
            }
        }
        assert!(kinds[&Kind::OtherPayload] == 20 && kinds.len() == 4, "{kinds:?}");
    }

    #[test]
    fn the_seed_decides_everything() {
        assert_eq!(plan(SHAPE), plan(SHAPE));
        let numbers = |seed| plan(Shape { seed, ..SHAPE }).into_iter().map(|planned| planned.order.number);
        assert!(numbers(7).max() < numbers(8).min(), "seeds share orders");
    }

    #[test]
    fn partitions_get_about_the_same() {
        let mut counts = [0_u32; 6];
        plan(SHAPE).iter().for_each(|planned| counts[planned.partition as usize] += 1);
        assert!(counts.iter().all(|count| (600..1_100).contains(count)), "{counts:?}");
    }
}
