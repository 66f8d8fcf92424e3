//! Reports: errors and findings, each with its kind, which has a number, and the command that fixes it.
//!
//! [`Finding`] is one observation. [`Failure`] is the finding that an error carries. [`render`] turns an error into text.

mod error;
mod finding;
mod hidden;
mod kind;

pub(crate) use error::errno_text;
pub use error::{
    ErrorReport, Failure, classify, errno_of, failure, kind_of, line, one_line, render,
};
pub use finding::Finding;
pub(crate) use hidden::is_hidden;
pub use kind::{Kind, SYSTEM, Severity, Texts, without_markdown};
