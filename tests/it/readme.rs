//! Runs every command of README.md and of the pages for users in docs, in the order of the pages, on a host
//! on which packages are installed to `/usr` and `/etc` and nothing else is configured. A command without a row is an error.
//!
//! The host is this one in a separate mount namespace, with layers over `/usr` and `/etc`. Its driver is the fake one.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::built;
use crate::docs::{command_lines, is_test};
use crate::driver::{FakeDriver, Image};
use crate::rpm::{Packages, query};
use crate::support::{Need, Ran, run, scratch, sh, source};
use crate::zypper::CUDA_IMAGE;

const TREE: &[Need] = &[
    Need::Root,
    Need::Release,
    Need::Program("podman"),
    Need::Program("runc"),
    Need::Program("cc"),
];
const HOSTS: &[Need] = &[
    Need::Root,
    Need::Program("podman"),
    Need::Program("runc"),
    Need::Program("rpmbuild"),
    Need::Program("cc"),
    Need::Program("useradd"),
    Need::Program("newuidmap"),
    Need::Program("setpriv"),
    Need::Program("systemd-analyze"),
];

tests! {
    TREE => commands_of_a_tree;
    HOSTS => commands_of_a_host, everyday_tasks;
    &[] => every_command_is_known, help_of_the_demo;
}

/// The demo reads its options before it installs or builds anything: `cat` is the only program that it finds.
fn help_of_the_demo() {
    let programs = scratch();
    symlink("/bin/cat", programs.path().join("cat")).unwrap();
    let demo = |option: &str| {
        let mut demo = Command::new(source("tests/demo"));
        run(demo.arg(option).env_clear().env("PATH", programs.path()))
    };
    for option in ["--help", "-h"] {
        let help = demo(option).ok();
        assert!(
            help.starts_with("Usage: make demo ") && help.contains("tests/demo [--help]\n"),
            "{help}"
        );
    }
    let stderr = demo("--halp").failed(2);
    assert_eq!(
        stderr,
        "demo: unknown option \"--halp\"; hint: tests/demo --help\n"
    );
}

/// How a command is tested.
#[derive(Clone, Copy)]
enum Way {
    /// Run verbatim, as root; it succeeds and prints this
    Root(&'static str),
    /// Run verbatim, as root; it lists the nodes of a container, which has no GPU
    NoGpu,
    /// Run verbatim; it prints this and exits with one of these codes, because it judges the host
    Judges(&'static str, &'static [i32]),
    /// Run verbatim, as the user tux
    Tux(&'static str),
    /// Run verbatim, in the source tree, without a separate host
    Tree(&'static str),
    /// For a package manager that is not installed here: rpm installs the package that its last word names
    Packages,
    /// Not run here, except for this check
    NotHere(fn(&str)),
    /// Another test runs it: `module::test`, or a script below `tests`
    By(&'static str),
    /// No test runs it, for this reason
    Never(&'static str),
}

use Way::{By, Judges, Never, NoGpu, NotHere, Packages as Install, Root, Tree, Tux};

/// The image of the first command after the installation.
const CUDA: &str = "docker.io/nvidia/cuda:12.2.2-base-ubuntu22.04";

/// A container with a name that requests GPUs.
const WEB: &str = "podman container exists web || podman run -d --name web -e NVIDIA_VISIBLE_DEVICES=all opensuse/leap sleep 600";

const COMMANDS: &[(&str, Way)] = &[
    ("make demo", Tree("| NVIDIA-SMI ")),
    ("make test", NotHere(is_what_runs_this)),
    ("make rpm", NotHere(is_the_script_of_the_rpm_tests)),
    ("make build", Tree("")),
    (
        "zypper install --allow-unsigned-rpm ./target/rpm/RPMS/*/oci-nvidia-hook-[0-9]*.rpm",
        Install,
    ),
    (
        "zypper install --allow-unsigned-rpm ./target/rpm/RPMS/*/oci-nvidia-hook-podman-[0-9]*.rpm",
        Install,
    ),
    (
        "zypper install --allow-unsigned-rpm ./target/rpm/RPMS/*/oci-nvidia-hook-compat-[0-9]*.rpm",
        Install,
    ),
    (
        "transactional-update pkg install --allow-unsigned-rpm ./oci-nvidia-hook-[0-9]*.rpm",
        Install,
    ),
    (
        "dnf install ./target/rpm/RPMS/*/oci-nvidia-hook-[0-9]*.rpm",
        Install,
    ),
    ("make deb", NotHere(is_the_script_of_the_deb_tests)),
    (
        "apt install ./target/deb/oci-nvidia-hook_*.deb",
        NotHere(is_one_package),
    ), // deb::podman_uses_the_installed_files
    (
        "reboot",
        Never("rpm::scripts_take_a_read_only_system checks its purpose"),
    ),
    (
        "install -D target/release/oci-nvidia-hook /usr/bin/oci-nvidia-hook",
        Root(""),
    ),
    (
        "install -D -m 644 config/config.toml /usr/share/oci-nvidia-hook/config.toml",
        Root(""),
    ),
    (
        "install -D -m 644 hooks.d/oci-nvidia-hook.json /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
        Root(""),
    ),
    (
        "rm /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
        Root(""),
    ),
    (
        "rm /usr/bin/oci-nvidia-hook /usr/share/oci-nvidia-hook/config.toml",
        Root(""),
    ),
    (
        "podman run --rm docker.io/nvidia/cuda:12.2.2-base-ubuntu22.04 nvidia-smi",
        Root("| NVIDIA-SMI "),
    ),
    (
        "podman run --rm -e NVIDIA_VISIBLE_DEVICES=all opensuse/leap nvidia-smi",
        Root("| NVIDIA-SMI "),
    ),
    (
        "podman run --rm -e NVIDIA_VISIBLE_DEVICES=void docker.io/nvidia/cuda:12.2.2-base-ubuntu22.04 ls /dev",
        NoGpu,
    ),
    ("usermod -aG video tux", Root("")),
    (
        "podman run --rm --group-add keep-groups -e NVIDIA_VISIBLE_DEVICES=all opensuse/leap nvidia-smi",
        Tux("| NVIDIA-SMI "),
    ),
    (
        "docker run --rm --gpus all opensuse/leap nvidia-smi",
        NotHere(docker_finds_the_program),
    ),
    (
        "nvidia-ctk runtime configure --runtime=docker",
        By("nvidia_ctk::the_commands_of_guides"),
    ),
    (
        "systemctl restart docker",
        Never("tests/engines/docker starts the daemon without systemd"),
    ),
    (
        "docker run --rm --runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all opensuse/leap nvidia-smi",
        NotHere(docker_finds_the_program),
    ),
    ("oci-nvidia-hook cdi generate", Root("")),
    ("oci-nvidia-hook cdi list", Root("nvidia.com/gpu=all")),
    ("oci-nvidia-hook cdi check", Root("")),
    (
        "podman run --rm --device nvidia.com/gpu=all opensuse/leap nvidia-smi",
        Root("| NVIDIA-SMI "),
    ),
    (
        "podman run --rm --device nvidia.com/gpu=0 opensuse/leap nvidia-smi -L",
        Root("GPU 0: "),
    ),
    (
        "podman run --rm --user 1000 -e NVIDIA_VISIBLE_DEVICES=all opensuse/leap nvidia-smi",
        Root("| NVIDIA-SMI "),
    ),
    (
        "podman run --rm -e NVIDIA_VISIBLE_DEVICES=0:1 opensuse/leap nvidia-smi -L",
        Root("(UUID: MIG-"),
    ),
    (
        "podman run --rm --device nvidia.com/gpu=0:1 opensuse/leap nvidia-smi -L",
        Root("(UUID: MIG-"),
    ),
    (
        "oci-nvidia-hook doctor",
        Judges(" checks passed", &[0, 1, 3]),
    ),
    (
        "oci-nvidia-hook doctor --all hook",
        Judges("Podman as root starts the hook", &[0, 1, 3]),
    ),
    ("oci-nvidia-hook status", Judges("ENGINE ", &[0])),
    (
        "oci-nvidia-hook doctor --bundle report.tar.gz",
        Judges(" checks passed", &[0, 1, 3]),
    ),
    ("oci-nvidia-hook ps", Root("web")),
    ("oci-nvidia-hook ps --gpu 0", Root("web")),
    ("oci-nvidia-hook ps --all", Root("CONTAINER")),
    ("oci-nvidia-hook why web", Root("requested: all GPUs")),
    ("oci-nvidia-hook why", Root("last hour")),
    ("oci-nvidia-hook explain 30", Root("ONH-030")),
    (
        "crictl pull docker.io/opensuse/leap",
        Never("CRI-O is in no Debian release, as the page states"),
    ),
    (
        "crictl run container.json pod.json",
        Never("CRI-O is in no Debian release, as the page states"),
    ),
    (
        "journalctl -t oci-nvidia-hook",
        NotHere(is_the_name_in_the_journal),
    ),
    ("oci-nvidia-hook info", Root("GPU-51eed000-0000-")),
    ("oci-nvidia-hook files", Root("libcuda.so.")),
    ("oci-nvidia-hook prepare", Root("")),
    (
        "systemctl enable --now oci-nvidia-mps@0",
        Never("systemd does not run here; mps:: has the command of the unit"),
    ),
    (
        "oci-nvidia-hook version",
        Root("\nNVIDIA driver 535.183.01\n"),
    ),
    (
        "oci-nvidia-hook plan web",
        Root("the hook would set up the container: NVIDIA_VISIBLE_DEVICES requests all GPUs"),
    ),
    ("oci-nvidia-hook explain ONH-030", Root("ONH-030: ")),
    (
        "oci-nvidia-hook plan - < config.json",
        Root("the hook would set up the container: NVIDIA_VISIBLE_DEVICES requests all GPUs"),
    ),
    (
        "install -D -m 644 packaging/podman/oci-nvidia-hook-precreate.json \
         /usr/share/containers/oci/hooks.podman.d/oci-nvidia-hook-precreate.json",
        Root(""),
    ),
    (
        "install -D -m 644 packaging/podman/50-oci-nvidia-hook.conf \
         /etc/containers/containers.conf.d/50-oci-nvidia-hook.conf",
        Root(""),
    ),
    (
        "install -m 644 packaging/systemd/oci-nvidia-hook-cdi*.service packaging/systemd/oci-nvidia-hook-cdi.path \
         /etc/systemd/system/",
        Root(""),
    ),
    (
        "install -D -m 644 packaging/udev/90-oci-nvidia-hook.rules /etc/udev/rules.d/90-oci-nvidia-hook.rules",
        Root(""),
    ),
    (
        "systemctl enable oci-nvidia-hook-cdi.service oci-nvidia-hook-cdi.path",
        Root(""),
    ),
    (
        "podman run --rm --gpus all opensuse/leap nvidia-smi",
        NotHere(in_recipes),
    ), // needs Podman 5
    (
        "podman run --rm -e NVIDIA_VISIBLE_DEVICES=1 opensuse/leap nvidia-smi -L",
        Root("GPU-51eed001-"),
    ),
    (
        "podman run --rm --device nvidia.com/gpu=1 opensuse/leap nvidia-smi -L",
        Root("GPU-51eed001-"),
    ),
    ("podman build --tag gpu .", NotHere(in_recipes)),
    (
        "podman build --device nvidia.com/gpu=all --tag gpu .",
        NotHere(in_recipes),
    ),
    (
        "container=$(buildah from docker.io/opensuse/leap)",
        NotHere(in_recipes),
    ),
    (
        "buildah run --device nvidia.com/gpu=all \"$container\" nvidia-smi",
        NotHere(in_recipes),
    ),
    (
        "podman build --hooks-dir /usr/share/containers/oci/hooks.d --tag gpu .",
        NotHere(in_recipes),
    ),
    ("buildah rm \"$container\"", NotHere(in_recipes)),
    ("ramalama run granite", By("tests/engines/recipes")),
    (
        "rpm --import https://example.org/oci-nvidia-hook/oci-nvidia-hook.asc",
        NotHere(is_in_a_repository),
    ),
    (
        "zypper addrepo https://example.org/oci-nvidia-hook/rpm/oci-nvidia-hook.repo",
        NotHere(is_in_a_repository),
    ),
    (
        "zypper install oci-nvidia-hook",
        By("repository::zypper_installs_upgrades_and_removes"),
    ),
    (
        "wget -P /etc/apt/sources.list.d https://example.org/oci-nvidia-hook/deb/oci-nvidia-hook.sources",
        NotHere(is_in_a_repository),
    ),
    (
        "apt update",
        By("repository::apt_installs_upgrades_and_removes"),
    ),
    (
        "apt install oci-nvidia-hook",
        By("repository::apt_installs_upgrades_and_removes"),
    ),
    (
        "nvidia-smi -i 0 -mig 1",
        Never("the fake GPU is split already"),
    ),
    (
        "nvidia-smi mig -i 0 -cgi 19,19 -C",
        Never("the fake GPU is split already"),
    ),
    (
        "nvidia-smi -L",
        Never("the fake driver's program is in its root, not in PATH"),
    ),
    // migration.md
    (
        "mv /etc/nvidia-container-runtime/config.toml.rpmsave /etc/nvidia-container-runtime/config.toml",
        By("toolkit::zypper_removes_an_old_toolkit"),
    ),
    (
        "systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service",
        By("cdi_units::the_page_of_the_migration_stops_the_toolkit"),
    ),
    (
        "rm -f /etc/containers/oci/hooks.d/oci-nvidia-hook.json /etc/cdi/nvidia.yaml",
        By("cdi_units::the_page_of_the_migration_stops_the_toolkit"),
    ),
    (
        "dnf install --allowerasing ./target/rpm/RPMS/*/oci-nvidia-hook-[0-9]*.rpm",
        Install,
    ),
    (
        "apt remove nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container-tools libnvidia-container1",
        By("migration::debian_moves_to_our_package_and_back"),
    ),
];

/// A page whose commands are run in sequence.
struct Page {
    file: &'static str,
    /// Arguments for the fake driver
    driver: &'static [&'static str],
    /// The headings at which a new host is created, and what that has installed before the first command
    hosts: &'static [(&'static str, &'static [&'static str])],
}

const PAGES: &[Page] = &[
    Page {
        file: "README.md",
        driver: &["--gpus", "2"],
        hosts: &[
            ("openSUSE and SLE", &[]),
            ("Debian and Ubuntu", &["oci-nvidia-hook"]),
            ("Check and troubleshoot", &["oci-nvidia-hook"]),
        ],
    },
    Page {
        file: "docs/install.md",
        driver: &["--gpus", "2"],
        hosts: &[
            ("MicroOS, Leap Micro and SL Micro", &[]),
            ("Fedora", &[]),
            ("From a repository", &[]),
            ("Without a package", &[]),
            ("Rootless Podman", &["oci-nvidia-hook"]),
        ],
    },
    Page {
        file: "docs/migration.md",
        driver: &["--gpus", "2"],
        hosts: &[
            ("openSUSE and SLE", &[]),
            ("Fedora", &[]),
            ("Debian and Ubuntu", &["oci-nvidia-hook"]),
        ],
    },
    Page {
        file: "docs/switch-off.md",
        driver: &["--gpus", "2"],
        hosts: &[("For one container", &["oci-nvidia-hook"])],
    },
    Page {
        file: "docs/modes.md",
        driver: &["--gpus", "2"],
        hosts: &[
            ("Hook", &["oci-nvidia-hook"]),
            ("precreate", &["oci-nvidia-hook"]),
            ("CDI", &["oci-nvidia-hook"]),
        ],
    },
    Page {
        file: "docs/recipes.md",
        driver: &["--gpus", "2"],
        hosts: &[
            ("podman run", &["oci-nvidia-hook"]),
            ("Compose", &["oci-nvidia-hook"]),
        ],
    },
    Page {
        file: "docs/usage.md",
        driver: &["--gpus", "2", "--mig"],
        hosts: &[("MIG devices", &["oci-nvidia-hook"])],
    },
];

fn way(page: &str, command: &str) -> Way {
    let known = COMMANDS.iter().find(|(known, _)| *known == command);
    known
        .unwrap_or_else(|| panic!("{page}: no test knows the command {command:?}"))
        .1
}

/// (heading, commands) of a page, in its order.
fn sections(page: &str) -> Vec<(String, Vec<String>)> {
    let text = std::fs::read_to_string(source(page)).unwrap();
    let mut parts = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        in_block ^= line.starts_with("```");
        match line.trim_start_matches('#').strip_prefix(' ') {
            Some(heading) if !in_block && line.starts_with('#') => {
                parts.push((heading.to_owned(), String::new()))
            }
            _ => {
                if let Some((_, text)) = parts.last_mut() {
                    text.push('\n');
                    text.push_str(line);
                }
            }
        }
    }
    let commands = |text: String| {
        command_lines(&text)
            .into_iter()
            .map(str::to_owned)
            .collect()
    };
    parts
        .into_iter()
        .map(|(heading, text)| (heading, commands(text)))
        .collect()
}

fn every_command_is_known() {
    let mut seen = std::collections::BTreeSet::new();
    for Page {
        file: page, hosts, ..
    } in PAGES
    {
        let sections = sections(page);
        for (heading, _) in *hosts {
            assert!(
                sections.iter().any(|(name, _)| name == heading),
                "{page} has no section {heading:?}"
            );
        }
        for command in sections.into_iter().flat_map(|(_, commands)| commands) {
            match way(page, &command) {
                NotHere(check) => check(&command),
                By(test) => assert!(
                    is_test(test) || source(test).is_file(),
                    "{command}: there is no test {test:?}"
                ),
                Never(reason) => assert!(reason.contains(' '), "{command}: {reason:?}"),
                _ => (),
            }
            seen.insert(command);
        }
    }
    for (command, _) in COMMANDS {
        assert!(
            seen.contains(*command),
            "no page has the command {command:?}"
        );
    }
}

/// `make` prints the commands that it would run.
fn recipe(target: &str) -> String {
    let mut make = Command::new("make");
    // make itself may have started this test, and its settings would be inherited.
    make.args(["-n", "--no-print-directory", target])
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL");
    run(make.current_dir(source("."))).ok()
}

fn is_what_runs_this(_: &str) {
    let recipe = recipe("test");
    assert!(
        recipe.contains("cargo test ") && recipe.contains("--workspace"),
        "{recipe}"
    );
}

fn is_the_script_of_the_rpm_tests(_: &str) {
    let recipe = recipe("rpm");
    assert!(
        recipe
            .lines()
            .last()
            .is_some_and(|line| line.ends_with("packaging/build-rpm")),
        "{recipe}"
    );
}

fn is_the_script_of_the_deb_tests(_: &str) {
    let recipe = recipe("deb");
    assert!(
        recipe
            .lines()
            .last()
            .is_some_and(|line| line.ends_with("packaging/build-deb")),
        "{recipe}"
    );
}

/// The package is one of those that `make deb` creates.
fn is_one_package(command: &str) {
    let pattern = command.rsplit('/').next().unwrap();
    let control = std::fs::read_to_string(source("packaging/debian/control")).unwrap();
    let names = control
        .lines()
        .filter_map(|line| line.strip_prefix("Package: "));
    let matches = |name: &&str| {
        sh(&format!(
            "case '{name}_1_all.deb' in {pattern}) ;; *) exit 1 ;; esac"
        ))
        .code
            == Some(0)
    };
    assert_eq!(
        names.filter(matches).collect::<Vec<_>>(),
        ["oci-nvidia-hook"]
    );
}

fn is_the_name_in_the_journal(command: &str) {
    // why::the_journal_has_it examines the datagrams.
    assert_eq!(command.rsplit(' ').next(), Some("oci-nvidia-hook"));
}

/// tests/engines/recipes runs the blocks of these sections with newer engines.
fn in_recipes(_: &str) {
    let script = std::fs::read_to_string(source("tests/engines/recipes")).unwrap();
    for block in [
        "block \"podman run\" 1",
        "block Builds 2",
        "block Builds 3",
        "block Builds 6",
    ] {
        assert!(script.contains(block), "{block}");
    }
}

/// packaging/repository creates this file; `repository::` uses it.
fn is_in_a_repository(command: &str) {
    let (_, path) = command
        .split_once("https://example.org/oci-nvidia-hook/")
        .unwrap();
    let path = path.replace("oci-nvidia-hook.", "$name.");
    assert!(
        std::fs::read_to_string(source("packaging/repository"))
            .unwrap()
            .contains(&format!("\"$new/{path}\"")),
        "{path}"
    );
}

/// Docker searches for this name. `docker::gpus_all` starts the program like Docker.
fn docker_finds_the_program(_: &str) {
    let files =
        std::fs::read_to_string(source("tests/fixtures/rpm/oci-nvidia-hook-compat.files")).unwrap();
    assert!(
        files.contains(" /usr/bin/nvidia-container-runtime-hook "),
        "{files}"
    );
}

fn in_tree(command: &str) -> Ran {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", command])
        .current_dir(source("."))
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("CONTAINERS_CONF");
    run(&mut shell)
}

fn commands_of_a_tree() {
    let mut seen = 0;
    for (command, way) in COMMANDS {
        if let Tree(prints) = way {
            let said = in_tree(command).ok();
            assert!(said.contains(prints), "{command}: {said}");
            seen += 1;
        }
    }
    assert_eq!(seen, 2);
}

/// The shared parts of the hosts of a page: the driver, an image, and the storage of engines. They are not below the source tree,
/// which may be in a home directory that only root can enter, because a user must have access.
struct Shared {
    dir: tempfile::TempDir,
}

impl Shared {
    fn new(driver: &[&str]) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let shared = Self { dir };
        FakeDriver::shared(); // compiled by now
        let mut make = Command::new(source("tests/fake-driver/make-root"));
        make.arg(shared.path("driver"))
            .arg("--build")
            .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-driver"));
        run(make.args(driver).args(["--dev-group", "video"])).ok();
        Image::new(shared.dir.path(), &["--layout", "debian"]);
        sh(&format!(
            "cd '{}'; tar -C image -cf image.tar .",
            shared.dir.path().display()
        ))
        .ok();
        // The directory in which commands run, with the contents of a clone.
        let clone = shared.path("clone");
        std::fs::create_dir(&clone).unwrap();
        for name in ["target", "packaging", "config", "hooks.d"] {
            symlink(source(name), clone.join(name)).unwrap();
        }
        let spec =
            r#"{"root":{"path":"/nowhere"},"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]}}"#;
        std::fs::write(clone.join("config.json"), spec).unwrap();
        shared
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// A separate host, until this value is dropped.
struct Host<'a> {
    shared: &'a Shared,
    init: Child,
}

impl<'a> Host<'a> {
    fn new(shared: &'a Shared, installed: &[&str]) -> Self {
        let dir = shared.dir.path().display();
        let script = format!(
            "mount -t tmpfs layers /mnt\n\
             for dir in usr etc; do \
               mkdir /mnt/$dir /mnt/$dir.work; \
               mount -t overlay -o \"lowerdir=/$dir,upperdir=/mnt/$dir,workdir=/mnt/$dir.work\" overlay /$dir; \
             done\n\
             mount -t tmpfs -o mode=755 run /run; mkdir -p /run/lock\n\
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
        host.install(
            &installed
                .iter()
                .map(|name| package(name))
                .collect::<Vec<_>>(),
        );
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

    fn install(&self, packages: &[&Path]) {
        if packages.is_empty() {
            return;
        }
        // The packages of this machine are not in rpm's database. Scripts run.
        let mut rpm = self.enter();
        rpm.args(["rpm", "-i", "--nodeps", "--dbpath", "/run/rpm"])
            .args(packages);
        let ran = run(&mut rpm);
        assert!(
            ran.code == Some(0) && !ran.stderr.contains("scriptlet"),
            "{ran:?}"
        );
        // No systemd runs here that starts the unit. units:: has one.
        self.root("oci-nvidia-hook cdi refresh --create").ok();
    }

    fn run(&self, page: &str, command: &str) {
        let (ran, prints, codes) = match way(page, command) {
            Root(prints) => {
                if ["why", "ps", "web"]
                    .iter()
                    .any(|last| command.ends_with(last))
                    || command.contains(" ps ")
                {
                    self.root(WEB).ok();
                }
                (self.root(command), prints, &[0][..])
            }
            NoGpu => {
                let nodes = self.root(command).ok();
                assert!(
                    nodes.contains("null") && !nodes.contains("nvidia"),
                    "{command}: {nodes}"
                );
                return;
            }
            Judges(prints, codes) => (self.root(command), prints, codes),
            Tux(prints) => {
                let tar = self.shared.path("image.tar").display().to_string();
                // The files that a user has in these directories by default were moved there.
                let conf = "cd ~; mkdir -p .config/containers; printf '[storage]\\ndriver = \"vfs\"\\n' >.config/containers/storage.conf; \
                            printf '[network]\\nnetwork_config_dir = \"%s/networks\"\\n' ~ >.config/containers/containers.conf";
                self.tux(&format!(
                    "{conf}; podman import '{tar}' localhost/opensuse/leap"
                ))
                .ok();
                (self.tux(command), prints, &[0][..])
            }
            Tree(_) | NotHere(_) | By(_) | Never(_) => return,
            Install => return self.install(&[named_by(command)]),
        };
        let fine =
            ran.code.is_some_and(|code| codes.contains(&code)) && ran.stdout.contains(prints);
        assert!(fine, "{page}: {command}: {ran:?}");
        if let Some((_, file)) = command.split_once(" --bundle ") {
            self.root(&format!("gzip --test {file}")).ok();
        }
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

/// A package by its name.
fn package(name: &str) -> &'static Path {
    let all = Packages::shared();
    let found = all
        .now
        .iter()
        .chain(&all.later)
        .find(|package| query(package, "%{NAME}") == name);
    found.unwrap_or_else(|| panic!("no package {name}"))
}

/// Returns the one package that the pattern at the end of a command line matches at the path of `make rpm`.
fn named_by(command: &str) -> &'static Path {
    let pattern = command.rsplit('/').next().unwrap();
    let all = Packages::shared();
    let named: Vec<_> = all
        .now
        .iter()
        .chain(&all.later)
        .filter(|package| {
            let name = package.file_name().unwrap().to_str().unwrap();
            sh(&format!("case '{name}' in {pattern}) ;; *) exit 1 ;; esac")).code == Some(0)
        })
        .collect();
    // A later release has the same name.
    let mut names: Vec<_> = named
        .iter()
        .map(|package| query(package, "%{NAME}"))
        .collect();
    names.dedup();
    assert_eq!(names.len(), 1, "{command}: {named:?}");
    named[0]
}

fn commands_of_a_host() {
    // For the commands that install without a package.
    built::release();
    let mut ran = 0;
    for Page {
        file: page,
        driver,
        hosts,
    } in PAGES
    {
        let shared = Shared::new(driver);
        let mut host = None;
        for (heading, commands) in sections(page) {
            if let Some((_, installed)) = hosts.iter().find(|(name, _)| *name == heading) {
                drop(host.take());
                host = Some(Host::new(&shared, installed));
            }
            for command in commands {
                if let Some(host) = &host {
                    host.run(page, &command);
                    ran += 1;
                } else {
                    assert!(
                        matches!(way(page, &command), Tree(_) | NotHere(_) | By(_) | Never(_)),
                        "{page}: {command:?} needs a host"
                    );
                }
            }
        }
    }
    assert!(ran > 40, "{ran}");
}

/// Each task of the index in docs has a command that answers it, which runs here, or a page; `files_and_links_are_there` checks pages.
fn everyday_tasks() {
    let text = std::fs::read_to_string(source("docs/README.md")).unwrap();
    let table = text
        .split_once("| task | command or page |\n|---|---|\n")
        .unwrap()
        .1;
    let tasks: Vec<_> = table
        .lines()
        .map_while(|row| {
            row.strip_prefix("| ")?
                .strip_suffix(" |")?
                .split_once(" | ")
        })
        .collect();
    assert!(tasks.len() >= 30, "{}", tasks.len());
    let shared = Shared::new(&["--gpus", "2"]);
    let host = Host::new(&shared, &["oci-nvidia-hook"]);
    host.root(WEB).ok();
    let mut commands = 0;
    for (task, answer) in tasks {
        if let Some(command) = answer
            .strip_prefix('`')
            .and_then(|answer| answer.strip_suffix('`'))
        {
            let ran = host.root(command);
            // doctor judges this machine.
            let codes: &[i32] = if command.contains(" doctor") {
                &[0, 1, 3]
            } else {
                &[0]
            };
            assert!(
                ran.code.is_some_and(|code| codes.contains(&code)) && !ran.stdout.is_empty(),
                "{task}: {command}: {ran:?}"
            );
            commands += 1;
        } else {
            assert!(
                answer.starts_with('[') && answer.ends_with(')'),
                "{task}: {answer:?}"
            );
        }
    }
    assert!(commands >= 15, "{commands}");
}
