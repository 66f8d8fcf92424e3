//! Effects on the container.
