//! Runs as `nvidia-cdi-hook` or `nvidia-ctk hook`: the hooks in CDI specs that NVIDIA's toolkit, device plugin and DRA driver
//! write.

use std::ffi::OsString;
use std::process::ExitCode;

use base::report::{Finding, failure};
use findings::catalog;

use crate::cli::output;
use crate::cli::usage::hook_usage_error;
use crate::record::call::Call;
use crate::stages::cdi_hook::{
    self,
    entry::{self, HOOKS, Verb},
};

const HELP: &str = "\
usage: nvidia-ctk hook HOOK [OPTIONS] < state.json
       nvidia-cdi-hook HOOK [OPTIONS] < state.json

oci-nvidia-hook, called with the name of NVIDIA's program. Runtimes call the
hooks of a CDI spec at the createContainer stage. HOOK is one of:

  create-symlinks                   --link TARGET::PATH ...
  update-ldcache                    --folder DIRECTORY ...
  enable-cuda-compat                --host-driver-version VERSION
                                    --host-cuda-version VERSION
                                    --cuda-compat-container-root DIRECTORY
  disable-device-node-modification
  update-application-profile
  chmod                             --mode OCTAL --path PATH ...

With --container-spec FILE, the container state is read from FILE instead of stdin.
";

/// Runs the hook with the arguments after argv\[0\]. `name` is the name with which the program was called.
pub(crate) fn run(name: &str, args: Vec<OsString>) -> ExitCode {
    match entry::parse(name, args) {
        Ok(Verb::Hook(hook)) => cdi_hook::run(&hook),
        Ok(Verb::Help) => output::print(HELP),
        Ok(Verb::Version) => output::print(&format!(
            "{name} version {} (oci-nvidia-hook)\n",
            env!("CARGO_PKG_VERSION")
        )),
        Ok(Verb::Unknown(what)) => {
            let mut call = Call::for_stage(name);
            call.connect();
            call.finding(&Finding::new(&catalog::UNKNOWN_CDI_HOOK, what, supported()));
            ExitCode::SUCCESS
        }
        Err(error) => {
            let what = format!("invalid command line of {name}: {error:#}");
            let hint = format!("{}; see \"{name} --help\"", supported());
            hook_usage_error(name, &failure(&catalog::COMMAND_LINE, what, hint))
        }
    }
}

fn supported() -> String {
    format!(
        "these hooks of \"nvidia-ctk hook\" are supported: {}",
        HOOKS.join(", ")
    )
}
