//! Settings from the environment and a file.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

use crate::config::{OnOffsetLost, Start};
use crate::error::{Error, ErrorKind};

/// Everything that can be set from outside. Environment variables have a double underscore between section and name
/// (`IDEM__KAFKA__BROKERS`); a TOML file, named by `IDEM__CONFIG`, has sections. The environment goes before the file.
///
/// Unknown names are refused, durations carry their unit (`5s`), and every secret can come from a file (`*_file`).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct Settings {
    /// `[kafka]`
    pub kafka: KafkaSettings,
    /// `[store]`
    pub store: StoreSettings,
    /// `[log]`, for the application's own subscriber.
    pub log: LogSettings,
}

/// `[kafka]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct KafkaSettings {
    /// See [`App::brokers`](crate::App::brokers).
    pub brokers: Option<String>,
    /// See [`App::group`](crate::App::group).
    pub group: Option<String>,
    /// See [`App::start`](crate::App::start).
    pub start: Option<Start>,
    /// See [`App::on_offset_lost`](crate::App::on_offset_lost).
    pub on_offset_lost: Option<OnOffsetLost>,
    /// See [`App::batch`](crate::App::batch).
    pub batch: Option<usize>,
    /// See [`App::careful_records`](crate::App::careful_records).
    pub careful_records: Option<usize>,
    /// See [`App::transactions`](crate::App::transactions).
    pub transactions: Option<usize>,
    /// See [`App::concurrency`](crate::App::concurrency).
    pub concurrency: Option<usize>,
    /// See [`App::run_ahead`](crate::App::run_ahead).
    pub run_ahead: Option<usize>,
    /// See [`App::run_ahead_bytes`](crate::App::run_ahead_bytes).
    pub run_ahead_bytes: Option<usize>,
    /// See [`App::drain_timeout`](crate::App::drain_timeout).
    pub drain_timeout: Option<Span>,
    /// See [`App::revoke_timeout`](crate::App::revoke_timeout).
    pub revoke_timeout: Option<Span>,
    /// See [`App::commit_interval`](crate::App::commit_interval).
    pub commit_interval: Option<Span>,
    /// See [`App::dead_letter_topic`](crate::App::dead_letter_topic).
    pub dead_letter_topic: Option<String>,
    /// See [`App::librdkafka`](crate::App::librdkafka): `key=value;key=value`, or a table in the file.
    pub librdkafka: Option<PassThrough>,
}

/// `[store]`
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct StoreSettings {
    /// See [`App::store_url`](crate::App::store_url).
    pub url: Option<String>,
    /// A file that holds the URL.
    pub url_file: Option<std::path::PathBuf>,
    /// See [`App::store_connections`](crate::App::store_connections).
    pub max_connections: Option<u32>,
    /// See [`App::migrate`](crate::App::migrate).
    pub migrate: Option<bool>,
}

/// `[log]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct LogSettings {
    /// Directives of tracing's `EnvFilter`.
    pub filter: Option<String>,
}

/// A duration with its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text)
            .map(Span)
            .map_err(|error| serde::de::Error::custom(format!("{text:?} is not a duration such as `5s`: {error}")))
    }
}

/// Settings for the Kafka client itself.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
pub enum PassThrough {
    /// `key=value;key=value`
    Text(String),
    /// A table.
    Table(BTreeMap<String, String>),
}

impl std::fmt::Debug for PassThrough {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PassThrough(…)")
    }
}

impl std::fmt::Debug for StoreSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreSettings")
            .field("url", &self.url.as_ref().map(|_| "***"))
            .field("url_file", &self.url_file)
            .field("max_connections", &self.max_connections)
            .field("migrate", &self.migrate)
            .finish()
    }
}

impl Settings {
    /// From the environment and the file that `IDEM__CONFIG` names, if any.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: the file cannot be read, or a name or value is wrong. It is named.
    pub fn from_env() -> Result<Self, Error> {
        let file = std::env::var_os("IDEM__CONFIG");
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| name.starts_with("IDEM__") && name != "IDEM__CONFIG")?;
            Some((name, value.into_string().ok()?))
        });
        Self::from_sources(file.as_deref().map(std::path::Path::new), variables.collect())
    }

    fn from_sources(
        file: Option<&std::path::Path>,
        variables: std::collections::HashMap<String, String>,
    ) -> Result<Self, Error> {
        let mut sources = config::Config::builder();
        if let Some(file) = file {
            sources = sources.add_source(config::File::from(file).format(config::FileFormat::Toml));
        }
        let environment = config::Environment::with_prefix("IDEM")
            .prefix_separator("__")
            .separator("__")
            .try_parsing(true)
            .source(Some(variables));
        let settings = sources.add_source(environment).build().and_then(config::Config::try_deserialize);
        settings.map_err(|error| Error::new(ErrorKind::Configuration, format!("the configuration is wrong: {error}")))
    }
}

impl StoreSettings {
    /// The URL, from whichever of its two settings is there.
    ///
    /// # Errors
    /// Both are set, or the file cannot be read.
    pub fn url(&self) -> Result<Option<String>, Error> {
        match (&self.url, &self.url_file) {
            (Some(_), Some(_)) => {
                Err(Error::new(ErrorKind::Configuration, "`store.url` and `store.url_file` are both set: remove one"))
            }
            (Some(url), None) => Ok(Some(url.clone())),
            (None, Some(file)) => match std::fs::read_to_string(file) {
                Ok(url) => Ok(Some(url.trim().to_owned())),
                Err(error) => {
                    let text = format!("`store.url_file` {} cannot be read", file.display());
                    Err(Error::with_cause(ErrorKind::Configuration, text, error))
                }
            },
            (None, None) => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Settings, Error> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Settings::from_sources(None, variables.collect())
    }

    #[test]
    fn the_environment_is_read() {
        let settings = from(&[
            ("IDEM__KAFKA__BROKERS", "a:1,b:2"),
            ("IDEM__KAFKA__GROUP", "42"),
            ("IDEM__KAFKA__BATCH", "7"),
            ("IDEM__KAFKA__START", "latest"),
            ("IDEM__KAFKA__DRAIN_TIMEOUT", "5s"),
            ("IDEM__KAFKA__LIBRDKAFKA", "a.b=c;d=e"),
            ("IDEM__STORE__URL", "sqlite://x"),
        ])
        .unwrap();
        assert_eq!(settings.kafka.brokers.as_deref(), Some("a:1,b:2"));
        assert_eq!(settings.kafka.group.as_deref(), Some("42"));
        assert_eq!(settings.kafka.batch, Some(7));
        assert_eq!(settings.kafka.start, Some(Start::Latest));
        assert_eq!(settings.kafka.drain_timeout, Some(Span(Duration::from_secs(5))));
        assert!(matches!(&settings.kafka.librdkafka, Some(PassThrough::Text(text)) if text == "a.b=c;d=e"));
        assert_eq!(settings.store.url().unwrap().as_deref(), Some("sqlite://x"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (name, value, told) in [
            ("IDEM__KAFKA__BROKRES", "x", "brokres"),
            ("IDEM__KAFAK__BROKERS", "x", "kafak"),
            ("IDEM__KAFKA__BATCH", "many", "many"),
            ("IDEM__KAFKA__DRAIN_TIMEOUT", "5", "5"),
            ("IDEM__KAFKA__START", "middle", "middle"),
        ] {
            let error = from(&[(name, value)]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(told), "{name}: {error}");
        }
    }

    #[test]
    fn both_a_secret_and_its_file_are_one_too_many() {
        let settings = from(&[("IDEM__STORE__URL", "a"), ("IDEM__STORE__URL_FILE", "b")]).unwrap();
        assert!(settings.store.url().unwrap_err().to_string().contains("url_file"));
    }

    #[test]
    fn the_url_is_not_shown() {
        let settings = from(&[("IDEM__STORE__URL", "postgres://u:hunter2@h/d")]).unwrap();
        assert!(!format!("{settings:?}").contains("hunter2"));
    }
}
