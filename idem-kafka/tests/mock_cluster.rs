//! The runtime against an in-process broker: every rule that needs no real one.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_core::store::Tx;
use idem_kafka::ErrorKind;
use idem_kafka::prelude::*;
use support::switchable::Switchable;
use support::{Bed, Effects, Event, Running, eventually, memory};

#[derive(Debug, thiserror::Error, Classify)]
enum Refusal {
    #[error("not now")]
    #[classify(transient)]
    NotNow,
    #[error("never")]
    #[classify(terminal)]
    Never,
}

/// Does what the event's id says. The effect is outside, and counted.
#[idempotent(key = "id", consumer = "lease", backoff = "1ms..20ms", attempts = 4, fingerprint = "amount")]
async fn lease(event: Event, job: &Job, effects: State<Effects>, gates: State<Gates>) -> Result<(), Refusal> {
    match event.id.split('-').next().unwrap() {
        "never" => return Err(Refusal::Never),
        "notnow" if job.attempt() < 3 => return Err(Refusal::NotNow),
        "hopeless" => return Err(Refusal::NotNow),
        "panic" if job.attempt() < 2 => panic!("on purpose"),
        "gated" => gates.pass().await,
        _ => {}
    }
    effects.add(&event.id);
    Ok(())
}

/// The same in atomic mode. The in-memory store has no tables, so its effect is a count here too: it is what the handler
/// *did*, and for a batch that was rolled back it may be more than one.
#[idempotent(key = "id", consumer = "atomic", backoff = "1ms..20ms", attempts = 4, fingerprint = "amount")]
async fn atomic(event: Event, _tx: &mut Tx, effects: State<Effects>) -> Result<(), Refusal> {
    if event.id.starts_with("never") {
        return Err(Refusal::Never);
    }
    effects.add(&event.id);
    Ok(())
}

#[idempotent(key = "id", consumer = "batch", fingerprint = "amount")]
async fn batch(events: Vec<Event>, _tx: &mut Tx, effects: State<Effects>) -> Result<(), Refusal> {
    for event in &events {
        effects.add(&event.id);
    }
    Ok(())
}

#[idempotent(key = "id", consumer = "skipping", fingerprint = "amount", on_conflict = "skip")]
async fn skipping(event: Event, effects: State<Effects>) -> Result<(), Refusal> {
    effects.add(&event.id);
    Ok(())
}

#[idempotent(key = "id", consumer = "stopping", fingerprint = "amount", on_conflict = "stop")]
async fn stopping(event: Event, effects: State<Effects>) -> Result<(), Refusal> {
    effects.add(&event.id);
    Ok(())
}

/// Holds handlers back until it is opened.
#[derive(Clone)]
struct Gates(Arc<tokio::sync::Semaphore>, Arc<AtomicU32>);

impl Default for Gates {
    fn default() -> Self {
        Self(Arc::new(tokio::sync::Semaphore::new(0)), Arc::default())
    }
}

impl Gates {
    async fn pass(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.acquire().await.unwrap().forget();
    }

    fn open(&self) {
        self.0.add_permits(1_000);
    }

    fn waiting(&self) -> u32 {
        self.1.load(Ordering::SeqCst)
    }
}

fn event(id: impl Into<String>) -> Event {
    Event { id: id.into(), amount: 1 }
}

#[tokio::test(flavor = "multi_thread")]
async fn c4_k1_every_job_runs_once_and_every_offset_is_committed() {
    for consumer in ["lease", "atomic", "batch"] {
        let bed = Bed::new(consumer, 3);
        for number in 0..300 {
            bed.send(number % 3, &event(format!("job-{}", number / 2))).await;
        }
        let effects = Effects::default();
        let app = bed.app().store(memory()).state(effects.clone()).state(Gates::default());
        let app = match consumer {
            "lease" => app.handle(&bed.topic, lease),
            "atomic" => app.handle(&bed.topic, atomic),
            _ => app.handle(&bed.topic, batch),
        };
        let summary = Running::start(app.until_idle(Duration::from_millis(200))).ended().await.unwrap();
        assert_eq!((effects.keys(), effects.all_once()), (150, true), "{consumer}");
        assert_eq!((summary.received, summary.completed, summary.duplicates_produced), (300, 150, 150), "{consumer}");
        bed.all_committed().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r1_r2_errors_are_retried_or_set_aside_by_their_kind() {
    let bed = Bed::new("lease", 1);
    for id in ["never-1", "notnow-1", "hopeless-1", "panic-1", "fine-1"] {
        bed.send(0, &event(id)).await;
    }
    let effects = Effects::default();
    let app = bed.app().store(memory()).state(effects.clone()).state(Gates::default()).handle(&bed.topic, lease);
    let running = Running::start(app);
    bed.all_committed().await;
    let summary = running.stop().await.unwrap();

    assert_eq!(["notnow-1", "panic-1", "fine-1"].map(|id| effects.of(id)), [1, 1, 1]);
    assert_eq!(["never-1", "hopeless-1"].map(|id| effects.of(id)), [0, 0]);
    assert_eq!((summary.completed, summary.dead_letters), (3, 2));
    let mut reasons: Vec<_> = bed
        .dead_letters()
        .into_iter()
        .map(|(headers, _)| {
            ["idem-key", "idem-reason", "idem-attempt", "idem-error-message"].map(|name| headers[name].clone())
        })
        .collect();
    reasons.sort();
    assert_eq!(reasons, [["hopeless-1", "exhausted", "4", "not now"], ["never-1", "terminal", "1", "never"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn k4_s4_what_cannot_ask_for_a_job_is_set_aside_and_nothing_is_stuck() {
    let bed = Bed::new("lease", 1);
    bed.send_raw(0, None, &[("trace", b"t")]).await;
    bed.send_raw(0, Some(b"{\"id\": \"x\""), &[]).await;
    bed.send_raw(0, Some(b"{\"id\": 5, \"amount\": 1}"), &[]).await;
    bed.send_raw(0, Some(b"{\"amount\": 1}"), &[]).await;
    bed.send(0, &event("")).await;
    bed.send(0, &event("nul\0")).await;
    bed.send(0, &event("x".repeat(256))).await;
    bed.send(0, &event("twice")).await;
    bed.send(0, &Event { id: "twice".into(), amount: 2 }).await;
    let effects = Effects::default();
    let app = bed.app().store(memory()).state(effects.clone()).state(Gates::default()).handle(&bed.topic, lease);
    let running = Running::start(app);
    bed.all_committed().await;
    let summary = running.stop().await.unwrap();

    assert_eq!((effects.keys(), effects.of("twice")), (1, 1));
    assert_eq!((summary.rejected, summary.conflicts, summary.dead_letters), (7, 1, 8));
    let mut letters: Vec<_> = bed
        .dead_letters()
        .into_iter()
        .map(|(headers, body)| {
            (headers["__dlq.errors.offset"].parse::<u8>().unwrap(), headers["idem-reason"].clone(), body)
        })
        .collect();
    letters.sort();
    let reasons: Vec<_> = letters.iter().map(|(offset, reason, _)| (*offset, reason.as_str())).collect();
    let expected = [
        (0, "decode"),
        (1, "decode"),
        (2, "decode"),
        (3, "decode"),
        (4, "no_key"),
        (5, "no_key"),
        (6, "no_key"),
        (8, "mismatch"),
    ];
    assert_eq!(reasons, expected);
    assert_eq!(letters[0].2, None, "a tombstone stays one");
    assert_eq!(letters[1].2.as_deref(), Some(&b"{\"id\": \"x\""[..]), "bytes verbatim");
}

#[tokio::test(flavor = "multi_thread")]
async fn c2_a_crash_before_the_commit_brings_duplicates_and_no_second_effect() {
    let bed = Bed::new("lease", 2);
    for number in 0..100 {
        bed.send(number % 2, &event(format!("job-{number}"))).await;
    }
    let (store, effects) = (memory(), Effects::default());
    let app = |bed: &Bed| {
        bed.app().store(store.clone()).state(effects.clone()).state(Gates::default()).handle(&bed.topic, lease)
    };
    let first = Running::start(app(&bed).commit_interval(Duration::from_secs(3600)));
    eventually("the first one has handled everything", async || first.stats.snapshot().completed == 100).await;
    first.crash().await;

    let second = Running::start(app(&bed));
    bed.all_committed().await;
    let summary = second.stop().await.unwrap();
    assert_eq!((effects.keys(), effects.all_once()), (100, true));
    // The very first commit may have gone out before the interval began.
    assert!(summary.duplicates_redelivered > 0);
    assert_eq!(summary.completed, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn r3_a_slow_key_holds_up_no_other_and_its_offset_stays() {
    let bed = Bed::new("lease", 1);
    bed.send(0, &event("gated-1")).await;
    for number in 0..50 {
        bed.send(0, &event(format!("job-{number}"))).await;
    }
    let (effects, gates) = (Effects::default(), Gates::default());
    let app = bed.app().store(memory()).state(effects.clone()).state(gates.clone()).handle(&bed.topic, lease);
    let running = Running::start(app);
    eventually("all others have run", async || effects.keys() == 50).await;
    assert!(bed.offsets()[0].0 <= 0, "seen is not done: {:?}", bed.offsets());
    gates.open();
    bed.all_committed().await;
    running.stop().await.unwrap();
    assert_eq!(effects.of("gated-1"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_partition_is_drained_and_its_work_not_repeated() {
    let bed = Bed::new("lease", 2);
    let (store, effects, gates) = (memory(), Effects::default(), Gates::default());
    let app = || bed.app().store(store.clone()).state(effects.clone()).state(gates.clone()).handle(&bed.topic, lease);
    let first = Running::start(app());
    for partition in 0..2 {
        bed.send(partition, &event(format!("gated-{partition}"))).await;
        bed.send(partition, &event(format!("job-{partition}"))).await;
    }
    eventually("two handlers run", async || gates.waiting() == 2).await;
    let second = Running::start(app());
    gates.open();
    for partition in 0..2 {
        bed.send(partition, &event(format!("later-{partition}"))).await;
    }
    bed.all_committed().await;
    eventually("the second one has a share", async || {
        for partition in 0..2 {
            bed.send(partition, &event(format!("more-{partition}-{}", second.stats.snapshot().received))).await;
        }
        second.stats.snapshot().received > 0
    })
    .await;
    bed.all_committed().await;
    first.stop().await.unwrap();
    second.stop().await.unwrap();
    assert!(effects.all_once());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_costs_no_attempt_and_sets_nothing_aside() {
    for consumer in ["lease", "atomic"] {
        let bed = Bed::new(consumer, 2);
        let (store, effects) = (Switchable::default(), Effects::default());
        let app = bed.app().store(Arc::new(store.clone())).state(effects.clone()).state(Gates::default());
        let running = Running::start(match consumer {
            "lease" => app.handle(&bed.topic, lease),
            _ => app.handle(&bed.topic, atomic),
        });
        bed.send(0, &event("before")).await;
        bed.all_committed().await;
        store.switch_off(true);
        for number in 0..50 {
            bed.send(number % 2, &event(format!("during-{number}"))).await;
        }
        eventually("the store is missed, and probed", async || store.refused() > 3).await;
        assert_eq!(running.stats.snapshot().outages, 1);
        store.switch_off(false);
        bed.all_committed().await;
        let summary = running.stop().await.unwrap();
        assert_eq!((summary.completed, summary.failed, summary.dead_letters), (51, 0, 0), "{consumer}");
        assert_eq!((effects.keys(), effects.all_once()), (51, true), "{consumer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_is_waited_for() {
    let bed = Bed::new("lease", 1);
    let effects = Effects::default();
    let app = bed.app().store(memory()).state(effects.clone()).state(Gates::default()).handle(&bed.topic, lease);
    let running = Running::start(app);
    bed.send(0, &event("before")).await;
    bed.all_committed().await;
    bed.broker.set_down(true);
    tokio::time::sleep(Duration::from_millis(500)).await; // what an outage is made of
    bed.broker.set_down(false);
    bed.send(0, &event("after")).await;
    bed.all_committed().await;
    running.stop().await.unwrap();
    assert_eq!((effects.of("before"), effects.of("after")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forbidden_dead_letter_topic_is_waited_for_and_nothing_is_dropped() {
    let bed = Bed::new("lease", 1);
    bed.send(0, &event("never-1")).await;
    bed.send(0, &event("fine-1")).await;
    let effects = Effects::default();
    bed.broker.refuse_topic("events-lease-dlt", true).unwrap();
    let app = bed.app().store(memory()).state(effects.clone()).state(Gates::default()).handle(&bed.topic, lease);
    let running = Running::start(app);
    eventually("others go on", async || effects.of("fine-1") == 1).await;
    assert_eq!(running.stats.snapshot().dead_letters, 0);
    assert!(bed.offsets()[0].0 <= 0, "the record waits for its dead letter: {:?}", bed.offsets());
    bed.broker.refuse_topic("events-lease-dlt", false).unwrap();
    bed.all_committed().await;
    running.stop().await.unwrap();
    assert_eq!(bed.dead_letters().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_bounded_by_the_run_ahead() {
    let bed = Bed::new("lease", 1);
    for number in 0..400 {
        bed.send(0, &event(format!("gated-{number}"))).await;
    }
    let (effects, gates) = (Effects::default(), Gates::default());
    let app = bed.app().store(memory()).state(effects.clone()).state(gates.clone()).handle(&bed.topic, lease);
    let running = Running::start(app.run_ahead(16).concurrency(8));
    eventually("as many run as may", async || gates.waiting() == 8).await;
    // One turn of a partition is taken whole; no second one is read before the first is mostly done.
    assert!(running.stats.snapshot().received <= 256 + 16, "{:?}", running.stats.snapshot());
    gates.open();
    bed.all_committed().await;
    running.stop().await.unwrap();
    assert_eq!((effects.keys(), effects.all_once()), (400, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_waits_for_handlers_and_then_cuts_them() {
    let bed = Bed::new("lease", 1);
    bed.send(0, &event("gated-1")).await;
    let (effects, gates) = (Effects::default(), Gates::default());
    let app = bed.app().store(memory()).state(effects.clone()).state(gates.clone()).handle(&bed.topic, lease);
    let running = Running::start(app.drain_timeout(Duration::from_millis(100)));
    eventually("the handler runs", async || gates.waiting() == 1).await;
    let error = running.stop().await.unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::DrainCutShort, 5));
    assert_eq!(effects.keys(), 0);
    assert!(bed.offsets()[0].0 <= 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn configuration_mistakes_are_named_before_anything_begins() {
    let bed = Bed::new("lease", 1);
    let error = App::builder().handle("t", lease).run().await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("kafka.brokers") && text.contains("kafka.group"), "{text}");

    let error = bed.app().store(memory()).handle(&bed.topic, lease).run().await.unwrap_err();
    assert!(error.to_string().contains("Effects"), "a state that is missing is found at start: {error}");

    let app = bed.app().store(memory()).librdkafka("enable.auto.commit", "true").handle("t", lease);
    assert!(app.run().await.unwrap_err().to_string().contains("enable.auto.commit"));

    let app = bed.app().store(memory()).librdkafka("no.such.thing", "1").state(Effects::default());
    let error = app.state(Gates::default()).handle(&bed.topic, lease).run().await.unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.describe().contains("no.such.thing"), "{}", error.describe());
}

#[tokio::test(flavor = "multi_thread")]
async fn s4_a_conflict_is_skipped_where_the_handler_says_so() {
    let bed = Bed::new("skipping", 1);
    for amount in [1, 2, 1] {
        bed.send(0, &Event { id: "A".into(), amount }).await;
    }
    let effects = Effects::default();
    let app = bed.app().store(memory()).state(effects.clone()).handle(&bed.topic, skipping);
    let summary = Running::start(app.until_idle(Duration::from_millis(200))).ended().await.unwrap();
    assert_eq!((summary.completed, summary.conflicts, summary.dead_letters), (1, 1, 0));
    assert_eq!(effects.of("A"), 1);
    bed.all_committed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s4_a_conflict_stops_the_consumer_where_the_handler_says_so() {
    let bed = Bed::new("stopping", 1);
    for (id, amount) in [("A", 1), ("A", 2), ("B", 1)] {
        bed.send(0, &Event { id: id.into(), amount }).await;
    }
    let (store, effects) = (memory(), Effects::default());
    // However often it is started: it never goes past what a person has to look at.
    for _ in 0..2 {
        let app = bed.app().store(store.clone()).state(effects.clone()).handle(&bed.topic, stopping);
        let error = Running::start(app).ended().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        let text = error.to_string();
        assert!(text.contains("events/0/1") && text.contains("on_conflict"), "{text}");
        assert_eq!(bed.offsets(), [(1, 3)], "the offset stands at the conflict");
    }
    assert_eq!(effects.of("A"), 1);
    assert_eq!(bed.dead_letters().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_records_of_a_partition_run_carefully_and_the_rest_together() {
    for careful in [0, 1, 7, 1000] {
        let bed = Bed::new("atomic", 2);
        for number in 0..200 {
            // Every fifth is set aside, retried or bad, so that careful records end in every way.
            let id = if number % 5 == 0 { format!("never-{number}") } else { format!("job-{number}") };
            bed.send(number % 2, &event(id)).await;
        }
        bed.send_raw(0, Some(b"not json"), &[]).await;
        let effects = Effects::default();
        let app = bed.app().store(memory()).state(effects.clone()).careful_records(careful);
        let app = app.handle(&bed.topic, atomic).until_idle(Duration::from_millis(200));
        let summary = Running::start(app).ended().await.unwrap();
        assert_eq!((summary.completed, summary.dead_letters, summary.received), (160, 41, 201), "{careful}");
        bed.all_committed().await;
    }
}
