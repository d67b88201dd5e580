//! A payment gateway, which knows nothing of idem: a process with a ledger of its own, and the client that calls it.

mod client;
mod faults;
mod ledger;
mod process;
mod server;

pub use client::{Gateway, GatewayError};
pub use faults::Faults;
pub use ledger::{Receipt, read_ledger};
pub use process::GatewayProcess;
pub use server::{ServeOptions, serve};
