//! Deterministic simulator of whole nodes.
