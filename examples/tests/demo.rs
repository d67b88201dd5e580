//! The examples with nothing installed: demonstrations, mistakes in the configuration, and a check that can fail.

mod support;

use idem_kafka::embedded::Broker;
use sqlx::{Connection, SqliteConnection};

use support::{Folder, GatewayProcess, INVOICE, PAYMENT, Ran, Summary, block_on, run};

/// What suits the embedded broker.
const CLIENT: (&str, &str) = ("IDEM__KAFKA__LIBRDKAFKA", "group.protocol=consumer;fetch.wait.max.ms=20");

fn demo(program: &str, arguments: &[&str], messages: u64) -> Summary {
    let count = messages.to_string();
    let arguments = [&["demo", "--json", "--messages", &count], arguments].concat();
    let summary = run(program, &arguments, &[]).expect_code(0).summary();
    summary.assert_holds(messages);
    assert!(summary.get("redelivered") > 0 && summary.get("conflicts") > 0, "{}", summary.0);
    summary
}

#[test]
fn every_order_gets_one_invoice() {
    demo(INVOICE, &[], 3_000);
}

#[test]
fn every_order_gets_one_invoice_from_the_batch_handler() {
    demo(INVOICE, &["--batch-handler", "--seed", "5"], 3_000);
}

#[test]
fn every_order_gets_one_invoice_although_workers_are_killed() {
    let summary = demo(INVOICE, &["--workers", "2", "--chaos"], 6_000);
    assert!(summary.get("kills") > 0, "{}", summary.0);
}

#[test]
fn every_payment_is_charged_once_although_the_gateway_fails() {
    let faults = ["--timeout-rate", "0.1", "--fail-rate", "0.1", "--late-rate", "0.1"];
    let summary = demo(PAYMENT, &faults, 1_000);
    assert!(summary.get("retries") > 0, "{}", summary.0);
}

#[test]
fn every_payment_is_charged_once_although_workers_are_killed() {
    let summary = demo(PAYMENT, &["--workers", "2", "--chaos"], 3_000);
    assert!(summary.get("kills") > 0 && summary.get("takeovers") > 0, "{}", summary.0);
}

#[test]
fn without_a_command_it_shows_a_table_that_a_person_can_check() {
    let ran = run(INVOICE, &["--messages", "500", "--duplicates", "0.1", "--seed", "3"], &[]).expect_code(0);
    assert!(ran.stdout.contains("450 invoices = 450 distinct orders: it holds."), "{}", ran.stdout);
    for line in ["distinct orders", "redelivered and skipped", "conflicts", "lost", "double effects", "messages/s"] {
        assert!(ran.stdout.contains(line), "{line} is not in\n{}", ran.stdout);
    }
}

#[test]
fn a_demonstration_that_the_broker_cannot_hold_is_refused() {
    let ran = run(INVOICE, &["--messages", "9000000"], &[]).expect_code(2);
    assert!(ran.stderr.contains("1,920,000 messages at most"), "{}", ran.stderr);
}

/// An embedded broker and a SQLite file, used by the commands one after the other.
struct Place {
    broker: Broker,
    folder: Folder,
}

impl Place {
    fn new() -> Self {
        let broker = Broker::start().unwrap();
        for topic in ["orders.paid", "payments.requested"] {
            broker.create_topic(topic, 3).unwrap();
        }
        for dead_letters in ["orders.paid-invoice-dlt", "payments.requested-payment-dlt"] {
            broker.create_topic(dead_letters, 3).unwrap();
        }
        Self { broker, folder: Folder::new() }
    }

    fn invoice(&self, arguments: &[&str]) -> Ran {
        self.run(INVOICE, arguments)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Ran {
        let url = self.folder.sqlite();
        let settings = [("IDEM__KAFKA__BROKERS", self.broker.bootstrap()), ("IDEM__STORE__URL", &url), CLIENT];
        run(program, arguments, &settings)
    }

    fn sql(&self, statements: &'static str) {
        block_on(async {
            let mut connection = SqliteConnection::connect(&self.folder.sqlite()).await.unwrap();
            sqlx::raw_sql(statements).execute(&mut connection).await.unwrap();
        });
    }
}

#[test]
fn a_lost_and_a_double_effect_are_found() {
    let place = Place::new();
    place.invoice(&["produce", "--messages", "200", "--seed", "1"]).expect_code(0);
    place.invoice(&["run", "--until-idle", "1s"]).expect_code(0);
    let clean = place.invoice(&["check", "--json", "--group", "invoice"]).expect_code(0);
    clean.summary().assert_holds(200);

    place.sql("DELETE FROM invoices WHERE order_id = 'A-10001007'");
    let lost = place.invoice(&["check"]).expect_code(1);
    assert!(lost.stdout.contains("1 without effect (lost): A-10001007"), "{}", lost.stdout);

    place.sql(
        "CREATE TABLE copy AS SELECT * FROM invoices; DROP TABLE invoices; ALTER TABLE copy RENAME TO invoices;
         INSERT INTO invoices SELECT * FROM invoices WHERE order_id = 'A-10001009'",
    );
    let double = place.invoice(&["check", "--json"]).expect_code(1);
    assert!(double.stderr.contains("1 with more than one effect: A-10001009"), "{}", double.stderr);
    assert_eq!((double.summary().get("lost"), double.summary().get("double_effects")), (1, 1));

    place.sql("UPDATE invoices SET amount = amount - 7 WHERE order_id = 'A-10001003'");
    let other = place.invoice(&["check", "--json"]).expect_code(1);
    assert!(other.stderr.contains("1 with an effect that no message asked for: A-10001003"), "{}", other.stderr);
}

#[test]
fn a_payment_that_is_charged_twice_or_not_recorded_is_found() {
    let place = Place::new();
    let ledger = place.folder.file("ledger.jsonl");
    let gateway = GatewayProcess::start(&ledger);
    place.run(PAYMENT, &["produce", "--messages", "60", "--seed", "2"]).expect_code(0);
    place.run(PAYMENT, &["run", "--until-idle", "2s", "--gateway", &gateway.url]).expect_code(0);
    let check = ["check", "--json", "--group", "payment", "--ledger", &ledger];
    place.run(PAYMENT, &check).expect_code(0).summary().assert_holds(60);

    // The same payment once more, under another idempotency key: what a caller without a stable key would do.
    let charges = std::fs::read_to_string(&ledger).unwrap();
    let first = charges.lines().next().unwrap();
    let mut again: serde_json::Value = serde_json::from_str(first).unwrap();
    let payment = again["payment_id"].as_str().unwrap().to_owned();
    again["idempotency_key"] = "another".into();
    std::fs::write(&ledger, format!("{charges}{again}\n")).unwrap();
    let double = place.run(PAYMENT, &check).expect_code(1);
    let finding = format!("1 with more than one effect: {payment}/settlement (2 charges in the ledger)");
    assert!(double.stderr.contains(&finding), "{}", double.stderr);

    std::fs::write(&ledger, &charges).unwrap();
    place.sql("DELETE FROM payments WHERE payment_id = 'P-20001003'");
    let lost = place.run(PAYMENT, &check).expect_code(1);
    let finding = "1 without effect (lost): P-20001003/settlement (not among the rows in payments)";
    assert!(lost.stderr.contains(finding), "{}", lost.stderr);
}

#[test]
fn a_folder_is_not_used_twice() {
    let folder = Folder::new();
    let arguments = ["--messages", "100", "--dir", &folder.file("")];
    run(INVOICE, &arguments, &[]).expect_code(0);
    let again = run(INVOICE, &arguments, &[]).expect_code(2);
    assert!(again.stderr.contains("holds a demonstration already"), "{}", again.stderr);
}

#[test]
fn records_behind_no_committed_offset_are_found() {
    let place = Place::new();
    place.invoice(&["produce", "--messages", "50"]).expect_code(0);
    place.invoice(&["run", "--until-idle", "1s"]).expect_code(0);
    let check = place.invoice(&["check", "--group", "another"]).expect_code(1);
    assert!(check.stdout.contains("50 records for the group another"), "{}", check.stdout);
}

#[test]
fn what_is_no_order_is_set_aside() {
    let place = Place::new();
    let file = place.folder.file("orders.jsonl");
    let lines = [
        r#"{"order_id":"B-1","amount":5,"currency":"IDR","event_id":"1","paid_at":"2026-01-05T08:00:00Z"}"#,
        r#"{"order_id":"B-1","amount":5,"currency":"IDR","event_id":"2"}"#,
        r#"{"order_id":"","amount":5,"currency":"IDR","event_id":"3"}"#,
        r#"{"amount":5,"currency":"IDR","event_id":"4"}"#,
        "not an order",
    ];
    std::fs::write(&file, lines.join("\n")).unwrap();
    place.invoice(&["produce", "--file", &file]).expect_code(0);
    let unseen = place.invoice(&["check", "--group", "invoice"]);
    assert_ne!(unseen.code, Some(0));
    place.invoice(&["run", "--until-idle", "1s"]).expect_code(0);
    let summary = place.invoice(&["check", "--json", "--group", "invoice"]).expect_code(0).summary();
    summary.assert_holds(5);
    assert_eq!((summary.get("distinct_jobs"), summary.get("rejected"), summary.get("duplicates")), (1, 3, 1));
}

#[test]
fn a_worker_says_what_it_did() {
    let place = Place::new();
    place.invoice(&["produce", "--messages", "100", "--duplicates", "0"]).expect_code(0);
    let ran = place.invoice(&["run", "--until-idle", "1s", "--json", "--report-every", "50ms"]).expect_code(0);
    assert_eq!((ran.summary().get("messages"), ran.summary().get("effects")), (100, 100));
    assert!(ran.stdout.lines().count() > 2, "{}", ran.stdout);
}

#[test]
fn a_mistake_in_the_configuration_is_named() {
    let broker = Broker::start().unwrap();
    broker.create_topic("orders.paid", 1).unwrap();
    let folder = Folder::new();
    let (brokers, store) = (("IDEM__KAFKA__BROKERS", broker.bootstrap()), folder.sqlite());
    let store = ("IDEM__STORE__URL", store.as_str());
    type Settings<'a> = &'a [(&'a str, &'a str)];
    let cases: &[(i32, &str, Settings<'_>)] = &[
        (2, "brokres", &[brokers, store, ("IDEM__KAFKA__BROKRES", "x")]),
        (2, "IDEM__KAFKA__BROKERS", &[store]),
        (2, "IDEM__STORE__URL", &[brokers]),
        (2, "postgres://, mysql:// or sqlite://", &[brokers, ("IDEM__STORE__URL", "oracle://x")]),
        (2, "\"5\"", &[brokers, store, ("IDEM__KAFKA__DRAIN_TIMEOUT", "5")]),
        (2, "enable.auto.commit", &[brokers, store, ("IDEM__KAFKA__LIBRDKAFKA", "enable.auto.commit=true")]),
        (2, "log.filter", &[brokers, store, ("IDEM__LOG__FILTER", "=/=")]),
        (6, "127.0.0.1:1", &[("IDEM__KAFKA__BROKERS", "127.0.0.1:1"), store]),
        (6, "application's database", &[brokers, ("IDEM__STORE__URL", "postgres://u:hunter2@127.0.0.1:1/x")]),
    ];
    for &(code, named, settings) in cases {
        let ran = run(INVOICE, &["run"], settings).expect_code(code);
        let errors: Vec<_> = ran.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(errors.len() == 1 && errors[0].contains(named), "{named} is not in\n{}", ran.stderr);
        assert!(!ran.stderr.contains("hunter2"), "a password is shown:\n{}", ran.stderr);
    }
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let broker = Broker::start().unwrap();
    let settings = [
        ("IDEM__KAFKA__BROKERS", broker.bootstrap()),
        ("IDEM__STORE__URL", "sqlite:///nowhere/to/be/found/idem.db?mode=rwc"),
    ];
    let ran = run(INVOICE, &["run"], &settings).expect_code(2);
    assert!(ran.stderr.contains("/nowhere/to/be/found/idem.db"), "{}", ran.stderr);
}

#[test]
fn a_topic_that_is_not_there_is_named() {
    let place = Place::new();
    for command in ["run", "check", "produce"] {
        let ran = place.invoice(&[command, "--topic", "orders.piad"]).expect_code(3);
        assert!(ran.stderr.contains("orders.piad"), "{}", ran.stderr);
    }
}
