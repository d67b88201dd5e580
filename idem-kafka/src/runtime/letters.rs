//! Records on their way to their dead-letter topic.

use super::*;

impl Loop {
    /// Sends the record to its dead-letter topic. Its offset moves when that is acknowledged, not before.
    pub(super) fn set_aside(&mut self, ticket: Ticket, verdict: Verdict) {
        let Some(item) = self.items.get_mut(&ticket) else { return };
        if !self.assignment.begin(item.record.id, item.epoch) {
            return self.finish(ticket);
        }
        item.place = Place::SettingAside;
        let route = &self.routes[item.record.id.topic];
        let (topic, consumer) = (route.dead_letter_topic.clone(), route.guarded.spec().consumer);
        let (record, letters, sender) = (Arc::clone(&item.record), self.dead_letters.clone(), self.sender.clone());
        item.letter = Some(self.letters.spawn(async move {
            letters.send(&topic, consumer, &record, &verdict, wall_clock).await;
            sender.send(Occurrence::SetAside(ticket)).ok();
        }));
    }

    pub(super) fn set_aside_done(&mut self, ticket: Ticket) {
        while self.letters.try_join_next().is_some() {}
        if let Some(item) = self.items.get(&ticket) {
            self.stats.dead_letters();
            self.assignment.end(item.record.id, item.epoch);
            self.decide(ticket);
        }
    }
}
