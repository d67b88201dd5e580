//! dead_letter
