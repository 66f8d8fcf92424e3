//! The packages of `make rpm`: how an engine uses the installed files, and what is installed and removed. rpmbuild reports files
//! that no package lists and files that a package lacks, and rpmlint the rest.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::driver::Image;
use crate::support::{
    Need, Ran, assert_lacks, assert_says, read, run, scratch, shell, source, unshare, write_file,
    write_program,
};
use crate::{built, docs, old_packages};

// As root, although only the installations need it: tests/as-plain-user does not have Rust and cannot build.
const LINT: &[Need] = &[Need::Root, Need::Programs(&["rpmbuild", "cc", "rpmlint"])];
const BUILD: &[Need] = &[Need::Root, Need::Programs(&["rpmbuild", "cc", "strip"])];

tests! {
    &[] => the_spec_has_the_version_of_the_program;
    &[Need::Program("rpmspec")] => each_distribution_has_a_branch;
    BUILD => tarballs_are_the_same_each_time, the_program_is_there_before_its_hook_file, links_of_installed_pages_lead_somewhere,
        upgrade_downgrade_remove, an_existing_config_stays, scripts_take_a_read_only_system,
        an_upgrade_removes_the_package_for_podman;
    LINT => rpmlint_finds_no_error;
}

pub const CONFIG: &str = "etc/nvidia-container-runtime/config.toml";
const DEFAULTS: &str = "usr/share/oci-nvidia-hook/config.toml";
const HOOK_FILE: &str = "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json";
const MAIN: &str = "oci-nvidia-hook";
/// Fast compression: nothing depends on the size of the packages.
pub const FAST: [&str; 4] = [
    "--define",
    "_binary_payload w1.gzdio",
    "--define",
    "_source_payload w0.gzdio",
];

/// The packages of this tree, and the packages of a later release with other files.
pub struct Packages {
    pub now: Vec<PathBuf>,
    pub later: Vec<PathBuf>,
}

impl Packages {
    /// The packages, built once, without network access, like `make rpm`, from a program that is already compiled.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Packages> = OnceLock::new();
        SHARED.get_or_init(|| {
            let top = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rpm");
            let mut build = Command::new(source("packaging/build-rpm"));
            build.arg(&top).args(FAST).env("TARBALLS", built::dist());
            run(build.env("CARGO", built::cargo())).ok();
            let now = top.join("now");
            std::fs::remove_dir_all(&now).ok();
            std::fs::rename(top.join("RPMS"), &now).unwrap();
            Self {
                now: below(&now),
                later: Self::build_later(&top),
            }
        })
    }

    /// Built from the same compiled program: with one more line in the file of defaults and a longer timeout in the hook file.
    fn build_later(top: &Path) -> Vec<PathBuf> {
        let tree = build_dir(top);
        let append = |path: &Path, from: &str, to: &str| {
            let old = read(path);
            assert!(old.contains(from));
            write_file(path, old.replace(from, to));
        };
        append(
            &tree.join("config/config.toml"),
            "[devices]",
            "# A later default\n[devices]",
        );
        append(
            &tree.join("hooks.d/oci-nvidia-hook.json"),
            "\"timeout\": 60",
            "\"timeout\": 61",
        );
        let mut build = Command::new("rpmbuild");
        build
            .args(["-bb", "--quiet", "--nodeps", "--noprep", "--noclean"])
            .args(["--without", "check"])
            .args(FAST);
        build
            .arg("--define")
            .arg(format!("_sourcedir {}", built::dist().display()));
        build
            .arg("--define")
            .arg(format!("_topdir {}", top.display()))
            .args(["--define", "baserelease 7"]);
        build
            .env("CARGO_TARGET_DIR", top.join("cargo"))
            .env("CARGO_HOME", top.join("cargo-home"));
        build.env("PATH", built::path());
        run(build.arg(top.join("SPECS/oci-nvidia-hook.spec"))).ok();
        below(&top.join("RPMS"))
    }
}

/// Returns the directory of the unpacked sources. rpm 4.20 creates a directory around it.
pub fn build_dir(top: &Path) -> PathBuf {
    let name = format!("{MAIN}-{}", env!("CARGO_PKG_VERSION"));
    let (around, build) = (
        top.join("BUILD").join(format!("{name}-build")),
        top.join("BUILD"),
    );
    if around.is_dir() {
        around.join(name)
    } else {
        build.join(name)
    }
}

/// Returns all packages below this directory.
fn below(dir: &Path) -> Vec<PathBuf> {
    let text = shell!("find '{}' -name '*.rpm' | sort", dir.display());
    text.lines().map(PathBuf::from).collect()
}

pub fn query(package: &Path, format: &str) -> String {
    run(Command::new("rpm")
        .args(["-qp", "--qf", format])
        .arg(package))
    .ok()
}

pub fn find<'a>(packages: &'a [PathBuf], name: &str) -> &'a Path {
    packages
        .iter()
        .find(|package| query(package, "%{NAME}") == name)
        .unwrap()
}

/// The last entry of the changelog describes this version.
fn the_spec_has_the_version_of_the_program() {
    let spec = read(source("packaging/rpm.spec"));
    let mut tags = spec
        .lines()
        .filter_map(|line| line.strip_prefix("Version:"));
    assert_eq!(tags.next().unwrap().trim(), env!("CARGO_PKG_VERSION"));
    let entry = spec.lines().find(|line| line.starts_with("* ")).unwrap();
    let end = concat!(" - ", env!("CARGO_PKG_VERSION"), "-0");
    assert!(entry.ends_with(end), "{entry}");
}

/// The branches of the spec that are not built here. rpmspec names an invalid one.
fn each_distribution_has_a_branch() {
    for distribution in ["suse_version 1600", "fedora 43"] {
        let mut rpmspec = Command::new("rpmspec");
        rpmspec.args(["-P", "--define", distribution]);
        // A macro of Fedora's systemd, which Debian lacks.
        rpmspec.args(["--define", "systemd_post true"]);
        let spec = run(rpmspec.arg(source("packaging/rpm.spec"))).ok();
        // Both distributions have macros for presets.
        assert!(!spec.contains("systemctl preset"), "{distribution}: {spec}");
    }
}

fn tarballs_are_the_same_each_time() {
    let (one, two) = (built::dist().display(), scratch());
    let again = format!(
        "umask 077; '{}' '{}'",
        source("packaging/dist").display(),
        two.path().display()
    );
    run(Command::new("sh")
        .args(["-euc", &again])
        .env("CARGO", env!("CARGO")))
    .ok();
    shell!("diff -r '{one}' '{}'", two.path().display());
    let sources = format!("{one}/{MAIN}-{}.tar.gz", env!("CARGO_PKG_VERSION"));
    for (tarball, what) in [
        (sources.as_str(), "src/main.rs"),
        (&format!("{one}/vendor.tar.gz"), "vendor"),
    ] {
        let list = shell!("tar -tvzf '{tarball}'");
        assert!(list.contains(what), "{list}");
        let others: Vec<_> = list
            .lines()
            .filter(|line| !line.contains(" 0/0 "))
            .collect();
        assert!(others.is_empty(), "{others:?}");
    }
}

/// rpm installs files in their order and removes them in the reverse order. An engine that finds a hook file without its program
/// starts containers without GPUs, and prints nothing.
fn the_program_is_there_before_its_hook_file() {
    let main = find(&Packages::shared().now, MAIN);
    let files = query(main, "[%{FILENAMES}\n]");
    let at = |path: &str| files.lines().position(|line| line == path);
    let program = at("/usr/bin/oci-nvidia-hook");
    let hook_file = at(&format!("/{HOOK_FILE}"));
    assert!(program.is_some() && program < hook_file, "{files}");
    // The driver can be installed later, and no package of NVIDIA is needed.
    let requires = run(Command::new("rpm").args(["-qp", "--requires"]).arg(main)).ok();
    for name in ["nvidia", "libnvidia", "libcuda"] {
        assert!(!format!("\n{requires}").contains(&format!("\n{name}")));
    }
}

fn links_of_installed_pages_lead_somewhere() {
    let dir = scratch();
    rpm(
        dir.path(),
        &["-i", "--noscripts"],
        &[find(&Packages::shared().now, MAIN)],
    )
    .ok();
    let found = shell!(
        "find '{}/usr/share/doc' -maxdepth 2 -name README.md",
        dir.path().display()
    );
    docs::follow_links(Path::new(found.trim()).parent().unwrap());
}

fn rpmlint_finds_no_error() {
    let mut lint = Command::new("rpmlint");
    lint.arg("-c")
        .arg(source("packaging/rpmlint.toml"))
        .args(&Packages::shared().now)
        .arg(source("packaging/obs/oci-nvidia-hook.spec"));
    let text = run(lint.arg(source("packaging/rpm.spec"))).ok();
    assert_says(&text, &["2 specfiles checked", " 0 errors"]);
}

/// A small system with a shell, and a systemd that fails at everything.
struct System {
    dir: tempfile::TempDir,
}

impl System {
    fn new() -> Self {
        let dir = scratch();
        let system = Self { dir };
        Image::new(system.dir.path(), &[]);
        let root = system.root();
        std::fs::create_dir_all(root.join("run/systemd/system")).unwrap();
        std::fs::create_dir_all(root.join("var/log")).unwrap();
        let systemctl = root.join("usr/bin/systemctl");
        write_program(
            &systemctl,
            "#!/bin/sh\necho \"$*\" >>/var/log/systemctl; exit 1\n",
        );
        system
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Runs `rpm ARGUMENTS` in the root; scripts run, and none may fail.
    #[track_caller]
    fn rpm(&self, arguments: &[&str], packages: &[&Path]) {
        let ran = rpm(&self.root(), arguments, packages);
        assert_lacks(&ran.stderr, &["scriptlet", "error"]);
        ran.ok();
    }

    fn read(&self, path: &str) -> String {
        read(self.root().join(path))
    }

    /// Returns everything that is not a directory, except for rpm's database, the log of systemctl, and /dev, which is not
    /// mounted.
    fn files(&self) -> Vec<String> {
        let find = "find . -path ./var/lib/rpm -prune -o -path ./var/log -prune -o -path ./dev -prune -o ! -type d -print | sort";
        let text = shell!("cd '{}'; {find}", self.root().display());
        text.lines()
            .map(|line| line.trim_start_matches("./").to_owned())
            .collect()
    }
}

/// Installs into a separate root, whose database contains no package of the machine, hence --nodeps.
fn rpm(root: &Path, arguments: &[&str], packages: &[&Path]) -> Ran {
    let mut rpm = Command::new("rpm");
    rpm.arg("--root")
        .arg(root)
        .args(["--dbpath", "/var/lib/rpm", "--nodeps"]);
    run(rpm.args(arguments).args(packages))
}

fn upgrade_downgrade_remove() {
    let (now, later) = (
        find(&Packages::shared().now, MAIN),
        find(&Packages::shared().later, MAIN),
    );
    let system = System::new();
    let before = system.files();
    let left = |system: &System| {
        let files = system.files();
        files
            .into_iter()
            .filter(|file| !before.contains(file))
            .collect::<Vec<_>>()
    };

    system.rpm(&["-i"], &[now]);
    assert!(system.read(HOOK_FILE).contains("\"timeout\": 60"));
    // Without a file of the administrator, the defaults apply.
    assert!(
        !system.root().join(CONFIG).exists() && !system.read(DEFAULTS).contains("A later default")
    );
    system.rpm(&["-U"], &[later]);
    assert!(system.read(HOOK_FILE).contains("\"timeout\": 61"));
    assert!(system.read(DEFAULTS).contains("A later default"));
    system.rpm(&["-U", "--oldpackage"], &[now]);
    assert!(system.read(HOOK_FILE).contains("\"timeout\": 60"));
    assert!(!system.read(DEFAULTS).contains("A later default"));
    // The files that the program wrote are removed too: its data and its own CDI spec, but no other spec.
    std::fs::create_dir_all(system.root().join("run/oci-nvidia-hook/containers")).unwrap();
    write_file(
        system.root().join("run/oci-nvidia-hook/containers/c.json"),
        "{}",
    );
    let cdi = system.root().join("run/cdi");
    std::fs::create_dir_all(&cdi).unwrap();
    write_file(cdi.join("nvidia.yaml"), "path: /usr/bin/oci-nvidia-hook\n");
    write_file(cdi.join("other.yaml"), "path: /usr/bin/nvidia-ctk\n");
    system.rpm(&["-e"], &[Path::new(MAIN)]);
    assert_eq!(left(&system), ["run/cdi/other.yaml"]);
    assert!(!system.root().join(CONFIG).parent().unwrap().exists());
    assert!(!system.root().join(HOOK_FILE).parent().unwrap().exists());

    // The administrator's settings remain after all of this, under their names.
    system.rpm(&["-i"], &[now]);
    let (config, mine) = (system.root().join(CONFIG), "disable-require = true\n");
    write_file(&config, mine);
    write_file(config.with_file_name("config.toml.d").join("mine.toml"), "");
    system.rpm(&["-U"], &[later]);
    system.rpm(&["-U", "--oldpackage"], &[now]);
    write_file(cdi.join("nvidia.yaml"), "path: /usr/bin/nvidia-ctk\n");
    system.rpm(&["-e"], &[Path::new(MAIN)]);
    let expected = [
        CONFIG,
        &format!("{CONFIG}.d/mine.toml"),
        "run/cdi/nvidia.yaml",
        "run/cdi/other.yaml",
    ];
    assert_eq!(left(&system), expected);
    assert_eq!(system.read(CONFIG), mine);
    // The presets apply to the first installation only, and the units are disabled when the package is removed, and only then.
    let log = system.read("var/log/systemctl");
    for verb in ["preset", "disable"] {
        assert_eq!(
            log.matches(&format!("{verb} oci-nvidia-hook-cdi.service"))
                .count(),
            2,
            "{log}"
        );
    }
}

/// The package with the hook file of the stage precreate, which the hook no longer has.
fn an_upgrade_removes_the_package_for_podman() {
    let (system, dir) = (System::new(), scratch());
    let [main, for_podman] = old_packages::rpms(dir.path(), env!("CARGO_PKG_VERSION"));
    let later = find(&Packages::shared().later, MAIN);
    let before = system.files();
    let exists = || old_packages::LEFT.map(|path| system.root().join(path).exists());
    let installed = || {
        let mut query = Command::new("rpm");
        query.arg("--root").arg(system.root());
        run(query.args(["--dbpath", "/var/lib/rpm", "-qa", "--qf", "%{NAME}\n"])).ok()
    };
    for edited in [false, true] {
        system.rpm(&["-i"], &[&main, &for_podman]);
        assert_eq!(exists(), [true; 3]);
        let drop_in = system.root().join(old_packages::LEFT[0]);
        if edited {
            write_file(&drop_in, "# mine\n");
        }
        system.rpm(&["-U"], &[later]);
        assert_eq!(installed(), format!("{MAIN}\n"));
        assert_eq!(exists(), [edited, false, false]);
        if edited {
            std::fs::remove_file(&drop_in).unwrap();
        }
        system.rpm(&["-e"], &[Path::new(MAIN)]);
        assert_eq!(system.files(), before);
    }
}

/// NVIDIA's toolkit creates the file during installation; no package owns it.
fn an_existing_config_stays() {
    let system = System::new();
    let nvidias = std::fs::read(source("tests/fixtures/config/nvidia-ctk.toml")).unwrap();
    let config = system.root().join(CONFIG);
    write_file(&config, &nvidias);
    let main = Path::new(MAIN);
    let (now, later) = (
        find(&Packages::shared().now, MAIN),
        find(&Packages::shared().later, MAIN),
    );
    for (arguments, package) in [(&["-i"], now), (&["-U"], later), (&["-e"], main)] {
        system.rpm(arguments, &[package]);
        assert_eq!(std::fs::read(&config).unwrap(), nvidias, "{arguments:?}");
        let others = system
            .files()
            .into_iter()
            .filter(|file| file.starts_with(CONFIG) && file != CONFIG);
        assert_eq!(others.collect::<Vec<_>>(), [""; 0], "{arguments:?}");
    }
}

/// A system with transactional updates: only /etc and /var can be written, with and without a running systemd.
fn scripts_take_a_read_only_system() {
    let system = System::new();
    let package = find(&Packages::shared().now, MAIN);
    rpm(&system.root(), &["-i", "--noscripts"], &[package]).ok();
    let without_systemd = System::new();
    std::fs::remove_file(without_systemd.root().join("usr/bin/systemctl")).unwrap();
    let mut seen = 0;
    for root in [system.root(), without_systemd.root()] {
        for (tag, times) in [
            ("POSTIN", ["1", "2"]),
            ("PREUN", ["0", "1"]),
            ("POSTUN", ["0", "1"]),
        ] {
            let script = query(package, &format!("%{{{tag}}}"));
            assert_ne!(script, "(none)", "{tag}");
            let enter = "mount --bind \"$1\" \"$1\"; mount --bind /dev \"$1/dev\"; mount -o remount,ro,bind \"$1\"; \
                         for dir in etc var; do mount --bind \"$1/$dir\" \"$1/$dir\"; mount -o remount,rw,bind \"$1/$dir\"; done; \
                         ! touch \"$1/usr/x\" 2>/dev/null; touch \"$1/var/x\"; exec chroot \"$1\" /bin/sh -e -c \"$2\" sh \"$3\"";
            for time in times {
                let mut unshare = unshare(enter);
                unshare.arg(&root).args([&script, time]);
                let ran = run(&mut unshare);
                assert!(
                    ran.code == Some(0) && ran.stderr.is_empty() && ran.stdout.is_empty(),
                    "{tag} {time}: {ran:?}"
                );
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 12);
}
