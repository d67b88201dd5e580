//! One record as it came from the broker.

use std::sync::Arc;

use idem_core::HeaderList;

use crate::assignment::PartitionId;

/// A record, copied out of the client's memory: the client could not be closed while one of its own messages is held.
#[derive(Debug)]
pub(crate) struct Record {
    pub id: PartitionId,
    pub topic: Arc<str>,
    pub offset: i64,
    /// Milliseconds since the Unix epoch.
    pub timestamp: Option<i64>,
    pub key: Option<Vec<u8>>,
    /// Nothing for a tombstone.
    pub payload: Option<Arc<Vec<u8>>>,
    pub headers: HeaderList,
}

impl Record {
    /// Names this delivery, as rows and logs show it.
    pub fn message_id(&self) -> Arc<str> {
        Arc::from(format!("{}/{}/{}", self.topic, self.id.partition, self.offset))
    }

    /// What it holds in memory, about.
    pub fn bytes(&self) -> usize {
        const OVERHEAD: usize = 400;
        let headers: usize = self.headers.0.iter().map(|(name, value)| name.len() + value.len()).sum();
        OVERHEAD
            + headers
            + self.key.as_ref().map_or(0, Vec::len)
            + self.payload.as_ref().map_or(0, |bytes| bytes.len())
    }
}
