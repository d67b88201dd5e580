//! Bytes → a delivery that can ask for its job, or the verdict on bytes that cannot.

use std::sync::Arc;

use idem_core::{Delivery, Guarded, Payload, Rejection};

use crate::dead_letter::{Reason, Verdict};
use crate::record::Record;

/// The delivery of `record`, or why it is set aside (K4).
pub(crate) fn decode(guarded: &Guarded, record: &Record) -> Result<Delivery, Verdict> {
    let payload = record.payload.as_ref().map(|bytes| -> Payload { Arc::clone(bytes) as Payload });
    guarded.prepare(payload, &record.headers, record.message_id()).map_err(|rejection| Verdict {
        reason: match rejection {
            Rejection::NoKey(_) | Rejection::NoLock(_) => Reason::NoKey,
            _ => Reason::Decode,
        },
        key: None,
        attempts: 0,
        error_kind: "rejected",
        error: rejection.describe(),
        fingerprint: None,
    })
}
