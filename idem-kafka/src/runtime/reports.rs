//! What the driver reports: partitions that come and go, records, answers to commits.

use super::*;

impl Loop {
    pub(super) fn take_report(&mut self, report: Report) {
        match report {
            Report::Assigned(partitions) => self.assigned(partitions),
            Report::Revoked(ids) => self.revoked(ids),
            Report::Lost(ids) => {
                tracing::warn!(partitions = ids.len(), "partitions were lost; nothing of them is committed");
                self.forget(&ids);
            }
            Report::Records(id, records) => self.records(id, records),
            Report::ReachedEnd(id, end) => {
                self.assignment.reach_end(id, end);
                self.unsaid = true;
            }
            Report::Committed(result) => self.committed(result),
            Report::OffsetLost { id, next_offset, reason } => self.offset_lost(id, next_offset, &reason),
            Report::Fatal(reason) => self.fatal(&reason),
        }
    }

    pub(super) fn assigned(&mut self, partitions: Vec<(PartitionId, Option<i64>, Arc<Gate>)>) {
        self.joined = true;
        for (id, committed, gate) in partitions {
            // Records of an earlier assignment that is still here, for whatever reason, are not this one's.
            self.withdraw(|item| item.record.id == id);
            gate.set_open(self.ending.is_none());
            self.gates.insert(id, gate);
            if self.routes[id.topic].guarded.spec().mode == Mode::Atomic {
                let span = longest_span(self.config.run_ahead);
                self.careful.insert(id, Careful::new(self.config.careful_records, span));
            }
            self.assignment.assign(id, committed);
        }
        tracing::info!(partitions = self.assignment.len(), "partitions assigned");
    }

    /// Stops admitting: what runs may end, and its offsets are committed before the partitions are released.
    pub(super) fn revoked(&mut self, ids: Vec<PartitionId>) {
        tracing::info!(partitions = ids.len(), "partitions revoked; draining them");
        for id in &ids {
            self.assignment.revoke(*id);
        }
        let gone: HashSet<_> = ids.iter().copied().collect();
        self.withdraw(|item| gone.contains(&item.record.id));
        let until = self.now() + self.config.revoke_timeout;
        self.revocation = Some(Revocation { ids, until, committing: false });
    }

    pub(super) fn advance_revocation(&mut self) {
        let now = self.now();
        let Some(revocation) = &self.revocation else { return };
        let drained = self.assignment.is_drained(&revocation.ids);
        let late = now >= revocation.until;
        if !drained && !late {
            return;
        }
        let ids: HashSet<_> = revocation.ids.iter().copied().collect();
        let unsaid = self.assignment.to_commit().iter().any(|(id, ..)| ids.contains(id));
        if !revocation.committing {
            if !drained {
                tracing::warn!(
                    "handlers of revoked partitions did not end in time; their work is delivered again elsewhere"
                );
            }
            if let Some(revocation) = &mut self.revocation {
                revocation.committing = true;
                revocation.until = now + REVOKE_COMMIT;
            }
            self.unsaid |= unsaid;
            if unsaid {
                return;
            }
        } else if unsaid && !late {
            return;
        }
        let ids: Vec<_> = ids.into_iter().collect();
        self.revocation = None;
        self.forget(&ids);
        self.tell(Command::Release);
    }

    /// The partitions are not ours any more. What runs for them may end, and counts for nothing here.
    pub(super) fn forget(&mut self, ids: &[PartitionId]) {
        for id in ids {
            self.assignment.remove(*id);
            self.gates.remove(id);
            self.careful.remove(id);
        }
        let gone: HashSet<_> = ids.iter().copied().collect();
        self.withdraw(|item| gone.contains(&item.record.id));
        self.drop_letters(|item| gone.contains(&item.record.id));
        if let Some(revocation) = &mut self.revocation {
            revocation.ids.retain(|id| !gone.contains(id));
        }
    }

    pub(super) fn records(&mut self, id: PartitionId, records: Vec<Record>) {
        let count = records.len();
        for record in records {
            self.stats.received();
            let delivered = if self.ending.is_some() { None } else { self.assignment.deliver(id, record.offset) };
            match delivered {
                None => self.release_memory(&record),
                Some((epoch, anew)) => {
                    if anew {
                        tracing::warn!(topic = %record.topic, partition = id.partition, "the topic was created anew");
                        self.withdraw(|item| item.record.id == id && item.epoch != epoch);
                    }
                    self.admit(record, epoch);
                }
            }
        }
        self.idle_since = None;
        // Where the first record of a partition stands is committed before it is decided: a restart must not begin later.
        self.unsaid = true;
        self.set_gate(id);
        // Last: from here on the driver may read the partition again, if its gate says so.
        if let Some(gate) = self.gates.get(&id) {
            gate.seen(count);
        }
        self.wake_driver();
    }

    pub(super) fn admit(&mut self, record: Record, epoch: Epoch) {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let route = &mut self.routes[record.id.topic];
        match decode(&route.guarded, &record) {
            Ok(delivery) => {
                let key = delivery.key().clone();
                let careful = self.careful.get_mut(&record.id);
                let admission = careful.map_or(Admission::Free, |careful| careful.admit(ticket));
                if admission != Admission::Wait {
                    route.dispatch.push(&key, ticket);
                }
                let mut item = Item::new(record, epoch, Some(key), Some(delivery.with_tag(ticket)));
                item.admit(admission);
                self.items.insert(ticket, item);
            }
            Err(verdict) => {
                self.stats.rejected();
                self.items.insert(ticket, Item::new(record, epoch, None, None));
                self.set_aside(ticket, verdict);
            }
        }
    }

    /// A careful record was tried, or is gone: those behind it may run if it was the last.
    pub(super) fn tried(&mut self, id: PartitionId, was_done: bool) {
        let Some(careful) = self.careful.get_mut(&id) else { return };
        let mut gone = 0;
        for (ticket, admission) in careful.tried(was_done) {
            if let Some(item) = self.items.get_mut(&ticket) {
                item.admit(admission);
                if let Some(key) = &item.key {
                    self.routes[id.topic].dispatch.push(key, ticket);
                }
            } else if admission == Admission::Careful {
                gone += 1;
            }
        }
        // What has left memory meanwhile makes room.
        for _ in 0..gone {
            self.tried(id, true);
        }
    }

    pub(super) fn committed(&mut self, result: KafkaResult<()>) {
        let now = self.now();
        for (id, epoch, next_offset) in self.commits.answered(result.is_ok(), now) {
            self.assignment.confirm(id, epoch, next_offset);
        }
        match result {
            Ok(()) => self.stats.offset_commits(),
            Err(error) => {
                // Normal in a rebalance. What was refused is committed again, or by the partition's next owner.
                self.stats.offset_commits_refused();
                self.unsaid = true;
                tracing::info!(errorMessage = %error, "an offset commit was refused; committing again");
            }
        }
    }

    pub(super) fn commit(&mut self) {
        if !self.unsaid || self.driver.is_none() || !self.commits.may_send(self.now()) {
            return;
        }
        self.unsaid = false;
        let offsets = self.assignment.to_commit();
        if !offsets.is_empty() {
            self.commits.sent(offsets.clone());
            self.tell(Command::Commit(offsets));
        }
    }

    pub(super) fn offset_lost(&mut self, id: PartitionId, next_offset: i64, reason: &str) {
        let (topic, partition) = (Arc::clone(&self.topics[id.topic]), id.partition);
        let goes_on = match self.config.on_offset_lost {
            OnOffsetLost::Stop => {
                let text = format!(
                    "offset {next_offset} of {topic}/{partition}, the next to read, does not exist, so records are lost or the topic was \
                     created anew ({reason}): decide with on_offset_lost = earliest | latest, or reset the group's offset"
                );
                self.failure.get_or_insert(Error::new(ErrorKind::Refused, text));
                return self.begin_ending();
            }
            OnOffsetLost::Earliest => "at the first record that is there",
            OnOffsetLost::Latest => "at the end",
        };
        self.assignment.lose_offset(id);
        tracing::error!(%topic, partition, next_offset, reason, "the next offset does not exist; going on {goes_on}");
    }

    /// The client is dead and says nothing to the group: everything is lost. Another client takes its place.
    pub(super) fn fatal(&mut self, reason: &str) {
        tracing::error!(reason, "the Kafka client cannot go on; everything is given up and a new client joins");
        let ids = self.assignment.ids();
        self.forget(&ids);
        self.commits.forget(self.now());
        self.revocation = None;
        self.driver = None;
        if self.ending.is_some() {
            return;
        }
        let (config, topics) = (self.config.clone(), Arc::clone(&self.topics));
        let (memory, sender) = (Arc::clone(&self.memory), self.sender.clone());
        self.batches.spawn(async move {
            let mut times = 0;
            loop {
                let share: f64 = rand::rng().random();
                tokio::time::sleep(probe_wait(times, share)).await;
                match Driver::start(&config, Arc::clone(&topics), Arc::clone(&memory), sender.clone()).await {
                    Ok(driver) => return sender.send(Occurrence::Restarted(driver)).unwrap_or_default(),
                    Err(error) => tracing::error!(errorMessage = %error.describe(), "no new Kafka client yet"),
                }
                times += 1;
            }
        });
    }

    pub(super) fn tell(&self, command: Command) {
        if let Some(driver) = &self.driver {
            driver.tell(command);
        }
    }
}
