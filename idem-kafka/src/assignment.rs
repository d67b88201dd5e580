//! assignment
