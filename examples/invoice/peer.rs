//! `peer`: one contender of a benchmark that runs several consumers of one topic, one after the other.
//!
//! It is told by `PEER_…` variables what to read and where to write, and prints one JSON line once the group's committed
//! offsets are at the end of the topic. It measures from the first record received to the last offset committed; the part of
//! the run in `PEER_WARM_UP` stays out of the steady rate.

use std::str::FromStr;
use std::time::{Duration, Instant};

use idem_examples::brokers::Brokers;
use idem_examples::failure::{FAILED, Failure, MISUSED};
use idem_examples::group::GroupOffsets;
use idem_examples::workers::Here;
use idem_kafka::prelude::*;
use sqlx::PgConnection;
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::events::OrderPaid;
use crate::handlers::{InvoiceError, issue_invoices};

/// Pause between two looks at the counters.
const TICK: Duration = Duration::from_millis(10);

/// One statement per order. Takes PostgreSQL's own connection, since the benchmark has no other store.
#[idempotent(key = "order_id", consumer = "invoice", fingerprint = ["amount", "currency"])]
async fn issue_invoice(event: OrderPaid, tx: &mut PgConnection) -> Result<(), InvoiceError> {
    sqlx::query(
        "INSERT INTO invoices (order_id, amount, currency, event_id, created_at) VALUES ($1, $2, $3, $4, now())",
    )
    .bind(&event.order_id)
    .bind(event.amount)
    .bind(&event.currency)
    .bind(&event.event_id)
    .execute(tx)
    .await?;
    Ok(())
}

/// Consumes the benchmark's topic to its end. Settings of idem's own come from the environment, as ever.
///
/// # Errors
/// A variable is missing, something cannot be used, or the topic does not hold what was expected.
pub async fn run(batch_handler: bool) -> Result<(), Failure> {
    let (brokers, topic): (String, String) = (variable("PEER_BROKERS")?, variable("PEER_TOPIC")?);
    let group: String = variable("PEER_GROUP")?;
    let mut meter = Meter::new(variable("PEER_EXPECT_MESSAGES")?, variable("PEER_WARM_UP")?);
    let offsets = block_in_place(|| GroupOffsets::new(&Brokers::at(&brokers), &group, &topic))?;

    let app = App::from_env()?.brokers(brokers).group(group).store_url(variable::<String>("PEER_DATABASE_URL")?);
    let app = if batch_handler { app.handle(topic, issue_invoices) } else { app.handle(topic, issue_invoice) };
    let mut worker = Here::start(app);
    let mut commits = 0;
    loop {
        let counted = worker.counted();
        if counted.received > 0 {
            meter.received();
        }
        if counted.offset_commits > commits {
            commits = counted.offset_commits;
            let committed = block_in_place(|| offsets.committed())?;
            meter.committed(committed.done);
            if committed.is_complete() {
                break;
            }
        }
        worker.look().await?;
        sleep(if counted.received > 0 { TICK } else { TICK / 10 }).await;
    }
    worker.stop().await?;
    println!("{}", meter.report()?);
    Ok(())
}

/// Times a run. What counts as done is what the broker has as committed.
struct Meter {
    expected: u64,
    /// The part of the run that stays out of the steady rate.
    warm_up: f64,
    done: u64,
    first: Option<Instant>,
    warm: Option<(Instant, u64)>,
    last: Option<Instant>,
}

impl Meter {
    fn new(expected: u64, warm_up: f64) -> Self {
        Self { expected, warm_up, done: 0, first: None, warm: None, last: None }
    }

    fn received(&mut self) {
        self.first.get_or_insert_with(Instant::now);
    }

    fn committed(&mut self, done: u64) {
        let now = Instant::now();
        if done > self.done {
            self.done = done;
            self.last = Some(now);
        }
        if self.done as f64 >= self.warm_up * self.expected as f64 {
            self.warm.get_or_insert((now, self.done));
        }
    }

    fn report(&self) -> Result<String, Failure> {
        let (Some(first), Some((warm, warm_done)), Some(last), true) =
            (self.first, self.warm, self.last, self.done == self.expected)
        else {
            let text = format!("{} messages are committed, {} were expected", self.done, self.expected);
            return Err(Failure::new(FAILED, text));
        };
        let seconds = (last - first).as_secs_f64();
        let steady = (self.done - warm_done) as f64 / (last - warm).as_secs_f64();
        let messages = self.done;
        Ok(format!(r#"{{"messages":{messages},"seconds":{seconds:.3},"steady_msgs_per_s":{steady:.1}}}"#))
    }
}

fn variable<T: FromStr>(name: &str) -> Result<T, Failure> {
    let text = std::env::var(name).map_err(|_| Failure::new(MISUSED, format!("{name} is not set")))?;
    text.parse().map_err(|_| Failure::new(MISUSED, format!("{name} is {text:?}, which is not of its form")))
}
