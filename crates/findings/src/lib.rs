//! The catalog of findings: what can be wrong with a host, a container or a request, each with a number and a fix.
//!
//! ```
//! use anyhow::Context;
//! use base::report::{failure, render};
//! use findings::catalog;
//!
//! let cause = failure(&catalog::CONFIG, "line 3: unknown key \"rooot\"", "remove the key");
//! let error = Err::<(), _>(cause).context("cannot read \"/etc/x.toml\"").unwrap_err();
//! assert_eq!(
//!     render(&error),
//!     "cannot read \"/etc/x.toml\": line 3: unknown key \"rooot\" (ONH-005)\nhint: remove the key"
//! );
//! ```

pub mod catalog;
