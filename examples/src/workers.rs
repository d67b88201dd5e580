//! Workers: one in this process, or several processes of their own that can be killed.

use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use idem_kafka::{App, Error, Stats, Summary};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::failure::{FAILED, Failure};

/// How often a worker process reports its counters.
const REPORT_EVERY: &str = "50ms";
/// How long workers may take to end once they are asked to.
const PATIENCE: Duration = Duration::from_secs(40);

/// Whoever does the work.
pub enum Crew {
    /// One worker in this process.
    Here(Here),
    /// Processes of their own.
    Processes(Processes),
}

impl Crew {
    /// What all of them have counted so far.
    pub fn counted(&self) -> Summary {
        match self {
            Self::Here(worker) => worker.counted(),
            Self::Processes(workers) => workers.counted(),
        }
    }

    /// Whether all of them are still at work.
    ///
    /// # Errors
    /// One ended by itself.
    pub async fn look(&mut self) -> Result<(), Failure> {
        match self {
            Self::Here(worker) => worker.look().await,
            Self::Processes(workers) => workers.look(),
        }
    }

    /// Asks all of them to end, and waits for it.
    ///
    /// # Errors
    /// One did not end well.
    pub async fn stop(self) -> Result<Summary, Failure> {
        match self {
            Self::Here(worker) => worker.stop().await,
            Self::Processes(workers) => workers.stop().await,
        }
    }
}

/// Deliveries that workers have brought to an end.
pub fn decided(workers: &Summary) -> u64 {
    workers.completed + workers.duplicates_redelivered + workers.duplicates_produced + workers.conflicts
}

/// One worker in this process.
pub struct Here {
    stats: Stats,
    shutdown: CancellationToken,
    task: JoinHandle<Result<Summary, Error>>,
}

impl Here {
    /// Starts it.
    pub fn start(app: App) -> Self {
        let shutdown = CancellationToken::new();
        let stats = app.stats();
        let task = tokio::spawn(app.shutdown(shutdown.clone()).run());
        Self { stats, shutdown, task }
    }

    /// Lets it work until it has brought so many deliveries to an end, then drops it in mid-run.
    ///
    /// # Errors
    /// It ended by itself before.
    pub async fn crash_after(mut self, deliveries: u64) -> Result<Summary, Failure> {
        while decided(&self.counted()) < deliveries {
            self.look().await?;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.task.abort();
        // Cancelled, which is what was asked for; or over already.
        let _ = self.task.await;
        Ok(self.stats.snapshot())
    }

    /// What it has counted so far.
    pub fn counted(&self) -> Summary {
        self.stats.snapshot()
    }

    /// Whether it is still at work.
    ///
    /// # Errors
    /// It ended by itself.
    pub async fn look(&mut self) -> Result<(), Failure> {
        if !self.task.is_finished() {
            return Ok(());
        }
        match (&mut self.task).await {
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok(_)) => Err(Failure::new(FAILED, "the worker ended by itself")),
            Err(error) => Err(Failure::new(FAILED, format!("the worker panicked: {error}"))),
        }
    }

    /// Asks it to end, and waits for it.
    ///
    /// # Errors
    /// It did not end well.
    pub async fn stop(self) -> Result<Summary, Failure> {
        self.shutdown.cancel();
        match self.task.await {
            Ok(ended) => Ok(ended?),
            Err(error) => Err(Failure::new(FAILED, format!("the worker panicked: {error}"))),
        }
    }
}

/// How to start a worker process: this program's `run`.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    /// Further arguments of `run`.
    pub arguments: Vec<String>,
    /// Its settings.
    pub environment: Vec<(String, String)>,
}

/// Workers that are processes of their own.
pub struct Processes {
    launch: Launch,
    running: Vec<Process>,
    /// What those that are gone had counted.
    gone: Summary,
}

struct Process {
    child: Child,
    last: Arc<Mutex<Summary>>,
    reader: JoinHandle<()>,
}

impl Processes {
    /// Starts so many.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn start(launch: Launch, workers: u16) -> Result<Self, Failure> {
        let running = (0..workers).map(|_| Process::start(&launch)).collect::<Result<_, _>>()?;
        Ok(Self { launch, running, gone: Summary::default() })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.running.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Kills one (SIGKILL), and starts another in its place.
    ///
    /// # Errors
    /// The operating system refuses.
    pub async fn kill(&mut self, victim: usize) -> Result<(), Failure> {
        let next = Process::start(&self.launch)?;
        let mut victim = std::mem::replace(&mut self.running[victim], next);
        victim.child.kill().await.map_err(|error| Failure::io("a worker cannot be killed", &error))?;
        self.gone = self.gone.plus(victim.last_words().await);
        Ok(())
    }

    /// What all of them have counted so far, those that are gone included.
    pub fn counted(&self) -> Summary {
        self.running.iter().fold(self.gone, |sum, worker| sum.plus(worker.counted()))
    }

    fn look(&mut self) -> Result<(), Failure> {
        for worker in &mut self.running {
            match worker.child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => return Err(Failure::new(FAILED, format!("a worker ended by itself: {status}"))),
                Err(error) => return Err(Failure::io("a worker cannot be watched", &error)),
            }
        }
        Ok(())
    }

    async fn stop(mut self) -> Result<Summary, Failure> {
        for worker in &mut self.running {
            drop(worker.child.stdin.take());
        }
        let mut sum = self.gone;
        for mut worker in self.running {
            match tokio::time::timeout(PATIENCE, worker.child.wait()).await {
                Ok(Ok(status)) if status.success() => sum = sum.plus(worker.last_words().await),
                Ok(Ok(status)) => return Err(Failure::new(FAILED, format!("a worker did not end well: {status}"))),
                Ok(Err(error)) => return Err(Failure::io("a worker cannot be waited for", &error)),
                Err(_) => return Err(Failure::new(FAILED, format!("a worker did not end within {PATIENCE:?}"))),
            }
        }
        Ok(sum)
    }
}

impl Process {
    fn start(launch: &Launch) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::io("a worker cannot be started", &error);
        let mut command = this_program().map_err(failed)?;
        command
            .args(["run", "--until-stdin-ends", "--report-every", REPORT_EVERY])
            .args(&launch.arguments)
            .envs(launch.environment.iter().map(|(name, value)| (name, value)));
        let mut child = command.spawn().map_err(failed)?;
        let last = Arc::default();
        let output = child.stdout.take();
        let reader = tokio::spawn(keep_last(output, Arc::clone(&last)));
        Ok(Self { child, last, reader })
    }

    fn counted(&self) -> Summary {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters that it reported last, now that it is gone.
    async fn last_words(&mut self) -> Summary {
        // A reader that failed has counted what it could read.
        let _ = (&mut self.reader).await;
        self.counted()
    }
}

/// This program once more, tied to this process by its standard input, and with no setting of ours by accident.
///
/// # Errors
/// The operating system does not know where this program is.
pub fn this_program() -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("IDEM__") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    Ok(command)
}

async fn keep_last(output: Option<ChildStdout>, last: Arc<Mutex<Summary>>) {
    let Some(output) = output else { return };
    let mut lines = BufReader::new(output).lines();
    // A line that a kill cut short is no counter.
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(counted) = serde_json::from_str(&line) {
            *last.lock().unwrap_or_else(PoisonError::into_inner) = counted;
        }
    }
}
