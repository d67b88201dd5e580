//! Waiting for a store that is away.

use super::*;

impl Loop {
    /// The store is away: not the messages' fault. Nothing new begins, nothing is counted against anyone; partitions stay
    /// ours, and records wait in the broker once a little is read ahead.
    pub(super) fn begin_outage(&mut self, error: &StoreError) {
        if self.outage.is_none() {
            self.stats.outages();
            tracing::error!(errorMessage = %describe(error), "the store does not answer; waiting for it");
            self.outage = Some(Outage { since: self.now(), probes: self.outages_in_a_row });
            self.outages_in_a_row = self.outages_in_a_row.saturating_add(1);
            self.probe();
        }
    }

    pub(super) fn probe(&mut self) {
        let Some(outage) = &mut self.outage else { return };
        let share: f64 = rand::rng().random();
        let wait = probe_wait(outage.probes, share);
        outage.probes += 1;
        let (store, sender) = (Arc::clone(&self.store), self.sender.clone());
        // Ends with the loop at the latest: it only reports.
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            let result = store.ping().await;
            sender.send(Occurrence::Probed(result)).ok();
        });
    }

    pub(super) fn probed(&mut self, result: Result<(), StoreError>) {
        match (result, &self.outage) {
            (Ok(()), Some(outage)) => {
                let seconds = self.now().duration_since(outage.since).as_secs();
                tracing::warn!(seconds, "the store answers again; going on");
                self.outage = None;
            }
            (Err(error), Some(_)) => {
                tracing::debug!(errorMessage = %describe(&error), "the store still does not answer");
                self.probe();
            }
            (_, None) => {}
        }
    }
}
