//! Asked to end, or idle: draining, the last commit, leaving the group.

use super::*;

impl Loop {
    pub(super) fn begin_ending(&mut self) {
        if self.ending.is_some() {
            return;
        }
        let until = self.now() + self.config.drain_timeout;
        tracing::info!(running = self.running(), "ending: nothing new begins, what runs may end");
        self.ending = Some(Stage::Draining { until });
        for gate in self.gates.values() {
            gate.set_open(false);
        }
        self.careful.clear();
        self.withdraw(|_| true);
    }

    pub(super) fn running(&self) -> usize {
        self.items.values().filter(|item| item.place != Place::Waiting).count()
    }

    /// Moves the ending on. Answers, once it is done, whether the deadline cut off work.
    pub(super) fn advance_ending(&mut self) -> Option<bool> {
        let stage = self.ending?;
        let now = self.now();
        let busy = self.transactions > 0 || self.running() > 0;
        let unsaid = self.driver.is_some() && (self.commits.is_in_flight() || !self.assignment.to_commit().is_empty());
        let next = shutdown::advance(stage, now, busy, unsaid);
        if matches!((stage, next), (Stage::Draining { .. }, Stage::Cut { .. })) {
            tracing::warn!(running = self.running(), "the deadline for ending has come; what still runs is cut off");
            self.hard_stop.cancel();
            self.drop_letters(|_| true);
        }
        if next != stage {
            self.ending = Some(next);
            self.unsaid |= matches!(next, Stage::Committing { .. });
            self.commit();
        }
        match next {
            Stage::Done { cut } => Some(cut),
            _ => None,
        }
    }

    /// Gives up dead letters that are not acknowledged: their records stay uncommitted, and are delivered again.
    pub(super) fn drop_letters(&mut self, matches: impl Fn(&Item) -> bool) {
        let setting_aside = |item: &Item| item.place == Place::SettingAside && matches(item);
        let gone: Vec<_> =
            self.items.iter().filter(|(_, item)| setting_aside(item)).map(|(ticket, _)| *ticket).collect();
        for ticket in gone {
            if let Some(item) = self.items.get(&ticket) {
                if let Some(letter) = &item.letter {
                    letter.abort();
                }
                self.assignment.end(item.record.id, item.epoch);
            }
            self.finish(ticket);
        }
    }

    /// Leaves the group.
    pub(super) async fn close(mut self, cut: bool) -> Result<(), Error> {
        // First, so that the partitions are free whatever a handler does.
        if let Some(driver) = self.driver.take() {
            driver.close().await;
        }
        // A handler that blocks its thread cannot be dropped; its process ends with it in the end.
        let all_dropped = async {
            self.batches.shutdown().await;
            self.letters.shutdown().await;
        };
        if tokio::time::timeout(shutdown::AFTER_CUT, all_dropped).await.is_err() {
            tracing::error!("a handler blocks its thread and cannot be dropped");
        }
        match self.failure {
            Some(failure) => Err(failure),
            None if cut => {
                let text =
                    "the deadline for ending came before all handlers had ended; what was cut is delivered again";
                Err(Error::new(ErrorKind::DrainCutShort, text))
            }
            None => Ok(()),
        }
    }

    pub(super) fn look_for_idleness(&mut self) {
        let Some(span) = self.config.until_idle else { return };
        let idle = self.joined
            && self.revocation.is_none()
            && self.items.is_empty()
            && !self.commits.is_in_flight()
            && self.assignment.is_at_end()
            && self.assignment.to_commit().is_empty();
        let now = self.now();
        match (idle, self.idle_since) {
            (false, _) => self.idle_since = None,
            (true, None) => self.idle_since = Some(now),
            (true, Some(since)) if now >= since + span => self.begin_ending(),
            (true, Some(_)) => {}
        }
    }
}
