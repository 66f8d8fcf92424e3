//! Runs the commands of README.md and of the pages for users in docs, in the order of the pages, on a host on which packages are
//! installed to `/usr` and `/etc` and nothing else is configured.
//!
//! The host is this one in a separate mount namespace, with layers over `/usr` and `/etc`. Its driver is the fake one.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::built;
use crate::docs::{command_lines, is_test};
use crate::driver::{FakeDriver, Image};
use crate::rpm::{Packages, query};
use crate::support::{Need, Ran, chmod, read, run, sh, shell, source, write_file};
use crate::zypper::CUDA_IMAGE;

const HOSTS: &[Need] = &[
    Need::Root,
    Need::Programs(&[
        "podman",
        "runc",
        "rpmbuild",
        "cc",
        "useradd",
        "newuidmap",
        "setpriv",
        "systemd-analyze",
    ]),
];

tests! {
    &[Need::Root, Need::Release, Need::Programs(&["podman", "runc", "cc"])] => commands_of_a_tree;
    HOSTS => commands_of_a_host, everyday_tasks;
    &[] => each_command_runs_somewhere;
}

/// The image of the first command after the installation.
const CUDA: &str = "docker.io/nvidia/cuda:12.2.2-base-ubuntu22.04";

/// A container with a name that requests GPUs.
const WEB: &str = "podman container exists web || podman run -d --name web -e NVIDIA_VISIBLE_DEVICES=all opensuse/leap sleep 600";

/// The beginning of commands that are not run here, and the test or the script that runs them, or the reason why none does.
const NOT_HERE: &[(&str, &str)] = &[
    ("apt install ./", "deb::"),
    ("apt remove nvidia", "migration::debian_moves"),
    ("apt ", "repository::apt_installs_upgrades_and_removes"),
    ("buildah ", "tests/engines/recipes"),
    ("container=$(buildah ", "tests/engines/recipes"),
    ("crictl ", "no release of Debian has CRI-O"),
    ("docker run ", "docker::"),
    (
        "git clone ",
        "the project has no public address yet: docs/releasing.md",
    ),
    ("journalctl ", "why::the_journal_has_it"),
    ("make deb", "deb::"),
    ("make rpm", "rpm::"),
    ("mv ", "toolkit::zypper_removes_an_old_toolkit"),
    ("nvidia-ctk ", "nvidia_ctk::the_commands_of_guides"),
    ("nvidia-smi ", "it is in the fake driver, not in PATH"),
    ("podman build ", "tests/engines/recipes"),
    ("podman run --rm --gpus ", "tests/engines/recipes"),
    ("ramalama ", "tests/engines/recipes"),
    ("reboot", "rpm::scripts_take_a_read_only_system"),
    ("rm -f /etc/containers", "cdi_units::the_page_of_the_migr"),
    ("rpm --import ", "repository::"),
    ("systemctl disable ", "cdi_units::the_page_of_the_migr"),
    ("systemctl enable --now oci-nvidia-mps", "mps::"),
    ("systemctl restart docker", "tests/engines/docker"),
    ("wget ", "repository::"),
    ("zypper addrepo ", "repository::"),
    ("zypper install oci", "repository::zypper_installs"),
];

/// A page, a heading at which a new host is created, and whether it has our package.
const HOSTS_OF_PAGES: &[(&str, &str, bool)] = &[
    ("README.md", "openSUSE and SLE", false),
    ("README.md", "Debian and Ubuntu", true),
    ("README.md", "Check and troubleshoot", true),
    ("docs/install.md", "MicroOS, Leap Micro and SL Micro", false),
    ("docs/install.md", "Fedora", false),
    ("docs/install.md", "Without a package", false),
    ("docs/install.md", "Rootless Podman", true),
    ("docs/migration.md", "openSUSE and SLE", false),
    ("docs/migration.md", "Fedora", false),
    ("docs/migration.md", "Debian and Ubuntu", true),
    ("docs/switch-off.md", "For one container", true),
    ("docs/modes.md", "Hook", true),
    ("docs/modes.md", "CDI", true),
    ("docs/recipes.md", "Without root", true),
    ("docs/usage.md", "MIG devices", true),
];

fn pages() -> BTreeSet<&'static str> {
    let pages = HOSTS_OF_PAGES.iter().map(|(page, ..)| *page);
    pages.collect()
}

fn not_here(command: &str) -> Option<&'static str> {
    let mut rows = NOT_HERE.iter();
    let row = rows.find(|(start, _)| command.starts_with(start));
    row.map(|(_, by)| *by)
}

/// Whether a command is for the source tree.
fn is_of_tree(command: &str) -> bool {
    ["make build", "make demo"].contains(&command)
}

/// (heading, commands) of a page, in its order.
fn sections(page: &str) -> Vec<(String, Vec<String>)> {
    let text = read(source(page));
    let mut sections: Vec<(String, String)> = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        in_block ^= line.starts_with("```");
        if line.starts_with('#') && !in_block {
            let heading = line.trim_start_matches(['#', ' ']);
            sections.push((heading.to_owned(), String::new()));
        } else if let Some((_, text)) = sections.last_mut() {
            *text = format!("{text}\n{line}");
        }
    }
    let mut found = Vec::new();
    for (heading, text) in sections {
        let commands = command_lines(&text).into_iter().map(str::to_owned);
        found.push((heading, commands.collect()));
    }
    found
}

/// Each command that is not run here has a row that names what runs it, and each row has a command.
fn each_command_runs_somewhere() {
    let mut used = BTreeSet::new();
    for page in pages() {
        let mut has_host = false;
        for (heading, commands) in sections(page) {
            let is_host = |(of, at, _): &(_, &str, _)| *of == page && *at == heading;
            has_host |= HOSTS_OF_PAGES.iter().any(is_host);
            for command in commands {
                used.extend(not_here(&command));
                let runs = has_host || is_of_tree(&command) || not_here(&command).is_some();
                assert!(runs, "{page}: {command:?} needs a host");
            }
        }
    }
    for (page, heading, _) in HOSTS_OF_PAGES {
        let sections = sections(page);
        assert!(
            sections.iter().any(|(name, _)| name == heading),
            "{page}: {heading}"
        );
    }
    for (start, by) in NOT_HERE {
        let is_reason = by.contains(' ');
        assert!(
            is_reason || is_test(by) || source(by).is_file(),
            "{start}: {by}"
        );
        assert!(used.contains(by), "no page has a command {start:?}");
    }
}

fn commands_of_a_tree() {
    for (command, prints) in [("make build", ""), ("make demo", "| NVIDIA-SMI ")] {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", command])
            .current_dir(source("."))
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("CONTAINERS_CONF");
        let stdout = run(&mut shell).ok();
        assert!(stdout.contains(prints), "{command}: {stdout}");
    }
}

/// The shared parts of the hosts of a page: the driver, an image, and the storage of engines. They are not below the source tree,
/// which may be in a home directory that only root can enter, because a user must have access.
struct Shared {
    dir: tempfile::TempDir,
}

impl Shared {
    fn new(driver: &[&str]) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        chmod(dir.path(), 0o755);
        let shared = Self { dir };
        FakeDriver::shared(); // compiled by now
        let mut make = Command::new(source("tests/fake-driver/make-root"));
        make.arg(shared.path("driver"))
            .arg("--build")
            .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-driver"));
        run(make.args(driver).args(["--dev-group", "video"])).ok();
        Image::new(shared.dir.path(), &["--layout", "debian"]);
        shell!(
            "cd '{}'; tar -C image -cf image.tar .",
            shared.dir.path().display()
        );
        // The directory in which commands run, with the contents of a clone.
        let clone = shared.path("clone");
        std::fs::create_dir(&clone).unwrap();
        for name in ["target", "packaging", "config", "hooks.d"] {
            symlink(source(name), clone.join(name)).unwrap();
        }
        let spec =
            r#"{"root":{"path":"/nowhere"},"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]}}"#;
        write_file(clone.join("config.json"), spec);
        shared
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// A separate host, until this value is dropped. The driver's nodes are also in /dev: an engine of a user mounts the nodes of a CDI spec from
/// the paths that they have in the container.
struct Host<'a> {
    shared: &'a Shared,
    init: Child,
}

impl<'a> Host<'a> {
    fn new(shared: &'a Shared, has_package: bool) -> Self {
        let dir = shared.dir.path().display();
        let script = format!(
            "mount -t tmpfs layers /mnt\n\
             for dir in usr etc; do \
               mkdir /mnt/$dir /mnt/$dir.work; \
               mount -t overlay -o \"lowerdir=/$dir,upperdir=/mnt/$dir,workdir=/mnt/$dir.work\" overlay /$dir; \
             done\n\
             mount -t tmpfs -o mode=755 run /run; mkdir -p /run/lock\n\
             mkdir /mnt/dev; mount --rbind /dev /mnt/dev; mount -t tmpfs -o mode=755,dev dev /dev\n\
             cp --archive --no-target-directory '{dir}/driver/dev' /dev; cd /mnt/dev\n\
             find . -maxdepth 1 -not -type d -exec cp --archive {{}} /dev/ ';'\n\
             for dir in pts shm; do mkdir -p /dev/$dir; mount --bind /mnt/dev/$dir /dev/$dir; done\n\
             mkdir -p /etc/nvidia-container-runtime/config.toml.d /etc/containers/containers.conf.d\n\
             printf '[nvidia-container-cli]\\nroot = \"{dir}/driver\"\\n' >/etc/nvidia-container-runtime/config.toml.d/root.toml\n\
             printf '[storage]\\ndriver = \"vfs\"\\nrunroot = \"/run/storage\"\\ngraphroot = \"{dir}/storage\"\\n' >/etc/containers/storage.conf\n\
             cat >/etc/containers/containers.conf.d/10-test.conf <<END\n\
             [containers]\n\
             default_ulimits = [\"nofile=20000:20000\", \"nproc=30000:30000\"]\n\
             netns = \"none\"\n\
             log_driver = \"k8s-file\"\n\
             [engine]\n\
             cgroup_manager = \"cgroupfs\"\n\
             runtime = \"runc\"\n\
             events_logger = \"none\"\n\
             [network]\n\
             network_config_dir = \"{dir}/networks\"\n\
             END\n\
             useradd --uid 54321 --home-dir '{dir}/home' tux\n\
             echo ready; exec sleep 3600"
        );
        let mut init = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-euc", &script])
            .env_remove("CONTAINERS_CONF")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(init.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let host = Self { shared, init };
        assert_eq!(line, "ready\n");
        if !shared.path("storage").exists() {
            host.root(&format!(
                "podman import '{dir}/image.tar' localhost/opensuse/leap"
            ))
            .ok();
            // The CUDA image, for podman: an image that exists locally is not pulled.
            host.root(&format!(
                "podman import {CUDA_IMAGE} '{dir}/image.tar' {CUDA}"
            ))
            .ok();
        }
        if has_package {
            host.install(named_by("oci-nvidia-hook-[0-9]*.rpm"));
        }
        host
    }

    fn enter(&self) -> Command {
        let mut enter = Command::new("nsenter");
        let clone = self.shared.path("clone");
        enter.args([
            "-m",
            "-t",
            &self.init.id().to_string(),
            &format!("--wd={}", clone.display()),
        ]);
        enter
            .env_remove("CONTAINERS_CONF")
            .env("SYSTEMD_OFFLINE", "1");
        enter
    }

    /// Runs a command line in the clone, as root.
    fn root(&self, command: &str) -> Ran {
        run(self.enter().args(["sh", "-c", command]))
    }

    /// Runs a command line as tux after a login; the user's podman has its own storage.
    fn tux(&self, command: &str) -> Ran {
        let home = self.shared.path("home").display().to_string();
        let script = format!(
            "install -d -o tux -m 700 '{home}' '{home}/run'; \
             exec setpriv --reuid tux --regid tux --init-groups env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME='{home}' \
             XDG_RUNTIME_DIR='{home}/run' sh -c \"$1\""
        );
        run(self.enter().args(["sh", "-euc", &script, "sh", command]))
    }

    /// Installs a package. The packages of this machine are not in rpm's database. Scripts run.
    fn install(&self, package: &Path) {
        let mut rpm = self.enter();
        rpm.args(["rpm", "-i", "--nodeps", "--dbpath", "/run/rpm"])
            .arg(package);
        let ran = run(&mut rpm);
        let is_installed = ran.code == Some(0) && !ran.stderr.contains("scriptlet");
        assert!(is_installed, "{ran:?}");
        // No systemd runs here that starts the unit. units:: has one.
        self.root("oci-nvidia-hook cdi refresh --create").ok();
    }

    fn run(&self, page: &str, command: &str) {
        let words: Vec<_> = command.split(' ').collect();
        if ["dnf", "transactional-update", "zypper"].contains(&words[0]) {
            self.install(named_by(command));
            return;
        }
        if command.contains(" web") || command.contains("hook ps") {
            self.root(WEB).ok();
        }
        let ran = if command.contains("keep-groups") {
            self.log_in();
            self.tux(command)
        } else {
            self.root(command)
        };
        // doctor judges this machine.
        let codes = if command.contains("hook doctor") {
            &[0, 1, 3][..]
        } else {
            &[0]
        };
        let prints = match words[..] {
            [.., "nvidia-smi"] => "| NVIDIA-SMI ",
            [.., "nvidia-smi", "-L"] => "(UUID: ",
            ["oci-nvidia-hook", "explain", ..] => "ONH-030",
            ["oci-nvidia-hook", "plan", ..] => "the hook would set up the container",
            ["oci-nvidia-hook", "why"] => "no container failed in the last hour",
            ["oci-nvidia-hook", "ps" | "why", ..] => "web",
            _ => "",
        };
        let is_fine =
            ran.code.is_some_and(|code| codes.contains(&code)) && ran.stdout.contains(prints);
        assert!(is_fine, "{page}: {command}: {ran:?}");
        let has_gpu = command.contains("=void") && ran.stdout.contains("nvidia");
        assert!(!has_gpu, "{page}: {command}: {ran:?}");
    }

    /// Prepares Podman of tux. The files that a user has in these directories by default were moved there.
    fn log_in(&self) {
        let tar = self.shared.path("image.tar").display().to_string();
        self.tux(&format!(
            "cd ~; mkdir -p .config/containers; printf '[storage]\\ndriver = \"vfs\"\\n' >.config/containers/storage.conf; \
             printf '[network]\\nnetwork_config_dir = \"%s/networks\"\\n' ~ >.config/containers/containers.conf; \
             podman import '{tar}' localhost/opensuse/leap"
        ))
        .ok();
    }
}

impl Drop for Host<'_> {
    fn drop(&mut self) {
        self.root("podman rm --all --force --time 0");
        // The process that keeps the user namespace of tux
        let find = format!(
            "find '{}/run' -name pause.pid -exec cat {{}} ';'",
            self.shared.path("home").display()
        );
        for pid in self.root(&find).stdout.lines() {
            self.root(&format!("kill {pid}"));
        }
        self.init.kill().ok();
        self.init.wait().ok();
    }
}

/// Returns the one package that the pattern at the end of a command line matches at the path of `make rpm`.
fn named_by(command: &str) -> &'static Path {
    let pattern = command.rsplit('/').next().unwrap();
    let all = Packages::shared();
    let mut found = Vec::new();
    for package in all.now.iter().chain(&all.later) {
        let name = package.file_name().unwrap().display();
        let script = format!("case '{name}' in {pattern}) ;; *) exit 1 ;; esac");
        if sh(&script).code == Some(0) {
            found.push(package);
        }
    }
    // A later release has the same name.
    let mut names: Vec<_> = found.iter().map(|of| query(of, "%{NAME}")).collect();
    names.dedup();
    assert_eq!(names.len(), 1, "{command}: {found:?}");
    found[0]
}

fn commands_of_a_host() {
    // For the commands that install without a package.
    built::release();
    for page in pages() {
        let gpus = if page == "docs/usage.md" {
            &["--gpus", "2", "--mig"][..]
        } else {
            &["--gpus", "2"]
        };
        let shared = Shared::new(gpus);
        let mut host = None;
        for (heading, commands) in sections(page) {
            let mut rows = HOSTS_OF_PAGES.iter();
            if let Some((.., has_package)) = rows.find(|(of, at, _)| *of == page && *at == heading)
            {
                drop(host.take());
                host = Some(Host::new(&shared, *has_package));
            }
            for command in commands {
                if not_here(&command).is_none() && !is_of_tree(&command) {
                    host.as_ref().unwrap().run(page, &command);
                }
            }
        }
    }
}

/// Each task of the index in docs has a command that answers it, which runs here, or a page; `files_and_links_are_there` checks pages.
fn everyday_tasks() {
    let page = "docs/README.md";
    let text = read(source(page));
    let (_, table) = text
        .split_once("| task | command or page |\n|---|---|\n")
        .unwrap();
    let shared = Shared::new(&["--gpus", "2"]);
    let host = Host::new(&shared, true);
    host.root(WEB).ok();
    let mut commands = 0;
    for row in table.lines().take_while(|row| row.starts_with('|')) {
        let answer = row.split(" | ").nth(1).unwrap();
        // Other rows are links to pages.
        if answer.starts_with('`') {
            host.run(page, answer.split('`').nth(1).unwrap());
            commands += 1;
        }
    }
    assert!(commands >= 15, "{commands}");
}
