//! The program as packages contain it. It is compiled once, in `target/release`, where `make build` and `make demo` also compile
//! it: with link-time optimization, compiling takes minutes, and the tests of sizes, documents and packages all need the program.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support::{HOOK, run, source};

/// Returns the program that `make build` builds.
pub fn release() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("oci-nvidia-hook", &["--features", "lean"]))
}

/// Returns the device plugin, built in the same way.
pub fn plugin() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("oci-nvidia-kubelet-plugin", &["--package", "oci-nvidia-kubelet-plugin"]))
}

/// The options that make the program of -compat static.
const STATIC: &[&str] = &["--package", "oci-nvidia-hook-compat", "--", "-C", "target-feature=+crt-static"];

/// Returns the program of the package -compat, static like there, built with the profile of the hook under test. It is in the directory
/// of that hook, which it starts.
pub fn compat() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let programs = Path::new(HOOK).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["rustc", "--quiet", "--locked", "--target-dir"]).arg(programs.parent().unwrap()).args(STATIC);
        run(build.current_dir(source("")).env_remove("RUSTFLAGS")).ok();
        programs.join("oci-nvidia-hook-compat")
    })
}

/// Returns the same program as packages contain it.
pub fn compat_release() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build_with("rustc", "oci-nvidia-hook-compat", STATIC))
}

/// Returns the directory with this build of the hook, the device plugin and its tools for tests.
pub fn programs() -> &'static Path {
    static BUILT: OnceLock<&Path> = OnceLock::new();
    BUILT.get_or_init(|| {
        let programs = Path::new(HOOK).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "--package", "oci-nvidia-kubelet-plugin", "--bins", "--examples"]);
        run(build.arg("--target-dir").arg(programs.parent().unwrap()).current_dir(source(""))).ok();
        programs
    })
}

fn build(program: &str, arguments: &[&str]) -> PathBuf {
    build_with("build", program, arguments)
}

fn build_with(command: &str, program: &str, arguments: &[&str]) -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args([command, "--quiet", "--locked", "--release", "--target-dir"]).arg(source("target")).args(arguments);
    run(build.current_dir(source("")).env_remove("RUSTFLAGS").env_remove("CARGO_TARGET_DIR")).ok();
    source("target/release").join(program)
}

/// Returns the same program without symbols.
pub fn stripped() -> &'static Path {
    static STRIPPED: OnceLock<PathBuf> = OnceLock::new();
    STRIPPED.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stripped/oci-nvidia-hook");
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        // A new file, because a running program cannot be written to.
        std::fs::remove_file(&program).ok();
        run(Command::new("strip").arg("-o").arg(&program).arg(release())).ok();
        program
    })
}

/// Creates a cargo for builds of packages. It accepts only the command line that builds them, checks that the vendored crates of
/// the tree in which it is called are complete (all files that cargo has checksums of), and returns the compiled program. The
/// builds of `zypper.rs` and `packaging/reproducible` compile from the same tarballs.
pub fn cargo() -> &'static Path {
    static CARGO: OnceLock<PathBuf> = OnceLock::new();
    CARGO.get_or_init(|| {
        let cargo = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cargo-that-built/cargo");
        let script = format!(
            "#!/bin/sh\n\
             set -eu\n\
             case \"$*\" in\n\
             vendor\\ * | metadata\\ *) exec '{real}' \"$@\" ;;\n\
             'build --release --locked --offline --features lean') built='{hook}' ;;\n\
             'build --release --locked --offline -p oci-nvidia-kubelet-plugin') built='{plugin}' ;;\n\
             'rustc --release --locked --offline -p oci-nvidia-hook-compat -- -C target-feature=+crt-static') built='{compat}' ;;\n\
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
            plugin = plugin().display(),
            compat = compat_release().display()
        );
        std::fs::create_dir_all(cargo.parent().unwrap()).unwrap();
        std::fs::write(&cargo, script).unwrap();
        std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).unwrap();
        cargo
    })
}

/// Returns a PATH with that cargo first.
pub fn path() -> String {
    format!("{}:{}", cargo().parent().unwrap().display(), std::env::var("PATH").unwrap())
}
