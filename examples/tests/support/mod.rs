//! Starting the examples as a user would: the built programs, by arguments and environment.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

pub const INVOICE: &str = env!("CARGO_BIN_EXE_invoice");
pub const PAYMENT: &str = env!("CARGO_BIN_EXE_payment");

/// One of the programs, with these settings and none of the caller's.
pub fn program(path: &str, arguments: &[&str], settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("IDEM__") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    // Planned conflicts and failures would bury what a test says.
    command.env("IDEM__LOG__FILTER", "off");
    command.args(arguments).envs(settings.iter().copied()).stdin(Stdio::null());
    command
}

/// How a program ended.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a program to its end.
pub fn run(path: &str, arguments: &[&str], settings: &[(&str, &str)]) -> Ran {
    Ran::of(program(path, arguments, settings).output().expect("the program starts"))
}

impl Ran {
    pub fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("programs print UTF-8");
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// The last line of standard output, which is one JSON object.
    #[track_caller]
    pub fn summary(&self) -> Summary {
        let last = self.stdout.lines().last().unwrap_or_default();
        let value: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {last:?}"));
        assert_eq!(value["schema"], "idem.summary/1");
        Summary(value)
    }
}

/// The JSON object at the end of a command.
pub struct Summary(pub Value);

impl Summary {
    #[track_caller]
    pub fn get(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("{name} is {}", self.0[name]))
    }

    /// The sums that hold whenever everything went well.
    #[track_caller]
    pub fn assert_holds(&self, messages: u64) {
        assert_eq!(self.get("messages"), messages, "{}", self.0);
        assert_eq!(self.get("effects"), self.get("distinct_jobs"), "{}", self.0);
        let accounted = ["distinct_jobs", "duplicates", "conflicts", "rejected"].map(|name| self.get(name));
        assert_eq!(accounted.iter().sum::<u64>(), messages, "{}", self.0);
        assert_eq!(self.get("dead_letters"), self.get("conflicts") + self.get("rejected"), "{}", self.0);
        assert_eq!((self.get("lost"), self.get("double_effects")), (0, 0), "{}", self.0);
    }
}

/// A process that is killed with the test.
pub struct Running(pub Child);

impl Running {
    pub fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::null()).spawn().expect("the program starts"))
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        let status = Command::new("sh").args(["-c", &format!("kill -TERM {}", self.0.id())]).status();
        assert!(status.expect("sh starts").success());
    }

    /// The exit code, waited for.
    pub fn ended(&mut self, patience: Duration) -> Option<i32> {
        let status = until("the process ends", patience, || self.0.try_wait().expect("it can be waited for"));
        status.code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A payment gateway, which is killed with the test.
pub struct GatewayProcess {
    pub url: String,
    _process: Running,
}

impl GatewayProcess {
    pub fn start(ledger: &str) -> Self {
        let mut command = program(PAYMENT, &["gateway", "--ledger", ledger], &[]);
        let mut process = Running(command.stdout(Stdio::piped()).spawn().expect("the gateway starts"));
        let output = process.0.stdout.take().expect("a pipe");
        let mut url = String::new();
        BufReader::new(output).read_line(&mut url).expect("it says where it is");
        Self { url: url.trim().to_owned(), _process: process }
    }
}

/// Asks until there is an answer.
#[track_caller]
pub fn until<T>(what: &str, patience: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < patience, "not within {patience:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A folder that is deleted with the test.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("idem-test-{}", unique()));
        std::fs::create_dir(&path).expect("a folder can be made");
        Self(path)
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    pub fn sqlite(&self) -> String {
        format!("sqlite://{}?mode=rwc", self.file("idem.db"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A part of a name that no other test uses.
pub fn unique() -> String {
    uuid::Uuid::new_v4().simple().to_string()[..12].to_owned()
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(future)
}
