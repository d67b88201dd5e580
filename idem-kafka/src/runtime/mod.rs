//! runtime
use crate::app::Route;
use crate::config::Config;
use crate::error::Error;
use crate::stats::{Stats, Summary};
use idem_core::store::Store;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
pub(crate) async fn run(
    _config: Config,
    _store: Arc<dyn Store>,
    _routes: Vec<Route>,
    _shutdown: CancellationToken,
    _stats: Stats,
) -> Result<Summary, Error> {
    todo!()
}
