//! The consumer application: what a `main` builds and runs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use idem_core::store::{self, Store};
use idem_core::{Guard, Guarded, Handler, Policy, SetupError, States};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, OnOffsetLost, Start, parse_librdkafka};
use crate::error::{Error, ErrorKind};
use crate::runtime::{self, Route};
use crate::settings::{KafkaSettings, PassThrough, Settings};
use crate::stats::{Stats, Summary};

/// A consumer of Kafka topics whose handlers take effect once.
///
/// Built from the environment ([`App::from_env`]) or by hand ([`App::builder`]); then told which handler takes which topic;
/// then run until it is asked to end.
pub struct App {
    config: Config,
    store: StoreChoice,
    store_options: store::StoreOptions,
    policy: Policy,
    states: States,
    handlers: Vec<Binding>,
    shutdown: CancellationToken,
    stats: Stats,
    owner: Option<String>,
    migrate: bool,
}

/// How long closing the store may take: nothing depends on it.
const CLOSE_STORE: Duration = Duration::from_secs(1);

enum StoreChoice {
    None,
    Url(String),
    Open(Arc<dyn Store>),
}

struct Binding {
    topic: String,
    bind: Bind,
}

/// Puts a handler, whose type is forgotten, behind a guard.
type Bind = Box<dyn FnOnce(&Guard) -> Result<Guarded, SetupError> + Send>;

impl App {
    /// An application without any setting.
    pub fn builder() -> Self {
        Self {
            config: Config::default(),
            store: StoreChoice::None,
            store_options: store::StoreOptions::default(),
            policy: Policy::default(),
            states: States::default(),
            handlers: Vec::new(),
            shutdown: CancellationToken::new(),
            stats: Stats::default(),
            owner: None,
            migrate: true,
        }
    }

    /// An application with the settings of the environment: `IDEM__KAFKA__BROKERS`, `IDEM__KAFKA__GROUP`,
    /// `IDEM__STORE__URL` and the others of [`Settings`], over those of the file that `IDEM__CONFIG` names, if any.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: a variable or key that idem does not know, or a value of the wrong form. It is named.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_settings(Settings::from_env()?)
    }

    /// An application with these settings.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: a value of the wrong form, named.
    pub fn from_settings(settings: Settings) -> Result<Self, Error> {
        let mut app = Self::builder();
        let KafkaSettings {
            brokers,
            group,
            start,
            on_offset_lost,
            careful_records,
            batch,
            transactions,
            concurrency,
            run_ahead,
            run_ahead_bytes,
            drain_timeout,
            revoke_timeout,
            commit_interval,
            dead_letter_topic,
            librdkafka,
        } = settings.kafka;
        let url = settings.store.url()?;
        app = set(app, brokers, App::brokers);
        app = set(app, group, App::group);
        app = set(app, start, App::start);
        app = set(app, on_offset_lost, App::on_offset_lost);
        app = set(app, careful_records, App::careful_records);
        app = set(app, batch, App::batch);
        app = set(app, transactions, App::transactions);
        app = set(app, concurrency, App::concurrency);
        app = set(app, run_ahead, App::run_ahead);
        app = set(app, run_ahead_bytes, App::run_ahead_bytes);
        app = set(app, drain_timeout.map(|span| span.0), App::drain_timeout);
        app = set(app, revoke_timeout.map(|span| span.0), App::revoke_timeout);
        app = set(app, commit_interval.map(|span| span.0), App::commit_interval);
        app = set(app, dead_letter_topic, App::dead_letter_topic);
        app = set(app, url, App::store_url);
        app = set(app, settings.store.max_connections, App::store_connections);
        app = set(app, settings.store.migrate, App::migrate);
        let pass_through = match librdkafka {
            None => BTreeMap::new(),
            Some(PassThrough::Table(table)) => table,
            Some(PassThrough::Text(text)) => parse_librdkafka(&text)?,
        };
        Ok(pass_through.into_iter().fold(app, |app, (key, value)| app.librdkafka(key, value)))
    }

    /// The brokers to begin with, as `host:port,host:port`.
    pub fn brokers(mut self, brokers: impl Into<String>) -> Self {
        self.config.brokers = Some(brokers.into());
        self
    }

    /// The consumer group.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.config.group = Some(group.into());
        self
    }

    /// The group, unless one is set already.
    pub fn default_group(mut self, group: impl Into<String>) -> Self {
        self.config.group.get_or_insert_with(|| group.into());
        self
    }

    /// Where the rows are: `postgres://…`, `mysql://…` or `sqlite://…`.
    pub fn store_url(mut self, url: impl Into<String>) -> Self {
        self.store = StoreChoice::Url(url.into());
        self
    }

    /// Connections that handlers and guard share, at most. Renewals have their own. Default 10.
    pub fn store_connections(mut self, connections: u32) -> Self {
        self.store_options.max_connections = connections;
        self
    }

    /// Whether the tables are made, or brought to this version, when the application starts. Default yes. If not, they are
    /// only checked, and an application whose tables are of another version does not start.
    pub fn migrate(mut self, migrate: bool) -> Self {
        self.migrate = migrate;
        self
    }

    /// A store that is open already.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = StoreChoice::Open(store);
        self
    }

    /// Shares `value` with handlers that take a `State<T>`.
    pub fn state<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        self.states.insert(value);
        self
    }

    /// Gives the records of `topic` to `handler`.
    pub fn handle<H: Handler>(mut self, topic: impl Into<String>, handler: H) -> Self {
        self.handlers.push(Binding { topic: topic.into(), bind: Box::new(move |guard| guard.bind(handler)) });
        self
    }

    /// The limits of handlers whose attribute sets none.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Where a partition begins for which the group has no committed offset. Default: at its first record.
    pub fn start(mut self, start: Start) -> Self {
        self.config.start = start;
        self
    }

    /// What to do when committed offsets are gone. Default: end, and say so.
    pub fn on_offset_lost(mut self, policy: OnOffsetLost) -> Self {
        self.config.on_offset_lost = policy;
        self
    }

    /// Atomic handlers: how many records of a partition run carefully after it was assigned, so that a message which kills
    /// its process has its attempts counted. Default 100: such a message is found at the latest when those before it are
    /// done, and each restart gets that much further. Each costs one commit more, and they run one at a time. With 0 a message
    /// that kills its process is tried for ever.
    pub fn careful_records(mut self, records: usize) -> Self {
        self.config.careful_records = records;
        self
    }

    /// Messages in one transaction or claim, at most. Default 128; 1 turns batches off.
    pub fn batch(mut self, messages: usize) -> Self {
        self.config.batch = messages;
        self
    }

    /// Transactions of atomic handlers at once, each on a connection of its own. Default 4.
    pub fn transactions(mut self, transactions: usize) -> Self {
        self.config.transactions = transactions;
        self
    }

    /// Lease-mode handlers at once. Default 64.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.config.concurrency = handlers;
        self
    }

    /// Records in memory per partition that are received and not decided, at most. Default 2000.
    pub fn run_ahead(mut self, records: usize) -> Self {
        self.config.run_ahead = records;
        self
    }

    /// Bytes of such records over all partitions, at most (one record more is possible). Default 32 MiB.
    pub fn run_ahead_bytes(mut self, bytes: usize) -> Self {
        self.config.run_ahead_bytes = bytes;
        self
    }

    /// How long handlers may go on once the application was asked to end. Default 25 s, which fits Kubernetes' 30.
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.config.drain_timeout = timeout;
        self
    }

    /// How long handlers of a partition may go on that moves to another member. Default 10 s.
    pub fn revoke_timeout(mut self, timeout: Duration) -> Self {
        self.config.revoke_timeout = timeout;
        self
    }

    /// The least pause between two offset commits. Default 100 ms.
    pub fn commit_interval(mut self, interval: Duration) -> Self {
        self.config.commit_interval = interval;
        self
    }

    /// The topic of dead letters, with `{topic}` and `{consumer}` in it. Default `{topic}-{consumer}-dlt`.
    pub fn dead_letter_topic(mut self, template: impl Into<String>) -> Self {
        self.config.dead_letter_topic = template.into();
        self
    }

    /// One setting for the Kafka client itself, such as `security.protocol`.
    pub fn librdkafka(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.librdkafka.insert(key.into(), value.into());
        self
    }

    /// What rows and logs show as the instance. For people; it decides nothing.
    pub fn instance(mut self, name: impl Into<String>) -> Self {
        self.owner = Some(name.into());
        self
    }

    /// Ends [`run`](Self::run) once everything was handled and nothing came for `duration`.
    pub fn until_idle(mut self, duration: Duration) -> Self {
        self.config.until_idle = Some(duration);
        self
    }

    /// Cancelling `token` asks the application to end, as SIGTERM does.
    pub fn shutdown(mut self, token: CancellationToken) -> Self {
        self.shutdown = token;
        self
    }

    /// The live counters.
    pub fn stats(&self) -> Stats {
        self.stats.clone()
    }

    /// Consumes until SIGTERM or SIGINT, until the token of [`shutdown`](Self::shutdown), or until idle: then drains, commits
    /// and leaves the group. A second signal ends the process at once.
    ///
    /// # Errors
    /// The settings clash, the store or the brokers cannot be used at start, or the application cannot go on. Offsets then
    /// stand behind everything undecided.
    ///
    /// # Cancel safety
    /// Dropping the future is a crash: nothing is lost, but running handlers are dropped and nothing more is committed.
    pub async fn run(self) -> Result<Summary, Error> {
        let clashes = self.config.clashes();
        if !clashes.is_empty() {
            return Err(Error::new(ErrorKind::Configuration, clashes.join("; ")));
        }
        if let StoreChoice::Url(url) = &self.store
            && ["postgres", "mysql", "mariadb"].iter().any(|server| url.starts_with(server))
            && self.config.transactions as u64 >= u64::from(self.store_options.max_connections)
        {
            let text = format!(
                "`kafka.transactions` is {}, not below `store.max_connections` {}: claims and completions would find no connection",
                self.config.transactions, self.store_options.max_connections
            );
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        if self.handlers.is_empty() {
            return Err(Error::new(ErrorKind::Configuration, "no handler is set: call `.handle(topic, handler)`"));
        }
        let opened = !matches!(self.store, StoreChoice::Open(_));
        let store = match self.store {
            StoreChoice::Open(store) => store,
            StoreChoice::Url(url) => store::connect(&url, &self.store_options).await?,
            StoreChoice::None => {
                let text = "`store.url` is not set: set IDEM__STORE__URL or call `.store_url(…)`";
                return Err(Error::new(ErrorKind::Configuration, text));
            }
        };
        if self.migrate {
            store.migrate().await?;
        } else {
            store.check_schema().await?;
        }
        let mut guard = Guard::new(Arc::clone(&store)).states(self.states).policy(self.policy);
        if let Some(owner) = self.owner {
            guard = guard.owner(owner);
        }
        let mut routes: Vec<Route> = Vec::new();
        for Binding { topic, bind } in self.handlers {
            if routes.iter().any(|route| route.topic == topic) {
                return Err(Error::new(ErrorKind::Configuration, format!("two handlers take the topic `{topic}`")));
            }
            routes.push(Route { topic, guarded: bind(&guard)? });
        }
        let result = runtime::run(self.config, Arc::clone(&store), routes, self.shutdown, self.stats).await;
        // Counts for people: not worth a longer end.
        if !matches!(tokio::time::timeout(CLOSE_STORE, guard.flush()).await, Ok(Ok(()))) {
            tracing::debug!("the last counts of duplicates were not written");
        }
        if opened && tokio::time::timeout(CLOSE_STORE, store.close()).await.is_err() {
            tracing::debug!("the store's connections did not close in time");
        }
        result
    }
}

/// Applies a setting, if there is one.
fn set<T>(app: App, value: Option<T>, setter: impl FnOnce(App, T) -> App) -> App {
    match value {
        Some(value) => setter(app, value),
        None => app,
    }
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App")
            .field("config", &self.config)
            .field("handlers", &self.handlers.len())
            .finish_non_exhaustive()
    }
}
