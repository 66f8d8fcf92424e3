//! The command lines of the hook and of the device plugin: one form for their errors, and one for their output.

pub mod parse;
pub mod terminal;
