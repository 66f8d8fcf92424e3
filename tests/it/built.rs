//! The program as packages contain it. It is compiled once, in `target/release`, where `make build` and `make demo` also compile
//! it: with link-time optimization, compiling takes minutes, and the tests of sizes, documents and packages all need the program.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support::{HOOK, run, source, write_program};

/// Returns the program that `make build` builds.
pub fn release() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        nvml_release();
        let arguments = ["--features", "lean", "--bin", "oci-nvidia-hook"];
        build(
            "rustc",
            "oci-nvidia-hook",
            &[&arguments[..], &["--", "-C", "target-feature=+crt-static"]].concat(),
        )
    })
}

/// Returns the program that loads NVML as packages contain it, in the directory of [`release`].
pub fn nvml_release() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        build(
            "build",
            "oci-nvidia-nvml",
            &["--package", "oci-nvidia-nvml"],
        )
    })
}

/// Returns the hook under test as a static program, as packages contain it. tests/rustc compiles it as one. Its profile is that of tests:
/// link-time optimization would take minutes, and the tests of packages have a program with it.
pub fn static_hook() -> &'static Path {
    static BUILT: OnceLock<&Path> = OnceLock::new();
    BUILT.get_or_init(|| {
        programs();
        if linting_rustc().is_none() {
            debug_build(
                &["rustc", "--bin", "oci-nvidia-hook"],
                &["--", "-C", "target-feature=+crt-static"],
            );
        }
        Path::new(HOOK)
    })
}

/// Returns the directory with this build of the hook, the device plugin and its tools for tests. `cargo test --workspace` has compiled
/// them, and other commands would compile all crates again with other features.
pub fn programs() -> &'static Path {
    static BUILT: OnceLock<&Path> = OnceLock::new();
    BUILT.get_or_init(|| {
        let tests = ["monitor", "arguments", "command_line"].map(|test| ["--test", test]);
        debug_build(
            &["test", "--workspace", "--no-run", "--examples"],
            tests.as_flattened(),
        );
        Path::new(HOOK).parent().unwrap()
    })
}

/// Returns the compiler of `make test`, if it is what started the tests. Release builds are not compiled with it.
fn linting_rustc() -> Option<OsString> {
    std::env::var_os("LINTING_RUSTC")
}

/// Returns cargo without the variables that it sets for a test. The build script of ring depends on them: cargo would compile ring
/// again, with all crates that use it, and once more in the next build without them.
fn fresh_cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let is_of_package = text.starts_with("CARGO_MANIFEST_") || text.starts_with("CARGO_PKG_");
        if is_of_package || text == "OUT_DIR" {
            cargo.env_remove(&name);
        }
    }
    cargo.current_dir(source(""));
    cargo
}

fn debug_build(command: &[&str], arguments: &[&str]) {
    let target = Path::new(HOOK).ancestors().nth(2).unwrap();
    let mut build = fresh_cargo();
    if let Some(rustc) = linting_rustc() {
        build.env("RUSTC_WORKSPACE_WRAPPER", rustc);
    }
    build
        .args(command)
        .args(["--quiet", "--locked", "--target-dir"])
        .arg(target)
        .args(arguments);
    run(&mut build).ok();
}

fn build(command: &str, program: &str, arguments: &[&str]) -> PathBuf {
    let mut build = fresh_cargo();
    build
        .args([command, "--quiet", "--locked", "--release", "--target-dir"])
        .arg(source("target"))
        .args(arguments);
    run(build.env_remove("RUSTFLAGS").env_remove("CARGO_TARGET_DIR")).ok();
    source("target/release").join(program)
}

/// Returns a copy of this program without symbols.
pub fn stripped(program: &Path) -> PathBuf {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("stripped")
        .join(program.file_name().unwrap());
    std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
    // A new file, because a running program cannot be written to.
    std::fs::remove_file(&copy).ok();
    run(Command::new("strip").arg("-o").arg(&copy).arg(program)).ok();
    copy
}

/// Returns the tarballs of `make dist`, from which all packages are built.
pub fn dist() -> &'static Path {
    static CREATED: OnceLock<PathBuf> = OnceLock::new();
    CREATED.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dist");
        std::fs::remove_dir_all(&dir).ok();
        run(Command::new(source("packaging/dist"))
            .arg(&dir)
            .env("CARGO", env!("CARGO")))
        .ok();
        dir
    })
}

/// Creates a cargo for builds of packages. It accepts only the command line that builds them, checks that the vendored crates of
/// the tree in which it is called are complete (all files that cargo has checksums of), and returns the compiled program; as device
/// plugin and for MPS, those that the other tests run. `packaging/reproducible` compiles all three programs from the same tarballs.
pub fn cargo() -> &'static Path {
    static CARGO: OnceLock<PathBuf> = OnceLock::new();
    CARGO.get_or_init(|| {
        let cargo = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cargo-that-built/cargo");
        let script = format!(
            "#!/bin/sh\n\
             set -eu\n\
             case \"$*\" in\n\
             'tree '* | --version) exec '{real}' \"$@\" ;;\n\
             'build --release --locked --offline -p oci-nvidia-nvml' | \
             'auditable build -j'*' --offline --release --locked -p oci-nvidia-nvml') built='{nvml}' ;;\n\
             'build --release --locked --offline -p oci-nvidia-kubelet-plugin' | \
             'auditable build -j'*' --offline --release --locked -p oci-nvidia-kubelet-plugin') built='{plugin}' ;;\n\
             'rustc --release --locked --offline -p oci-nvidia-mps --bin oci-nvidia-mps -- -C target-feature=+crt-static') built='{mps}' ;;\n\
             'rustc --release --locked --offline --features lean --bin oci-nvidia-hook -- -C target-feature=+crt-static') built='{hook}' ;;\n\
             *) echo \"unexpected: cargo $*\" >&2; exit 1 ;;\n\
             esac\n\
             test -d vendor\n\
             '{real}' fetch --locked --offline\n\
             for crate in vendor/*/; do\n\
               (cd \"$crate\"; tr '{{,}}' '\\n' <.cargo-checksum.json | sed -n 's/^\"\\(.*\\)\":\"[0-9a-f]*\"$/\\1/p' |\n\
                 grep -vx package | xargs -d '\\n' ls -d >/dev/null)\n\
             done\n\
             dir=${{CARGO_TARGET_DIR:-target}}/release\n\
             mkdir -p \"$dir\"\n\
             cp \"$built\" \"$dir\"\n",
            real = env!("CARGO"),
            hook = release().display(),
            plugin = stripped(&programs().join("oci-nvidia-kubelet-plugin")).display(),
            mps = stripped(&programs().join("oci-nvidia-mps")).display(),
            nvml = nvml_release().display()
        );
        write_program(&cargo, script);
        cargo
    })
}

/// Returns a PATH with that cargo first.
pub fn path() -> String {
    format!(
        "{}:{}",
        cargo().parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    )
}
