//! One delivered message on its way to a handler, without the handler's types.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use uuid::Uuid;

use crate::fingerprint::{Fingerprint, FingerprintError};
use crate::handler::{
    Call, Handler, HandlerFailure, Headers, Job, Output, Probe, Requirements, States, capped, with_causes,
};
use crate::json::{self, Unreadable};
use crate::key::{EventKey, KeyError, LockName};
use crate::machine::Token;
use crate::store::{ClaimRequest, Tx};

/// The bytes of a message, shared with whoever received it.
pub type Payload = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The header by which a message that a person has sent again is known. Its value says who.
pub const REPLAYED_BY: &str = "idem-replayed-by";

/// A message whose key is known: ready to ask for its job.
pub struct Delivery {
    pub(crate) request: ClaimRequest,
    lock: Option<LockName>,
    replay: bool,
    careful: bool,
    tag: u64,
    /// Of an earlier try that was stopped because the store was away: it gives its attempt back first.
    pub(crate) unreleased: Option<Token>,
    payload: Payload,
    /// Decoded already; taken by the first run, decoded again for further ones. In a lock only because an event need not be
    /// `Sync`.
    event: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Why a message cannot ask for a job (K4). Trying again gives the same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// There is no body (a tombstone), it is not what the handler takes, or a field stands twice in one of its objects.
    #[error("the message is not an event of this handler: {reason}")]
    Undecodable {
        /// What the decoder said.
        reason: String,
    },
    /// There is no usable key.
    #[error("the message has no usable key")]
    NoKey(#[source] KeyError),
    /// It does not say which lock it needs (L5).
    #[error("the message does not name its lock")]
    NoLock(#[source] KeyError),
    /// Its fields cannot be fingerprinted.
    #[error("the message cannot be fingerprinted")]
    NoFingerprint(#[source] FingerprintError),
}

impl Delivery {
    /// The job's key.
    pub fn key(&self) -> &EventKey {
        &self.request.key
    }

    /// Names the delivery.
    pub fn message_id(&self) -> &Arc<str> {
        &self.request.message_id
    }

    /// What the message says, as a digest.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.request.payload
    }

    /// The lock that must be held while its handler runs (L5), if the handler has one.
    pub fn lock(&self) -> Option<&LockName> {
        self.lock.as_ref()
    }

    /// Whether a person has sent it again, see [`REPLAYED_BY`].
    pub fn is_replay(&self) -> bool {
        self.replay
    }

    /// Runs it carefully: an atomic handler's claim is committed first, and one such delivery runs at a time. So a message
    /// that kills the process has its attempts counted, and runs out of them, at the price of one more commit.
    ///
    /// For messages that may have been running when an earlier process ended. In lease mode every claim is committed first.
    pub fn with_care(mut self) -> Self {
        self.careful = true;
        self
    }

    /// Whether it runs [carefully](Self::with_care).
    pub fn is_careful(&self) -> bool {
        self.careful
    }

    /// Gives it a number of the caller's own, to know it by when it is reported.
    pub fn with_tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// The caller's own number; 0 if none was given.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    pub(crate) fn token(&self) -> Token {
        self.request.token
    }

    /// For a new claim, which must not be taken for the one before.
    pub(crate) fn renew_token(&mut self) {
        self.request.token = new_token();
    }

    /// What [`DynHandler::probe`] reads the event from: the decoded one stays for the run.
    pub(crate) fn payload(&self) -> &Payload {
        &self.payload
    }

    pub(crate) fn take_event(&mut self) -> (Option<Box<dyn Any + Send>>, Payload) {
        let event = self.event.get_mut().expect("nothing panics while it is held").take();
        (event, Arc::clone(&self.payload))
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").field("request", &self.request).finish_non_exhaustive()
    }
}

fn new_token() -> Token {
    Token(Uuid::new_v4())
}

/// An event on its way into a call: decoded, or still to be decoded.
pub(crate) type RawEvent = (Option<Box<dyn Any + Send>>, Payload);

/// A [`Handler`] without its types.
pub(crate) trait DynHandler: Send + Sync {
    fn require(&self, requirements: &mut Requirements<'_>);
    fn prepare(
        &self,
        payload: Option<Payload>,
        headers: &dyn Headers,
        message_id: Arc<str>,
    ) -> Result<Delivery, Rejection>;
    fn call<'a>(
        &self,
        jobs: &'a [Job],
        events: Vec<RawEvent>,
        tx: Option<&'a mut Tx>,
        states: &'a States,
    ) -> BoxFuture<'a, Result<Output, HandlerFailure>>;
    /// Asks whether an earlier try had its effect (T2). Panics as the probe does: the caller catches them.
    fn probe<'a>(
        &self,
        job: &'a Job,
        payload: Payload,
        states: &'a States,
    ) -> BoxFuture<'a, Result<Probe, HandlerFailure>>;
}

pub(crate) struct Typed<H>(pub(crate) H);

impl<H: Handler> DynHandler for Typed<H> {
    fn require(&self, requirements: &mut Requirements<'_>) {
        H::require(requirements);
    }

    fn prepare(
        &self,
        payload: Option<Payload>,
        headers: &dyn Headers,
        message_id: Arc<str>,
    ) -> Result<Delivery, Rejection> {
        // The event's own code runs here: its panic must be this message's end and nobody else's.
        let prepared = catch_unwind(AssertUnwindSafe(|| Self::prepare_uncaught(payload, headers, message_id)));
        prepared.unwrap_or_else(|panic| Err(undecodable(&HandlerFailure::from_panic(&*panic).message)))
    }

    fn call<'a>(
        &self,
        jobs: &'a [Job],
        events: Vec<RawEvent>,
        tx: Option<&'a mut Tx>,
        states: &'a States,
    ) -> BoxFuture<'a, Result<Output, HandlerFailure>> {
        async move {
            let events = events.into_iter().map(decode::<H::Event>).collect::<Result<_, _>>()?;
            let output = H::call(Call { events, jobs, tx, states }).await?;
            // What a batch handler returns is no one job's result.
            Ok(if H::SPEC.batch { Output::default() } else { output })
        }
        .boxed()
    }

    fn probe<'a>(
        &self,
        job: &'a Job,
        payload: Payload,
        states: &'a States,
    ) -> BoxFuture<'a, Result<Probe, HandlerFailure>> {
        async move {
            let events = vec![decode::<H::Event>((None, payload))?];
            H::probe(Call { events, jobs: std::slice::from_ref(job), tx: None, states }).await
        }
        .boxed()
    }
}

impl<H: Handler> Typed<H> {
    fn prepare_uncaught(
        payload: Option<Payload>,
        headers: &dyn Headers,
        message_id: Arc<str>,
    ) -> Result<Delivery, Rejection> {
        let payload = payload.ok_or_else(|| undecodable("it has no body (a tombstone)"))?;
        let bytes = (*payload).as_ref();
        let event: H::Event = serde_json::from_slice(bytes).map_err(|error| undecodable(&error.to_string()))?;
        // Also where chosen fields count: which of two fields of one name the event got is the decoder's whim.
        let unreadable = |error: Unreadable| undecodable(&error.to_string());
        let fingerprint = match H::fingerprint(&event) {
            Some(chosen) => json::check(bytes).map(|()| chosen),
            None => json::read(bytes).map(|whole| Fingerprint::of_exact(&whole)),
        }
        .map_err(unreadable)?;
        let key = H::key(&event, headers).map_err(Rejection::NoKey)?;
        let lock = H::lock(&event, headers).transpose().map_err(Rejection::NoLock)?;
        let request = ClaimRequest {
            key,
            token: new_token(),
            payload: Some(fingerprint.map_err(Rejection::NoFingerprint)?),
            message_id,
        };
        Ok(Delivery {
            request,
            lock,
            replay: headers.value(REPLAYED_BY).is_some(),
            careful: false,
            tag: 0,
            unreleased: None,
            payload,
            event: Mutex::new(Some(Box::new(event))),
        })
    }
}

/// The event of the first run, or the payload decoded once more: an event need not be `Clone`.
fn decode<E: serde::de::DeserializeOwned + 'static>((event, payload): RawEvent) -> Result<E, HandlerFailure> {
    if let Some(event) = event.and_then(|event| event.downcast::<E>().ok()) {
        return Ok(*event);
    }
    serde_json::from_slice((*payload).as_ref()).map_err(|error| HandlerFailure::from_error(&error))
}

fn undecodable(reason: &str) -> Rejection {
    Rejection::Undecodable { reason: capped(reason.to_owned()) }
}

impl Rejection {
    /// The error and its causes, bounded.
    pub fn describe(&self) -> String {
        with_causes(self)
    }
}
