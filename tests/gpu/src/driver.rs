//! Where the driver of this machine is, and how its programs run on the host.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::check::{Stop, cannot_run};
use crate::options::Options;
use crate::process::{self, Ran};

/// A GPU as `oci-nvidia-hook info` lists it.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub index: u64,
    pub minor: u64,
    pub uuid: String,
    pub is_mig: bool,
    pub mig_devices: Vec<String>,
}

impl Gpu {
    pub fn lacks_mig_devices(&self) -> bool {
        self.is_mig && self.mig_devices.is_empty()
    }
}

/// The driver, with a config.toml that names its place.
#[derive(Clone, Debug)]
pub struct Driver {
    pub root: PathBuf,
    pub config: PathBuf,
    /// How it was found, for the report
    pub how: String,
    /// The output of `info --json`
    pub info: Value,
    pub gpus: Vec<Gpu>,
    /// The directory with the device nodes
    pub nodes: PathBuf,
    /// The value of LD_LIBRARY_PATH for programs of the driver, if the linker cache of the host does not list its libraries: links to
    /// these libraries only, because a driver root can contain another libc
    libraries: Option<PathBuf>,
    /// How long NVML took when nothing kept the GPUs initialized
    pub first_answer: Duration,
    smi: Option<PathBuf>,
    /// Whether the driver has the daemon of MPS
    pub has_mps: bool,
    work: PathBuf,
    program: PathBuf,
}

/// Driver roots of driver containers and of images that cannot install into `/`.
const ROOTS: [&str; 5] = [
    "/",
    "/usr/local/nvidia",
    "/home/kubernetes/bin/nvidia",
    "/run/nvidia/driver",
    "/opt/nvidia/driver",
];

/// Directories in which the library is when no linker cache lists it.
const LIBRARY_DIRS: [&str; 6] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/opt/nvidia/lib64",
];

/// A place at which the driver could be.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    root: PathBuf,
    library_dir: Option<PathBuf>,
}

/// Returns the places to try, in order: those that an option or the machine names first.
fn places(options: &Options) -> Vec<Place> {
    let at = |root: &Path| Place {
        root: root.to_owned(),
        library_dir: None,
    };
    if let Some(root) = &options.root {
        return vec![at(root)];
    }
    let mut places: Vec<_> = ROOTS
        .iter()
        .map(|root| at(Path::new(root)))
        .filter(|place| place.root.is_dir())
        .collect();
    // A sandbox can have the library in a directory that only LD_LIBRARY_PATH names.
    let variable = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let named = variable
        .split(':')
        .filter(|dir| dir.starts_with('/'))
        .map(PathBuf::from);
    for dir in named.chain(LIBRARY_DIRS.iter().map(PathBuf::from)) {
        let place = Place {
            root: PathBuf::from("/"),
            library_dir: Some(dir.clone()),
        };
        if dir.join("libnvidia-ml.so.1").exists() && !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

impl Driver {
    /// Finds the driver: the first place at which the hook finds a GPU.
    ///
    /// # Errors
    /// The hook's message for each place at which there is a part of a driver.
    pub fn find(options: &Options, work: &Path, limit: Duration) -> Result<Self, String> {
        let mut errors = Vec::new();
        for (number, place) in places(options).iter().enumerate() {
            let config = work.join(format!("driver-{number}/config.toml"));
            match Self::at(place, config, options, work, limit) {
                Ok(driver) => return Ok(driver),
                Err(error) => errors.push(format!("{}: {error}", place.root.display())),
            }
        }
        // Each place without any part of a driver has the same message, of which the first is enough.
        let first = errors
            .first()
            .cloned()
            .unwrap_or_else(|| "no directory of a driver exists".to_owned());
        let others = errors
            .into_iter()
            .skip(1)
            .filter(|error| !error.contains("ONH-010"));
        Err(std::iter::once(first)
            .chain(others)
            .collect::<Vec<_>>()
            .join("; "))
    }

    fn at(
        place: &Place,
        config: PathBuf,
        options: &Options,
        work: &Path,
        limit: Duration,
    ) -> Result<Self, String> {
        let dir = config.parent().unwrap_or(work).to_owned();
        let write = |path: &Path, text: &str| {
            std::fs::write(path, text).map_err(|error| format!("{path:?}: {error}"))
        };
        std::fs::create_dir_all(&dir).map_err(|error| format!("{dir:?}: {error}"))?;
        let mut toml = format!("[nvidia-container-cli]\nroot = {:?}\n", place.root);
        if let Some(dir) = &place.library_dir {
            toml += &format!("[driver]\nlibrary-dirs = [{dir:?}]\n");
        }
        write(&config, &toml)?;
        let hook = options.program("oci-nvidia-hook");
        let ask = |words: &[&str]| {
            process::run(
                process::command(&hook)
                    .arg("--config")
                    .arg(&config)
                    .args(words),
                b"",
                work,
                limit,
            )
        };
        let parse = |text: String| {
            serde_json::from_str::<Value>(&text).map_err(|error| format!("invalid JSON: {error}"))
        };
        let info = ask(&["info", "--json"])?;
        let first_answer = info.time;
        let info = parse(info.ok()?)?;
        // Without libcuda, for example, there are GPUs, and the check of the files fails.
        let files = ask(&["files", "--json"])?
            .ok()
            .and_then(parse)
            .unwrap_or_default();
        let libraries = dir.join("libraries");
        std::fs::create_dir_all(&libraries).map_err(|error| format!("{libraries:?}: {error}"))?;
        let files = files["files"].as_array().cloned().unwrap_or_default();
        let sources = |kind: &str| {
            let of_kind = files.iter().filter(|file| file["kind"] == kind);
            of_kind
                .filter_map(|file| file["source"].as_str())
                .map(PathBuf::from)
                .collect::<Vec<_>>()
        };
        link_libraries(&sources("library"), &libraries)?;
        let programs = sources("binary");
        let program = |name: &str| programs.iter().find(|path| path.ends_with(name)).cloned();
        let own = place.root.join("dev");
        let nodes = if own.join("nvidiactl").exists() {
            own
        } else {
            PathBuf::from("/dev")
        };
        let how = match &place.library_dir {
            Some(dir) => format!(
                "driver root {}, libraries in {}",
                place.root.display(),
                dir.display()
            ),
            None => format!("driver root {}", place.root.display()),
        };
        Ok(Self {
            root: place.root.clone(),
            config,
            how,
            gpus: gpus(&info),
            info,
            nodes,
            libraries: (place.root != Path::new("/") || place.library_dir.is_some())
                .then_some(libraries),
            first_answer,
            smi: program("nvidia-smi"),
            has_mps: program("nvidia-cuda-mps-control").is_some(),
            work: work.to_owned(),
            program: std::env::current_exe().map_err(|error| error.to_string())?,
        })
    }

    /// The version of the driver.
    pub fn version(&self) -> &str {
        self.info["driver_version"].as_str().unwrap_or("unknown")
    }

    /// Returns a command that runs a program with the driver's libraries, and with its device nodes if they are not in `/dev`.
    pub fn on_host(&self, program: &Path) -> Command {
        let mut command = if self.nodes == Path::new("/dev") {
            process::command(program)
        } else {
            let mut command = process::command(&self.program);
            command
                .arg("--on-host")
                .arg(self.work.join("stage"))
                .arg(&self.nodes)
                .arg(program);
            command
        };
        if let Some(libraries) = &self.libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        // CUDA then has the order of NVML.
        command.env("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
        command
    }

    /// Runs `nvidia-smi` of the driver on the host.
    ///
    /// # Errors
    /// If the driver lacks it, or it does not end in time.
    pub fn smi(&self, arguments: &[&str], limit: Duration) -> Result<Ran, Stop> {
        let mut smi = self.smi_command(arguments)?;
        Ok(process::run(&mut smi, b"", &self.work, limit)?)
    }

    /// Returns the command that runs `nvidia-smi` of the driver on the host.
    ///
    /// # Errors
    /// If the driver lacks it.
    pub fn smi_command(&self, arguments: &[&str]) -> Result<Command, Stop> {
        let Some(smi) = &self.smi else {
            return cannot_run("nvidia-smi is not installed");
        };
        let mut command = self.on_host(smi);
        command.args(arguments);
        Ok(command)
    }

    /// Whether the driver has `nvidia-smi`.
    pub const fn has_smi(&self) -> bool {
        self.smi.is_some()
    }

    /// Whether the driver has a device for CUDA. Its module is loaded by the first CUDA program, and the checks load none.
    pub fn has_uvm(&self) -> bool {
        self.kernel_file("devices").contains("nvidia-uvm")
    }

    /// Reads a file of /proc of the driver root, or else of the host.
    pub fn kernel_file(&self, name: &str) -> String {
        let read = |root: &Path| std::fs::read_to_string(root.join("proc").join(name));
        read(&self.root)
            .or_else(|_| read(Path::new("/")))
            .unwrap_or_default()
    }
}

/// Links each library with its own name and with the names of the links to it, one of which is its SONAME.
fn link_libraries(libraries: &[PathBuf], dir: &Path) -> Result<(), String> {
    for library in libraries {
        let Some(name) = library.file_name() else {
            continue;
        };
        let entries = library
            .parent()
            .and_then(|parent| std::fs::read_dir(parent).ok())
            .into_iter()
            .flatten()
            .flatten();
        let is_link = |path: &Path| {
            std::fs::read_link(path).is_ok_and(|target| target.file_name() == Some(name))
        };
        let links = entries
            .filter(|entry| is_link(&entry.path()))
            .map(|entry| entry.file_name());
        for link in links.chain([name.to_owned()]) {
            match std::os::unix::fs::symlink(library, dir.join(&link)) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(format!("cannot link {link:?}: {error}"));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn gpus(info: &Value) -> Vec<Gpu> {
    let parse = |gpu: &Value| {
        let mig_devices = gpu["mig"]["devices"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        Some(Gpu {
            index: gpu["index"].as_u64()?,
            minor: gpu["minor"].as_u64()?,
            uuid: gpu["uuid"].as_str()?.to_owned(),
            is_mig: gpu["mig"]["enabled"] == true,
            mig_devices: mig_devices
                .iter()
                .filter_map(|mig| Some(mig["uuid"].as_str()?.to_owned()))
                .collect(),
        })
    };
    info["gpus"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(parse)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_the_document() {
        let info = serde_json::json!({"gpus": [
            {"index": 0, "minor": 1, "uuid": "GPU-a", "mig": {"enabled": true, "devices": [{"uuid": "MIG-b"}]}},
            {"index": 1, "minor": 0, "uuid": "GPU-c", "mig": {"enabled": false, "devices": []}},
        ]});
        let gpus = gpus(&info);
        assert_eq!((gpus.len(), gpus[0].minor, gpus[0].is_mig), (2, 1, true));
        assert_eq!(gpus[0].mig_devices, ["MIG-b"]);
        assert!(!gpus[1].is_mig);
    }
}
