//! `demo`: a broker in this process, a database file, a plan with duplicates of every kind, workers, and at the end a check
//! that trusts none of them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use idem_kafka::App;
use idem_kafka::embedded::Broker;
use tokio::task::block_in_place;

use crate::brokers::Brokers;
use crate::chaos::Chaos;
use crate::cli::DemoOptions;
use crate::evidence;
use crate::example::{Attach, Example, ReadBack};
use crate::failure::{FAILED, Failure, MISUSED};
use crate::group::GroupOffsets;
use crate::produce::produce_plan;
use crate::progress::Progress;
use crate::summary::{Counted, Summary};
use crate::table::{grouped, sentence, table};
use crate::verdict::{Verdict, judge};
use crate::workers::{Crew, Here, Launch, Processes, decided};

/// Messages on one partition, at most: the embedded broker keeps 5 MiB of each, and a message takes 200 bytes before it is
/// compressed.
const PER_PARTITION: u64 = 15_000;
const MIN_PARTITIONS: u64 = 6;
const MAX_PARTITIONS: u64 = 128;
/// No offset moved for so long: something is wrong.
const STUCK: Duration = Duration::from_secs(60);
/// Longer than any demonstration: a worker that commits so seldom crashes before its first commit.
const NEVER: Duration = Duration::from_secs(3600);
/// What the embedded broker is best used with: rebalances of the new protocol take it milliseconds.
const CLIENT: [(&str, &str); 2] = [("group.protocol", "consumer"), ("fetch.wait.max.ms", "20")];

/// An example on stage.
pub struct Show<'a, A, R> {
    /// Its names.
    pub example: &'a Example,
    /// Its handler.
    pub handler: A,
    /// Its effects.
    pub effects: R,
    /// Where the guard's rows are.
    pub store_url: String,
    /// What `run` needs besides the broker and the store, to be the same worker in another process.
    pub launch: Launch,
}

impl<A: Attach, R: ReadBack> Show<'_, A, R> {
    /// Plays it.
    ///
    /// # Errors
    /// Something did not work, or the sums do not hold.
    pub async fn play(self, options: &DemoOptions) -> Result<(), Failure> {
        let example = self.example;
        let partitions = partitions_for(options.plan.messages)?;
        let broker = Broker::start()?;
        let dead_letters = format!("{}-{}-dlt", example.topic, example.consumer);
        broker.create_topic(example.topic, partitions)?;
        broker.create_topic(&dead_letters, partitions)?;
        let brokers = Brokers::at(broker.bootstrap());
        let messages = block_in_place(|| produce_plan(example, &brokers, example.topic, &options.plan, partitions))?;
        let offsets = block_in_place(|| GroupOffsets::new(&brokers, example.consumer, example.topic))?;
        require_all(&offsets, messages)?;
        eprintln!("{} messages on {partitions} partitions of an embedded broker", grouped(messages));

        let counted = self.work(options, &broker, &offsets).await?;
        let effects = self.effects.effects().await?;
        let evidence = block_in_place(|| evidence::gather(&brokers, example, example.topic, &dead_letters, effects))?;
        let verdict = judge(&evidence);
        tell(example, options, &verdict, &counted);
        if verdict.holds() { Ok(()) } else { Err(Failure::new(FAILED, "the sums do not hold")) }
    }

    /// Lets workers handle everything, some of it twice.
    async fn work(&self, options: &DemoOptions, broker: &Broker, offsets: &GroupOffsets) -> Result<Counted, Failure> {
        let begun = Instant::now();
        // This worker crashes before its first commit: the next ones are given its records again, with the same offsets.
        let redelivered = options.plan.shape(1).duplicates() / 4;
        let crashed = match redelivered {
            0 => idem_kafka::Summary::default(),
            _ => Here::start(self.app(broker).commit_interval(NEVER)).crash_after(redelivered).await?,
        };

        let mut crew = self.hire(options, broker)?;
        let mut chaos = options.chaos.then(|| Chaos::new(usize::from(workers(options)), options.plan.seed));
        let progress = Progress::new(options.plan.messages, self.example.effects);
        let mut kills = 0;
        let mut moved = (0, Instant::now());
        loop {
            let committed = block_in_place(|| offsets.committed())?;
            progress.show(committed, &crashed.plus(crew.counted()), kills);
            if committed.is_complete() {
                break;
            }
            crew.look().await?;
            if let (Crew::Processes(workers), Some(chaos)) = (&mut crew, &mut chaos)
                && let Some(victim) = chaos.victim(committed.done.max(decided(&workers.counted())), committed.all)
            {
                workers.kill(victim).await?;
                kills += 1;
            }
            if committed.done > moved.0 {
                moved = (committed.done, Instant::now());
            } else if moved.1.elapsed() > STUCK {
                let (done, all) = (grouped(committed.done), grouped(committed.all));
                return Err(Failure::new(FAILED, format!("no offset moved for {STUCK:?}: {done} of {all} committed")));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let took = begun.elapsed();
        drop(progress);
        let workers = crashed.plus(crew.stop().await?);
        Ok(Counted { workers, kills, took })
    }

    fn hire(&self, options: &DemoOptions, broker: &Broker) -> Result<Crew, Failure> {
        if workers(options) == 0 {
            return Ok(Crew::Here(Here::start(self.app(broker))));
        }
        let mut launch = self.launch.clone();
        let client = CLIENT.map(|(key, value)| format!("{key}={value}")).join(";");
        launch.environment.extend([
            ("IDEM__KAFKA__BROKERS".to_owned(), broker.bootstrap().to_owned()),
            ("IDEM__KAFKA__LIBRDKAFKA".to_owned(), client),
            ("IDEM__STORE__URL".to_owned(), self.store_url.clone()),
            // Conflicts and gateway failures are planned here: logging them would bury the table.
            ("IDEM__LOG__FILTER".to_owned(), std::env::var("RUST_LOG").unwrap_or_else(|_| "off".to_owned())),
        ]);
        Ok(Crew::Processes(Processes::start(launch, workers(options))?))
    }

    fn app(&self, broker: &Broker) -> App {
        let app = App::builder().brokers(broker.bootstrap()).group(self.example.consumer).store_url(&self.store_url);
        let app = CLIENT.into_iter().fold(app, |app, (key, value)| app.librdkafka(key, value));
        self.handler.attach(app, self.example.topic)
    }
}

/// Worker processes; 0 for one worker in this process.
fn workers(options: &DemoOptions) -> u16 {
    options.workers.unwrap_or(if options.chaos { 3 } else { 0 })
}

fn partitions_for(messages: u64) -> Result<i32, Failure> {
    let partitions = messages.div_ceil(PER_PARTITION).max(MIN_PARTITIONS);
    if partitions > MAX_PARTITIONS {
        let most = grouped(PER_PARTITION * MAX_PARTITIONS);
        let text = format!(
            "the embedded broker keeps its records in memory, {most} messages at most: use `produce` and `run` with a real one for more"
        );
        return Err(Failure::new(MISUSED, text));
    }
    Ok(partitions as i32)
}

/// The embedded broker drops what is too much, and says nothing.
fn require_all(offsets: &GroupOffsets, messages: u64) -> Result<(), Failure> {
    let kept: u64 = offsets.spans().iter().map(crate::topic::Span::len).sum();
    if kept == messages {
        return Ok(());
    }
    Err(Failure::new(FAILED, format!("the embedded broker kept {kept} of {messages} messages: use fewer")))
}

fn tell(example: &Example, options: &DemoOptions, verdict: &Verdict, counted: &Counted) {
    if options.json {
        verdict.findings().iter().for_each(|finding| eprintln!("{finding}"));
        return Summary::of_check(verdict, Some(counted)).print();
    }
    println!("{}", table(example, example.topic, verdict, Some(counted)));
    println!("{}", sentence(example, verdict));
    if options.chaos && counted.kills == 0 {
        println!("No worker was killed: everything was done before. Use more --messages.");
    }
    if counted.kills > 0 {
        println!(
            "What a killed worker counted in its last 50 ms is not in the workers' counters; the sums do not use them."
        );
    }
}

/// A folder for the files of one demonstration.
pub struct Folder {
    path: PathBuf,
    temporary: bool,
}

impl Folder {
    /// The folder `chosen`, which must not hold a demonstration already, or a temporary one that is deleted in the end.
    ///
    /// # Errors
    /// It cannot be made, or is in use.
    pub fn new(consumer: &str, chosen: Option<&Path>) -> Result<Self, Failure> {
        let temporary = chosen.is_none();
        let fresh = || std::env::temp_dir().join(format!("idem-{consumer}-{}", uuid::Uuid::new_v4().simple()));
        let path = chosen.map_or_else(fresh, Path::to_path_buf);
        let failed = |error| Failure::io(&format!("the folder {} cannot be used", path.display()), &error);
        std::fs::create_dir_all(&path).map_err(failed)?;
        let folder = Self { path, temporary };
        if folder.file("idem.db").exists() {
            let text = format!("the folder {} holds a demonstration already: choose another", folder.path.display());
            return Err(Failure::new(MISUSED, text));
        }
        Ok(folder)
    }

    /// Keeps a temporary folder if what was played in it went wrong, and says where it is.
    pub fn keep_if_failed(&mut self, played: Result<(), Failure>) -> Result<(), Failure> {
        let went_wrong = played.as_ref().is_err_and(|failure| failure.code() == FAILED);
        if went_wrong && self.temporary {
            self.temporary = false;
            eprintln!("the files are kept in {}", self.path.display());
        }
        played
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The URL of a SQLite file in it.
    pub fn sqlite(&self, name: &str) -> String {
        format!("sqlite://{}?mode=rwc", self.file(name).display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.temporary {
            // What cannot be removed stays in the temporary folder, which is where such things may stay.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
