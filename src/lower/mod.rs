//! Lowering: edits into the words of one backend. Pure.

pub mod live;
pub mod text;
