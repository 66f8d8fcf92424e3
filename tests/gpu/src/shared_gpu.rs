//! A GPU that `oci-nvidia-mps` shares while a check runs. Its compute mode is restored whatever happens.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::bench::Bench;
use crate::check::{Stop, cannot_run, failed};
use crate::driver::{Driver, Gpu};
use crate::isolation;
use crate::process::{self, Started};

/// The directory of the supervisors.
const DIRECTORY: &str = "/run/oci-nvidia-mps";
/// The name of the daemon and of its server, as the kernel has it: 15 characters.
const PROCESS: &str = "nvidia-cuda-mps";
/// How long the daemon may take to end, with its clients.
const END: Duration = Duration::from_secs(20);
/// The only compute mode with which the checks begin.
const DEFAULT: &str = "Default";

/// The memory limit of each client in MiB.
pub const MEMORY_MIB: u64 = 2048;
/// The share of the multiprocessors of each client.
pub const PERCENTAGE: u64 = 40;

/// The GPU and its supervisor.
#[derive(Debug)]
pub struct SharedGpu<'a> {
    bench: &'a Bench,
    driver: &'a Driver,
    pub gpu: &'a Gpu,
    /// config.toml of the checks, with the GPU that is shared
    pub config: PathBuf,
    /// The cgroup of the unit, in which the supervisor and its daemon run
    cgroup: PathBuf,
    supervisor: Option<Started>,
    guard: Option<Guard>,
}

impl<'a> SharedGpu<'a> {
    /// Starts the supervisor, and waits until containers can use the GPU.
    ///
    /// # Errors
    /// If MPS cannot be tested on this machine, or the supervisor fails.
    pub fn start(bench: &'a Bench) -> Result<Self, Stop> {
        let (driver, gpu) = (bench.driver()?, bench.whole_gpu()?);
        let mut shared = Self {
            bench,
            driver,
            gpu,
            config: bench.work.join("mps.toml"),
            cgroup: PathBuf::new(),
            supervisor: None,
            guard: None,
        };
        shared.can_run()?;
        shared.write_config()?;
        shared.cgroup = shared.make_cgroup()?;
        let restore = driver.smi_command(&["-i", &gpu.uuid, "-c", "DEFAULT"])?;
        shared.guard = Some(Guard::start(&restore)?);
        if Path::new(DIRECTORY).is_dir() {
            isolation::cover(Path::new(DIRECTORY))?;
        }
        shared.supervise()?;
        Ok(shared)
    }

    /// Checks what the machine must have, without changing anything.
    fn can_run(&self) -> Result<(), Stop> {
        self.bench.isolated()?;
        if self.bench.options.no_mps {
            return cannot_run("left out by --no-mps");
        }
        self.bench.uvm()?;
        if !self.driver.has_mps {
            return cannot_run("the driver has no MPS daemon");
        }
        if has_process(PROCESS) {
            return cannot_run("an MPS daemon runs on this machine");
        }
        let mode = self.mode()?;
        if mode != DEFAULT {
            return cannot_run(format!("the compute mode of the GPU is {mode:?}"));
        }
        let used = self.smi(&["--query-compute-apps=pid", "--format=csv,noheader"])?;
        if !used.trim().is_empty() {
            return cannot_run(
                "other programs use the GPU, and MPS would keep them from using it again",
            );
        }
        // The mode that the GPU has already: this shows only whether it can be set.
        match self.smi(&["-c", "DEFAULT"]) {
            Err(Stop::Failed(why)) => cannot_run(format!("the compute mode cannot be set: {why}")),
            set => set.map(drop),
        }
    }

    fn write_config(&self) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("cannot write {:?}: {error}", self.config);
        let text = std::fs::read_to_string(&self.driver.config).map_err(failed)?;
        let sharing = format!(
            "\n[sharing]\nmps-gpus = [{:?}]\nmps-memory-limit = \"{MEMORY_MIB}M\"\nmps-thread-percentage = {PERCENTAGE}\n",
            self.gpu.uuid
        );
        std::fs::write(&self.config, text + &sharing).map_err(failed)
    }

    /// Creates a cgroup with the name of the unit, as systemd does.
    fn make_cgroup(&self) -> Result<PathBuf, Stop> {
        for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
            let root = Path::new(root);
            let dir = root
                .join(format!("gpu-checks-{}", std::process::id()))
                .join(format!("oci-nvidia-mps@{}.service", self.gpu.uuid));
            if root.join("cgroup.procs").exists() && std::fs::create_dir_all(&dir).is_ok() {
                return Ok(dir);
            }
        }
        cannot_run("no cgroup of version 2 can be created")
    }

    /// Returns a command of `oci-nvidia-mps` that runs in the cgroup of the unit.
    fn in_unit(&self, words: &[&str]) -> Command {
        let mut command = self.driver.on_host(Path::new("/bin/sh"));
        command
            .args(["-c", "echo 0 >\"$0\"; exec \"$@\""])
            .arg(self.cgroup.join("cgroup.procs"))
            .arg(self.bench.options.program("oci-nvidia-mps"))
            .arg("--config")
            .arg(&self.config)
            .args(words);
        command
    }

    fn smi(&self, arguments: &[&str]) -> Result<String, Stop> {
        let arguments = [&["-i", self.gpu.uuid.as_str()], arguments].concat();
        Ok(self.driver.smi(&arguments, self.bench.left())?.ok()?)
    }

    /// Returns the compute mode of the GPU.
    ///
    /// # Errors
    /// If `nvidia-smi` fails.
    pub fn mode(&self) -> Result<String, Stop> {
        let text = self.smi(&["--query-gpu=compute_mode", "--format=csv,noheader"])?;
        Ok(text.trim().to_owned())
    }

    /// Starts the supervisor, and waits until containers can use the GPU.
    ///
    /// # Errors
    /// If the supervisor ends or the time is up.
    pub fn supervise(&mut self) -> Result<(), Stop> {
        let mut command = self.in_unit(&["run", &self.gpu.uuid]);
        let mut supervisor = process::start(&mut command, b"", &self.bench.work)?;
        if let Some(guard) = &mut self.guard {
            guard.write(&supervisor.id().to_string());
        }
        while self.state()["state"] != "ready" {
            let is_over = self.bench.left() < Duration::from_secs(1);
            if supervisor.ends(Duration::from_millis(50)) || is_over {
                supervisor.terminate();
                let why = supervisor.wait(END)?.failure();
                return failed(format!("the supervisor does not become ready: {why}"));
            }
        }
        self.supervisor = Some(supervisor);
        Ok(())
    }

    fn directory(&self) -> PathBuf {
        Path::new(DIRECTORY).join(&self.gpu.uuid)
    }

    /// Returns what the supervisor reports; nothing without a report.
    pub fn state(&self) -> Value {
        let text = std::fs::read_to_string(self.directory().join("state")).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Kills the daemon of the driver, and waits for the end of its supervisor.
    ///
    /// # Errors
    /// If the supervisor goes on, or reports success.
    pub fn kill_daemon(&mut self) -> Result<(), Stop> {
        self.kill("daemon");
        let Some(mut supervisor) = self.supervisor.take() else {
            return failed("no supervisor runs");
        };
        if !supervisor.ends(self.bench.left().min(END)) {
            supervisor.kill();
            return failed("the supervisor goes on without its daemon");
        }
        let ran = supervisor.wait(END)?;
        self.clean_up()?;
        match ran.status.success() {
            false => Ok(()),
            true => failed("the supervisor reports success although its daemon was killed"),
        }
    }

    /// Does what systemd does after the end of the supervisor: the GPU stays closed, because it is shared.
    fn clean_up(&self) -> Result<(), Stop> {
        let mut command = self.in_unit(&["end", &self.gpu.uuid, "exit-code"]);
        let ended = process::start(&mut command, b"", &self.bench.work)?.wait(END)?;
        ended.ok()?;
        Ok(())
    }

    /// Gives the GPU back, as the removal of the package does.
    fn give_back(&self) -> Result<(), Stop> {
        let mut command = self.in_unit(&["restore", "--all"]);
        let ended = process::start(&mut command, b"", &self.bench.work)?.wait(END)?;
        ended.ok()?;
        Ok(())
    }

    /// Kills a process that the state names.
    fn kill(&self, name: &str) {
        if let Some(pid) = self.state()[name].as_i64()
            && let Ok(pid) = i32::try_from(pid)
        {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }

    /// Stops the supervisor, and checks that the GPU stays closed until it is given back.
    ///
    /// # Errors
    /// If it does not end, or the mode is another one.
    pub fn stop(mut self) -> Result<(), Stop> {
        if !self.end() {
            return failed("the supervisor does not end after SIGTERM");
        }
        self.clean_up()?;
        let mode = self.mode()?;
        if mode != "Prohibited" {
            return failed(format!(
                "the stopped supervisor leaves the compute mode {mode:?}"
            ));
        }
        self.give_back()?;
        let mode = self.mode()?;
        if mode != DEFAULT {
            return failed(format!("the supervisor leaves the compute mode {mode:?}"));
        }
        match has_process(PROCESS) {
            true => failed("the supervisor leaves the daemon or its server"),
            false => Ok(()),
        }
    }

    /// Ends the supervisor. Returns whether it ended by itself.
    fn end(&mut self) -> bool {
        let Some(mut supervisor) = self.supervisor.take() else {
            return true;
        };
        supervisor.terminate();
        let ends = supervisor.ends(END);
        if !ends {
            self.kill("daemon");
        }
        supervisor.kill();
        ends
    }
}

impl Drop for SharedGpu<'_> {
    fn drop(&mut self) {
        let Some(mut guard) = self.guard.take() else {
            return;
        };
        self.end();
        self.clean_up().ok();
        std::fs::remove_dir(&self.cgroup).ok();
        self.cgroup.parent().map(std::fs::remove_dir);
        let restored = self.smi(&["-c", "DEFAULT"]);
        // Otherwise the guard tries again.
        if restored.is_ok() {
            guard.write("done");
        }
    }
}

/// Reports whether a process with this name runs.
fn has_process(name: &str) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in processes {
        let found = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        let status = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        // A process that has ended, but was not waited for, has this name, too.
        if found.trim_end() == name && !status.contains(") Z ") {
            return true;
        }
    }
    false
}

/// A process that stops the supervisor and restores the compute mode when this process has ended without releasing it. It is not a child
/// of this process, because the first process of the checks kills the children of one that does not end.
#[derive(Debug)]
struct Guard(ChildStdin);

/// Reads the process id of the supervisor, and `done`. The input ends with this process. A supervisor ends within 15 seconds. `$0` is the command, which gets its arguments.
const GUARD: &str = r#"exec 3<&0
{ while read -r word; do last=$word; done
[ "$last" = done ] || { kill "$last" && sleep 15; "$0" "$@"; }; } <&3 >/dev/null 2>&1 &"#;

impl Guard {
    fn start(restore: &Command) -> Result<Self, String> {
        let mut shell = process::command("sh");
        shell.args(["-c", GUARD]).arg(restore.get_program());
        shell.args(restore.get_args());
        shell.stdin(Stdio::piped()).stdout(Stdio::null());
        for (name, value) in restore.get_envs() {
            if let Some(value) = value {
                shell.env(name, value);
            }
        }
        let failed = |error: std::io::Error| format!("cannot start sh: {error}");
        let mut shell = shell.spawn().map_err(failed)?;
        let pipe = shell.stdin.take();
        // The shell ends at once, and the guard goes on.
        shell.wait().map_err(failed)?;
        pipe.map(Self).ok_or_else(|| "sh has no input".to_owned())
    }

    fn write(&mut self, word: &str) {
        writeln!(self.0, "{word}").ok();
    }
}
