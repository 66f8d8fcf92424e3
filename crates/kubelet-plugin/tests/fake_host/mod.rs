//! A host with the fake driver, for tests.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The UUID that make-root gives to a GPU.
pub fn uuid(gpu: u32) -> String {
    format!(
        "GPU-{:08x}-{gpu:04x}-{:04x}-8000-{:012x}",
        0x51ee_d000_u32 + gpu,
        0x4000 + gpu,
        0xfa4e_0000_u32 + gpu
    )
}

/// Returns the program that loads NVML, which `cargo test --workspace` has built. Programs search for it in their own directory, which
/// is another one for tests.
pub fn nvml_program() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    let program = this.parent().unwrap().with_file_name("oci-nvidia-nvml");
    std::os::unix::fs::symlink(&program, this.with_file_name("oci-nvidia-nvml")).ok();
    program
}

/// A driver root, and a configuration that names it.
pub struct Fake {
    pub root: PathBuf,
    pub config: PathBuf,
    pub dir: tempfile::TempDir,
}

impl Fake {
    pub fn new(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let root = dir.path().join("root");
        let config = dir.path().join("config.toml");
        std::fs::write(
            &config,
            format!("[nvidia-container-cli]\nroot = \"{}\"\n", root.display()),
        )
        .unwrap();
        let fake = Self { root, config, dir };
        fake.make_root(arguments);
        fake
    }

    pub fn make_root(&self, arguments: &[&str]) {
        // One at a time: the compiled files are shared.
        static BUILD: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let lock = BUILD
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let program =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake-driver/make-root");
        let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-driver-monitor");
        let mut command = Command::new(program);
        let output = command
            .arg(&self.root)
            .arg("--build")
            .arg(build)
            .args(arguments)
            .output()
            .unwrap();
        drop(lock);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.root
            .join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH))
            .join(name)
    }

    /// Replaces a text in the library's configuration, in one step.
    pub fn set(&self, from: &str, to: &str) {
        let path = self.file("nvml.conf");
        let old = std::fs::read_to_string(&path).unwrap();
        let new = old.replace(from, to);
        assert_ne!(old, new, "{from}");
        std::fs::write(path.with_extension("new"), new).unwrap();
        std::fs::rename(path.with_extension("new"), path).unwrap();
    }

    /// Adds keys to the line of a GPU.
    pub fn add(&self, gpu: u32, keys: &str) {
        self.set(
            &format!("gpu minor={gpu} "),
            &format!("gpu minor={gpu} {keys} "),
        );
    }

    pub fn remove(&self, gpu: u32, keys: &str) {
        self.set(
            &format!("gpu minor={gpu} {keys} "),
            &format!("gpu minor={gpu} "),
        );
    }

    /// Makes a GPU another model.
    pub fn rename(&self, gpu: u32, model: &str) {
        let text = std::fs::read_to_string(self.file("nvml.conf")).unwrap();
        let start = format!("gpu minor={gpu} ");
        let line = text.lines().find(|line| line.starts_with(&start)).unwrap();
        let (before, rest) = line.split_once("name=\"").unwrap();
        let (_, after) = rest.split_once('"').unwrap();
        self.set(line, &format!("{before}name=\"{model}\"{after}"));
    }

    pub fn event(&self, line: &str) {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.file("nvml.events"))
            .unwrap();
        writeln!(file, "{line}").unwrap();
    }
}
