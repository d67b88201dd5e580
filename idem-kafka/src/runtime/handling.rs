//! From a record in its lane to its decided outcome.

use super::*;

impl Loop {
    /// Gives to workers what may run now.
    pub(super) fn dispatch(&mut self) {
        if self.outage.is_some() || self.ending.is_some() {
            return;
        }
        for route in 0..self.routes.len() {
            while let Some(tickets) = self.take_batch(route) {
                let deliveries = self.begin(route, tickets);
                if deliveries.is_empty() {
                    continue;
                }
                let guarded = self.routes[route].guarded.clone();
                match guarded.spec().mode {
                    Mode::Atomic => self.transactions += 1,
                    Mode::Lease => {
                        self.handlers += deliveries.len();
                        self.routes[route].claiming = true;
                    }
                }
                self.batches.spawn(worker::run(
                    route,
                    guarded,
                    deliveries,
                    self.hard_stop.clone(),
                    self.sender.clone(),
                ));
            }
        }
    }

    pub(super) fn take_batch(&mut self, route: usize) -> Option<Vec<Ticket>> {
        let state = &mut self.routes[route];
        let ready = state.dispatch.ready();
        let most = match state.guarded.spec().mode {
            Mode::Atomic => {
                let free = self.config.transactions.saturating_sub(self.transactions);
                if free == 0 { 0 } else { state.batch_size.next(ready, free) }
            }
            Mode::Lease if state.claiming => 0,
            Mode::Lease => self.config.concurrency.saturating_sub(self.handlers).min(self.config.batch),
        };
        (ready > 0 && most > 0).then(|| state.dispatch.take(most))
    }

    /// Marks what was taken as running. Records that no longer count are dropped here.
    pub(super) fn begin(&mut self, route: usize, tickets: Vec<Ticket>) -> Vec<Delivery> {
        let mut deliveries = Vec::with_capacity(tickets.len());
        for ticket in tickets {
            let Some(item) = self.items.get_mut(&ticket) else { continue };
            debug_assert_eq!(item.record.id.topic, route);
            if self.assignment.begin(item.record.id, item.epoch) {
                item.place = Place::Running;
                deliveries.extend(item.delivery.take());
            } else {
                self.finish(ticket);
            }
        }
        deliveries
    }

    pub(super) fn batch_ended(&mut self, route: usize, messages: usize, elapsed: Duration) {
        self.reap();
        if self.routes[route].guarded.spec().mode == Mode::Atomic {
            self.transactions = self.transactions.saturating_sub(1);
            self.routes[route].batch_size.measured(messages, elapsed);
        }
    }

    /// A batch must always report its end. One that could not, because something panicked that is not a handler, leaves
    /// records that nobody would ever decide: better to end, and begin anew.
    pub(super) fn reap(&mut self) {
        while let Some(ended) = self.batches.try_join_next() {
            if let Err(error) = ended
                && error.is_panic()
            {
                let text = "a batch ended by a panic outside its handlers";
                self.failure.get_or_insert(Error::with_cause(ErrorKind::Failed, text, error));
                self.begin_ending();
            }
        }
    }

    /// A delivery came back. Only here, and for an acknowledged dead letter, does an offset become free to move.
    pub(super) fn decided(&mut self, delivery: Delivery, outcome: Outcome) {
        let ticket = delivery.tag();
        let Some(item) = self.items.get_mut(&ticket) else { return };
        let route = item.record.id.topic;
        if self.routes[route].guarded.spec().mode == Mode::Lease {
            self.handlers = self.handlers.saturating_sub(1);
        }
        self.assignment.end(item.record.id, item.epoch);
        item.place = Place::Waiting;
        let id = item.record.id;
        let current = self.assignment.is_current(id, item.epoch);
        if item.untried && !matches!(outcome, Outcome::Undecided(_)) {
            item.untried = false;
            self.tried(id, matches!(outcome, Outcome::Duplicate(_)));
        }
        self.log(&delivery, &outcome);
        self.count(&outcome);
        if !current {
            return self.finish(ticket);
        }
        let on_conflict = self.routes[route].guarded.spec().on_conflict;
        if let Some(verdict) = verdict(&outcome, on_conflict, delivery.key().as_str(), delivery.fingerprint()) {
            return self.set_aside(ticket, verdict);
        }
        if let Some(item) = self.items.get_mut(&ticket) {
            item.delivery = Some(delivery);
        }
        let share: f64 = rand::rng().random();
        match outcome {
            Outcome::Completed { .. } | Outcome::Duplicate(_) => self.decide(ticket),
            Outcome::Conflict if on_conflict == OnConflict::Skip => self.decide(ticket),
            Outcome::Conflict => self.stop_at_conflict(ticket),
            Outcome::Failed { retry_in: Some(wait), .. } | Outcome::NotDue { wait } => self.wait(ticket, wait),
            Outcome::InProgress { wait } => self.wait_gently(ticket, wait, share),
            Outcome::LeaseLost => self.wait_gently(ticket, Duration::ZERO, share),
            Outcome::Undecided(Undecided::Unavailable(error)) => {
                self.routes[route].dispatch.put_back(ticket);
                self.begin_outage(&error);
            }
            Outcome::Undecided(Undecided::Contention(_)) => self.wait(ticket, AFTER_CONTENTION.mul_f64(1.0 + share)),
            Outcome::Undecided(Undecided::Broken(_)) => self.wait(ticket, AFTER_BROKEN),
            Outcome::Undecided(Undecided::Cancelled) => self.finish(ticket),
            // Every outcome that sets a record aside was taken above; one that is not known here stays undecided.
            _ => self.wait(ticket, AFTER_BROKEN),
        }
    }

    /// Ends the consumer, with this record undecided: it is delivered again until a person has decided.
    fn stop_at_conflict(&mut self, ticket: Ticket) {
        if let Some(item) = self.items.get(&ticket) {
            let text = format!(
                "the key of {} was used for another payload, and `on_conflict = \"stop\"` asks to stop there",
                item.record.message_id()
            );
            self.failure.get_or_insert(Error::new(ErrorKind::Refused, text));
        }
        self.finish(ticket);
        self.begin_ending();
    }

    pub(super) fn wait_gently(&mut self, ticket: Ticket, lease_left: Duration, share: f64) {
        let Some(item) = self.items.get_mut(&ticket) else { return };
        item.times += 1;
        let wait = in_progress_wait(lease_left, item.times - 1, share);
        self.wait(ticket, wait);
    }

    /// Holds the record, and with it its key, for a while. Holds no lease and no connection.
    pub(super) fn wait(&mut self, ticket: Ticket, wait: Duration) {
        if self.ending.is_some() || self.is_revoked(ticket) {
            return self.finish(ticket);
        }
        self.timers.push(Reverse((self.now() + wait, ticket)));
    }

    pub(super) fn is_revoked(&self, ticket: Ticket) -> bool {
        let (Some(revocation), Some(item)) = (&self.revocation, self.items.get(&ticket)) else { return false };
        revocation.ids.contains(&item.record.id)
    }

    pub(super) fn wake_waiting(&mut self) {
        let now = self.now();
        while let Some(Reverse((at, ticket))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            self.timers.pop();
            if let Some(item) = self.items.get(&ticket).filter(|item| item.place == Place::Waiting) {
                self.routes[item.record.id.topic].dispatch.put_back(ticket);
            }
        }
    }

    /// The record's outcome is durable.
    pub(super) fn decide(&mut self, ticket: Ticket) {
        self.outages_in_a_row = 0;
        if let Some(item) = self.items.get(&ticket) {
            self.assignment.decide(item.record.id, item.epoch, item.record.offset);
            self.unsaid = true;
        }
        self.finish(ticket);
    }

    /// The record leaves memory; the next one of its key may run.
    pub(super) fn finish(&mut self, ticket: Ticket) {
        let Some(item) = self.items.remove(&ticket) else { return };
        if let Some(key) = &item.key {
            self.routes[item.record.id.topic].dispatch.remove(key, ticket);
        }
        if item.untried {
            self.tried(item.record.id, true);
        }
        self.release_memory(&item.record);
        self.set_gate(item.record.id);
    }

    /// Drops records that are not running and match.
    pub(super) fn withdraw(&mut self, matches: impl Fn(&Item) -> bool) {
        let gone: HashSet<Ticket> = self
            .items
            .iter()
            .filter(|(_, item)| item.place == Place::Waiting && matches(item))
            .map(|(ticket, _)| *ticket)
            .collect();
        if gone.is_empty() {
            return;
        }
        for route in &mut self.routes {
            route.dispatch.withdraw(|ticket| gone.contains(&ticket));
        }
        for ticket in gone {
            if let Some(item) = self.items.remove(&ticket) {
                self.release_memory(&item.record);
                if item.untried {
                    self.tried(item.record.id, true);
                }
            }
        }
    }

    pub(super) fn release_memory(&self, record: &Record) {
        let bytes = record.bytes() as u64;
        let before = self.memory.fetch_sub(bytes, Ordering::Relaxed);
        let limit = self.config.run_ahead_bytes as u64;
        if before >= limit && before - bytes < limit {
            self.wake_driver();
        }
    }

    /// Opens or shuts a partition, as its load allows.
    pub(super) fn set_gate(&self, id: PartitionId) {
        if let Some(gate) = self.gates.get(&id) {
            let (undecided, span) = self.assignment.load(id);
            let open = may_read(undecided, span, 0, self.config.run_ahead, self.config.run_ahead_bytes);
            if gate.set_open(open && self.ending.is_none()) {
                self.wake_driver();
            }
        }
    }

    pub(super) fn wake_driver(&self) {
        if let Some(driver) = &self.driver {
            driver.wake();
        }
    }
}
