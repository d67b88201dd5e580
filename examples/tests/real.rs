//! The examples on a real Kafka, PostgreSQL and MariaDB, which `IDEM_TEST_KAFKA_BROKERS`, `IDEM_TEST_POSTGRES_URL` and
//! `IDEM_TEST_MARIADB_URL` name (`scripts/services` starts them).

mod support;

use std::time::Duration;

use idem_examples::brokers::Brokers;
use idem_examples::group::{Committed, GroupOffsets};
use sqlx::{Connection, MySqlConnection, PgConnection};

use support::{GatewayProcess, INVOICE, PAYMENT, Ran, Running, block_on, program, run, unique, until};

/// Members that were killed are noticed soon.
const CLIENT: &str = "session.timeout.ms=6000;heartbeat.interval.ms=1000";
const PATIENCE: Duration = Duration::from_secs(120);

fn from_environment(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `eval \"$(scripts/services env)\"` first"))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Engine {
    Postgres,
    Mariadb,
}

/// A topic, a group, and a schema (in MariaDB a database) that nothing else uses.
struct Place {
    engine: Engine,
    name: String,
    topic: String,
    brokers: String,
    server_url: String,
}

impl Place {
    fn new(consumer: &str) -> Self {
        Self::on(Engine::Postgres, consumer)
    }

    fn on(engine: Engine, consumer: &str) -> Self {
        let name = format!("{consumer}_{}", unique());
        let server_url = from_environment(match engine {
            Engine::Postgres => "IDEM_TEST_POSTGRES_URL",
            Engine::Mariadb => "IDEM_TEST_MARIADB_URL",
        });
        let place = Self {
            engine,
            topic: format!("examples-{}", name.replace('_', "-")),
            brokers: from_environment("IDEM_TEST_KAFKA_BROKERS"),
            name,
            server_url,
        };
        place.sql(format!("CREATE SCHEMA {}", place.name));
        place
    }

    fn url(&self) -> String {
        if self.engine == Engine::Mariadb {
            let (server, _) = self.server_url.rsplit_once('/').expect("the URL names a database");
            return format!("{server}/{}", self.name);
        }
        let joint = if self.server_url.contains('?') { '&' } else { '?' };
        format!("{}{joint}options=-c%20search_path%3D{}", self.server_url, self.name)
    }

    fn sql(&self, statement: String) {
        let statement = sqlx::AssertSqlSafe(statement);
        block_on(async {
            if self.engine == Engine::Mariadb {
                let mut connection = MySqlConnection::connect(&self.server_url).await.expect("MariaDB answers");
                sqlx::raw_sql(statement).execute(&mut connection).await.expect("it is done");
            } else {
                let mut connection = PgConnection::connect(&self.server_url).await.expect("PostgreSQL answers");
                sqlx::raw_sql(statement).execute(&mut connection).await.expect("it is done");
            }
        });
    }

    fn program(&self, path: &str, arguments: &[&str]) -> std::process::Command {
        let url = self.url();
        let settings = [
            ("IDEM__KAFKA__BROKERS", self.brokers.as_str()),
            ("IDEM__KAFKA__GROUP", &self.name),
            ("IDEM__KAFKA__LIBRDKAFKA", CLIENT),
            ("IDEM__STORE__URL", &url),
        ];
        program(path, &[arguments, &["--topic", &self.topic]].concat(), &settings)
    }

    fn run(&self, path: &str, arguments: &[&str]) -> Ran {
        Ran::of(self.program(path, arguments).output().expect("the program starts"))
    }

    /// Waits for the group to come this far.
    fn until(&self, what: &str, come: impl Fn(Committed) -> bool) {
        let offsets = GroupOffsets::new(&Brokers::at(&self.brokers), &self.name, &self.topic).expect("Kafka answers");
        until(what, PATIENCE, || offsets.committed().ok().filter(|committed| come(*committed)));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let cascade = if self.engine == Engine::Postgres { " CASCADE" } else { "" };
            self.sql(format!("DROP SCHEMA {}{cascade}", self.name));
        }
    }
}

fn part(committed: Committed) -> f64 {
    committed.done as f64 / committed.all as f64
}

#[test]
fn invoices_survive_kills_and_restarts() {
    survive_kills_and_restarts(&Place::new("invoice"), 30_000);
}

#[test]
fn invoices_in_mariadb_survive_kills_and_restarts() {
    survive_kills_and_restarts(&Place::on(Engine::Mariadb, "invoice"), 20_000);
}

fn survive_kills_and_restarts(place: &Place, messages: u64) {
    let count = messages.to_string();
    place.run(INVOICE, &["produce", "--create", "6", "--messages", &count, "--seed", "11"]).expect_code(0);
    let start = || Running::start(place.program(INVOICE, &["run"]));
    let (mut killed, mut ended) = (start(), start());
    place.until("a tenth is committed", |committed| part(committed) > 0.1);
    killed.0.kill().expect("it can be killed");
    let mut restarted = start();
    place.until("a part more is committed", |committed| part(committed) > 0.2);
    ended.terminate();
    assert_eq!(ended.ended(PATIENCE), Some(0), "a worker that is asked to end drains and ends well");
    place.until("everything is committed", |committed| committed.is_complete());
    restarted.terminate();
    assert_eq!(restarted.ended(PATIENCE), Some(0));
    assert_eq!(killed.ended(PATIENCE), None, "it was killed");

    let check = place.run(INVOICE, &["check", "--json", "--group", &place.name]).expect_code(0);
    check.summary().assert_holds(messages);
}

#[test]
fn invoices_of_the_batch_handler_are_the_same() {
    of_the_batch_handler_are_the_same(&Place::new("invoice"));
}

#[test]
fn invoices_of_the_batch_handler_in_mariadb_are_the_same() {
    of_the_batch_handler_are_the_same(&Place::on(Engine::Mariadb, "invoice"));
}

fn of_the_batch_handler_are_the_same(place: &Place) {
    place.run(INVOICE, &["produce", "--create", "3", "--messages", "20000", "--seed", "12"]).expect_code(0);
    place.run(INVOICE, &["run", "--batch-handler", "--until-idle", "5s"]).expect_code(0);
    let check = place.run(INVOICE, &["check", "--json", "--group", &place.name]).expect_code(0);
    check.summary().assert_holds(20_000);
}

#[test]
fn payments_survive_a_kill() {
    payments_survive(&Place::new("payment"));
}

#[test]
fn payments_in_mariadb_survive_a_kill() {
    payments_survive(&Place::on(Engine::Mariadb, "payment"));
}

fn payments_survive(place: &Place) {
    let folder = support::Folder::new();
    let ledger = folder.file("ledger.jsonl");
    place.run(PAYMENT, &["produce", "--create", "6", "--messages", "5000", "--seed", "13"]).expect_code(0);
    let gateway = GatewayProcess::start(&ledger);
    let start = || {
        let mut command = place.program(PAYMENT, &["run", "--gateway", &gateway.url]);
        command.env("PAYMENT_GATEWAY_TIMEOUT", "250ms");
        Running::start(command)
    };
    let (mut killed, mut other) = (start(), start());
    place.until("a tenth is committed", |committed| part(committed) > 0.1);
    killed.0.kill().expect("it can be killed");
    place.until("everything is committed", |committed| committed.is_complete());
    other.terminate();
    assert_eq!(other.ended(PATIENCE), Some(0));
    assert_eq!(killed.ended(PATIENCE), None, "it was killed");

    let check = place.run(PAYMENT, &["check", "--json", "--group", &place.name, "--ledger", &ledger]).expect_code(0);
    check.summary().assert_holds(5_000);
}

#[test]
fn a_missing_topic_is_named() {
    let place = Place::new("invoice");
    for command in ["run", "check", "produce"] {
        let ran = place.run(INVOICE, &[command]).expect_code(3);
        assert!(ran.stderr.contains(&place.topic), "{command}: {}", ran.stderr);
    }
}

#[test]
fn the_benchmark_s_contender_reports_what_it_did() {
    let place = Place::new("peer");
    place.run(INVOICE, &["produce", "--create", "4", "--messages", "20000", "--duplicates", "0.1"]).expect_code(0);
    let table = "order_id varchar(64) NOT NULL UNIQUE, amount bigint NOT NULL, currency varchar(3) NOT NULL,
                 event_id varchar(64) NOT NULL, created_at timestamptz NOT NULL DEFAULT now()";
    place.sql(format!("CREATE TABLE {}.invoices ({table})", place.name));
    let url = place.url();
    let ran = run(
        INVOICE,
        &["peer"],
        &[
            ("PEER_BROKERS", &place.brokers),
            ("PEER_TOPIC", &place.topic),
            ("PEER_GROUP", &place.name),
            ("PEER_DATABASE_URL", &url),
            ("PEER_EXPECT_MESSAGES", "20000"),
            ("PEER_WARM_UP", "0.2"),
        ],
    )
    .expect_code(0);
    let report: serde_json::Value = serde_json::from_str(ran.stdout.lines().last().expect("a line")).expect("JSON");
    assert_eq!(report["messages"], 20_000);
    assert!(report["seconds"].as_f64() > Some(0.0) && report["steady_msgs_per_s"].as_f64() > Some(0.0), "{report}");
    place.run(INVOICE, &["check", "--group", &place.name]).expect_code(0);
}
