//! Why a command ended without doing what it was asked, as an exit code and one sentence.

use std::fmt;
use std::process::ExitCode;

use idem_kafka::Error;
use idem_kafka::core::store::StoreError;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// A command did not do what it was asked.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    sentence: String,
}

/// Exit code: something is wrong, as the sentence says.
pub const FAILED: u8 = 1;
/// Exit code: called wrongly.
pub const MISUSED: u8 = 2;
/// Exit code: what was asked for is not there.
pub const NOT_FOUND: u8 = 3;
/// Exit code: a broker or database cannot be reached. Worth retrying.
pub const UNREACHABLE: u8 = 6;

impl Failure {
    /// A failure with one of this module's exit codes.
    pub fn new(code: u8, sentence: impl Into<String>) -> Self {
        Self { code, sentence: sentence.into() }
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// The client of Kafka could not do something; `attempt` says what, as in `the topic cannot be read`.
    pub fn kafka(attempt: &str, error: &KafkaError) -> Self {
        let unreachable = matches!(
            error.rdkafka_error_code(),
            Some(
                RDKafkaErrorCode::BrokerTransportFailure
                    | RDKafkaErrorCode::AllBrokersDown
                    | RDKafkaErrorCode::OperationTimedOut
                    | RDKafkaErrorCode::Resolve
            )
        );
        Self::new(if unreachable { UNREACHABLE } else { FAILED }, format!("{attempt}: {error}"))
    }

    /// The database could not do something.
    pub fn sql(attempt: &str, error: sqlx::Error) -> Self {
        Error::from(StoreError::from_sqlx(attempt, error)).into()
    }

    /// The operating system could not do something.
    pub fn io(attempt: &str, error: &std::io::Error) -> Self {
        Self::new(FAILED, format!("{attempt}: {error}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(error.exit_code(), error.describe())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Failure {}

/// How a `main` ends: says the sentence on standard error and gives the exit code to whoever started it.
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.code)
        }
    }
}
