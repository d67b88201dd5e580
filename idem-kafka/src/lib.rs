//! PLACEHOLDER lib docs
#![allow(missing_docs)]

pub use idem_core as core;

mod app;
mod assignment;
mod config;
mod dead_letter;
mod decode;
mod dispatch;
pub mod embedded;
mod error;
mod flow;
mod offsets;
mod record;
mod runtime;
mod settings;
mod stats;

pub use app::App;
pub use config::{OnOffsetLost, Start};
pub use error::{Error, ErrorKind};
pub use rdkafka;
pub use settings::Settings;
pub use stats::{Stats, Summary};

/// What a handler's author and a consumer's `main` need.
pub mod prelude {
    pub use crate::{App, Error};
    pub use idem_core::store::{Tx, sql};
    pub use idem_core::{Classify, Disposition, Job, RunGuarded, State};
}
