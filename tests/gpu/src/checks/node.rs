//! What the checks of the device plugin and of the DRA driver share.

use std::time::Duration;

use crate::bench::Bench;
use crate::check::{Stop, cannot_run};

/// How long NVML and the plugin may take to start.
pub const STARTED: Duration = Duration::from_secs(40);
/// How long the state may take to become complete after the first report.
pub const SETTLED: Duration = Duration::from_secs(5);
/// How long an XID may take to reach the kubelet.
pub const NOTICED: Duration = Duration::from_secs(10);

/// XIDs of faults of programs are ignored by default; here they count, for two seconds.
pub const FAULT_OPTIONS: [&str; 2] = ["--ignored-xids=45", "--quiet-period=2"];

/// Whether a program may fail on a GPU of this machine.
pub fn may_fault(bench: &Bench) -> Result<(), Stop> {
    bench.uvm()?;
    if bench.options.no_fault {
        return cannot_run("left out by --no-fault");
    }
    if std::path::Path::new("/tmp/nvidia-mps/control").exists() {
        return cannot_run(
            "an MPS daemon runs, and a fault would end the programs of its other clients",
        );
    }
    Ok(())
}

/// Runs the faulty kernel on the host, and returns the error that the driver reported.
pub fn fault(bench: &Bench) -> Result<String, Stop> {
    let kernels = bench.options.kit.join("image/cuda/kernels.ptx");
    let mut program = bench
        .driver()?
        .on_host(&bench.options.program("cuda-check"));
    let text = bench.run(program.arg("fault").arg(kernels))?.ok()?;
    Ok(text.lines().last().unwrap_or_default().to_owned())
}
