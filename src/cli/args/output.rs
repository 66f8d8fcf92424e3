//! The option of every command that can print JSON.

use clap::Args;

/// Options for the format of the output.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Output {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
