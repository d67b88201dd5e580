//! What the two examples share: a plan of messages with duplicates, the demonstration, and a check that trusts neither
//! idem nor the workers.
//!
//! The lines readers come for are in `invoice/handlers.rs` and `payment/handlers.rs`.

pub mod example;

pub mod check;
pub mod cli;
pub mod demo;
pub mod produce;
pub mod run;

pub mod evidence;
pub mod plan;
pub mod verdict;

pub mod chaos;
pub mod workers;

pub mod brokers;
pub mod database;
pub mod group;
pub mod producer;
pub mod topic;

pub mod failure;
pub mod progress;
pub mod summary;
pub mod table;
