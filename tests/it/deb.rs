//! The packages of `make deb`: the results of lintian, and the files of a Debian host while they are installed and after they are
//! purged.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::driver::{FakeDriver, Image};
use crate::engine::{IMAGE, Podman};
use crate::support::{
    Need, Ran, assert_lacks, assert_says, read, run, scratch, shell, source, unshare, write_file,
};
use crate::{built, docs, old_packages};

const BUILD: &[Need] = &[
    Need::Root,
    Need::Programs(&["dpkg-buildpackage", "dh", "cc"]),
];
const LINT: &[Need] = &[
    Need::Root,
    Need::Programs(&["dpkg-buildpackage", "dh", "cc", "lintian"]),
];
const PODMAN: &[Need] = &[
    Need::Root,
    Need::Programs(&["dpkg-buildpackage", "dh", "cc", "podman", "runc"]),
];

tests! {
    &[] => the_files_agree_with_the_program;
    BUILD => the_program_is_there_before_its_hook_file, two_builds_are_the_same, purge_leaves_nothing, an_existing_config_stays,
        an_upgrade_removes_the_package_for_podman,
        the_commands_of_the_page_remove_all, the_copyright_names_each_vendored_crate,
        links_of_installed_pages_lead_somewhere;
    LINT => lintian_reports_nothing;
    PODMAN => podman_uses_the_installed_files, a_running_container_keeps_its_gpus;
}

const MAIN: &str = "oci-nvidia-hook";
const PLUGIN: &str = "oci-nvidia-kubelet-plugin";
const CONFIG: &str = "etc/nvidia-container-runtime/config.toml";

/// The packages, built once, without network access, like `make deb`.
pub fn packages() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("deb"), "022"))
}

fn build(top: &Path, umask: &str) -> PathBuf {
    let script = format!("umask {umask}; exec \"$@\"");
    let mut build = Command::new("sh");
    build
        .args(["-euc", &script, "sh"])
        .arg(source("packaging/build-deb"))
        .arg(top);
    // Fast compression: nothing depends on the size of the packages.
    build
        .env("TARBALLS", built::dist())
        .env("DPKG_DEB_COMPRESSOR_LEVEL", "1");
    run(build
        .env("CARGO", built::cargo())
        .env("PATH", built::path()))
    .ok();
    top.to_owned()
}

pub fn package(name: &str) -> PathBuf {
    let found = shell!("ls '{}/{name}_'*.deb", packages().display());
    assert_eq!(found.lines().count(), 1, "{found}");
    PathBuf::from(found.trim())
}

fn field(package: &Path, name: &str) -> String {
    run(Command::new("dpkg-deb")
        .arg("--field")
        .arg(package)
        .arg(name))
    .ok()
    .trim()
    .to_owned()
}

fn the_files_agree_with_the_program() {
    assert!(
        read(source("packaging/debian/changelog")).starts_with(concat!(
            "oci-nvidia-hook (",
            env!("CARGO_PKG_VERSION"),
            "-"
        ))
    );
    let control = read(source("packaging/debian/control"));
    let rust = env!("CARGO_PKG_RUST_VERSION");
    // The builders of the Debian archive use only the first alternative (policy, section 7.1); -web is in security updates only.
    for tool in ["cargo", "rustc"] {
        let alternatives = format!(" {tool} (>= {rust}) | {tool}-web (>= {rust}),\n");
        assert!(control.contains(&alternatives), "{tool}");
    }
}

/// dpkg unpacks in the order of the archive and removes in the reverse order. An engine that finds a hook file without its program
/// starts containers without GPUs, and prints nothing.
fn the_program_is_there_before_its_hook_file() {
    let main = package(MAIN);
    let depends = field(&main, "Depends");
    assert!(!depends.contains("nvidia"), "{depends}");
    // dpkg would ask about a conffile that NVIDIA's toolkit or an administrator has written.
    let info = run(Command::new("dpkg-deb").arg("--info").arg(&main)).ok();
    assert!(!info.contains("conffiles"), "{info}");
    let contents = run(Command::new("dpkg-deb").arg("--contents").arg(&main)).ok();
    let at = |end: &str| contents.lines().position(|line| line.ends_with(end));
    let program = at("./usr/bin/oci-nvidia-hook");
    let hook_file = at("hooks.d/oci-nvidia-hook.json");
    assert!(program.is_some() && program < hook_file, "{contents}");
}

/// Builds at another path, with another umask.
fn two_builds_are_the_same() {
    let again = scratch();
    let other = build(&again.path().join("a-longer-name"), "077");
    let sums = |dir: &Path| shell!("cd '{}'; sha256sum *.deb", dir.display());
    let (one, two) = (sums(packages()), sums(&other));
    assert_eq!(one, two);
    assert!(one.lines().count() >= 3, "{one}");
}

fn lintian_reports_nothing() {
    let changes = shell!("ls '{}'/build/*.changes", packages().display());
    assert_eq!(changes.lines().count(), 1, "{changes}");
    let mut lint = Command::new("lintian");
    // Only a package of the Debian archive closes the bug that requested it.
    lint.args([
        "--allow-root",
        "--fail-on",
        "error,warning",
        "--suppress-tags",
        // The lintian of Debian 12 does not know the current version of the policy.
        "initial-upload-closes-no-bugs,newer-standards-version",
    ]);
    for name in [MAIN, "oci-nvidia-hook-compat", PLUGIN] {
        lint.arg(package(name));
    }
    let ran = run(&mut lint);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_lacks(&ran.stdout, &["W: ", "E: "]);
}

/// Uses this machine as a separate Debian host: `script` runs with layers over `/usr`, `/etc` and `/var` (including the database
/// of dpkg), which are below `/mnt`. `$1` and `$2` are the packages; `files` lists the differences from the machine.
pub fn on_host(script: &str, root: &Path) -> Ran {
    let start = "mount -t tmpfs layers /mnt\n\
         for dir in usr etc var; do\n\
           mkdir /mnt/$dir /mnt/$dir.work\n\
           mount -t overlay -o \"lowerdir=/$dir,upperdir=/mnt/$dir,workdir=/mnt/$dir.work\" overlay /$dir\n\
         done\n\
         mount -t tmpfs -o mode=755 run /run; mkdir -p /run/lock\n\
         rm -rf /etc/nvidia-container-runtime\n\
         export DEBIAN_FRONTEND=noninteractive LC_ALL=C\n\
         files() {\n\
           (cd /mnt; find usr etc var ! -type d | grep -v -e ^var/lib/dpkg/ -e ^var/log/ -e ^var/cache/ | sort)\n\
           find /run -type f\n\
         }\n\
         install() { dpkg --no-triggers \"$@\" </dev/null >/mnt/log 2>&1 || { cat /mnt/log >&2; exit 1; }; }\n";
    let mut unshare = unshare(&format!("{start}{script}"));
    unshare.args([package(MAIN), package("oci-nvidia-hook-compat")]);
    run(unshare.env("ROOT", root).env("SYSTEMD_OFFLINE", "1"))
}

/// The steps of a user: install the package, run a CUDA image.
fn podman_uses_the_installed_files() {
    let (host, fake) = (
        scratch(),
        FakeDriver::new(&["--gpus", "2", "--dev-group", "video"]),
    );
    let podman = Podman::new();
    let image = Image::new(podman.dir.path(), &["--layout", "debian"]);
    podman.import_with(
        &image.rootfs,
        "localhost/cuda",
        "--change 'ENV NVIDIA_VISIBLE_DEVICES=all'",
    );
    let smi = ["localhost/cuda", "nvidia-smi", "-L"];
    let empty = host.path().join("empty");
    assert_ne!(
        podman.run_installed(&empty, &smi).code,
        Some(0),
        "a hook is installed on this machine"
    );

    let run_with = |packages: &str| {
        let root = host.path().join(packages.replace(['"', '$', ' '], "-"));
        let script = format!(
            "install -i {packages}; mkdir \"$ROOT\"; cp -a /mnt/usr /mnt/etc \"$ROOT\"; \
             page=$(oci-nvidia-hook explain ONH-219 | sed -n 's/^see: *//p'); \
             [ \"${{page#*#}}\" = onh-219 ] && grep -q '^### ONH-219$' \"${{page%#*}}\""
        );
        on_host(&script, &root).ok();
        let drop_in = root
            .join(CONFIG)
            .with_file_name("config.toml.d")
            .join("root.toml");
        write_file(
            &drop_in,
            format!(
                "[nvidia-container-cli]\nroot = \"{}\"\n",
                fake.root.display()
            ),
        );
        assert_eq!(
            podman.run_installed(&root, &smi).ok(),
            fake.on_host("nvidia-smi -L"),
            "{packages}"
        );
        root
    };
    let root = run_with("\"$1\"");
    let version = run(Command::new(root.join("usr/bin/oci-nvidia-hook")).arg("--version")).ok();
    assert!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
    let root = run_with("\"$1\" \"$2\"");
    let ctk = run(Command::new(root.join("usr/bin/nvidia-ctk")).arg("--version")).ok();
    assert!(!ctk.is_empty());
}

/// The package with the hook file of the stage precreate, which the hook no longer has. dpkg keeps the script of a removed package until
/// it is purged.
fn an_upgrade_removes_the_package_for_podman() {
    let dir = scratch();
    let old = old_packages::debs(dir.path());
    let [drop_in, hooks, data] = old_packages::LEFT;
    let script = format!(
        "echo 'APT::Get::Assume-Yes \"true\"; APT::Install-Recommends \"false\"; APT::Sandbox::User \"root\";' >/etc/apt/apt.conf.d/99test\n\
         known() {{ dpkg-query -W -f '${{db:Status-Status}} ${{Package}}\\n' 'oci-nvidia-*' 2>/dev/null || true; }}\n\
         exist() {{ for path in {drop_in} {hooks} {data}; do test ! -e /$path || echo /$path; done; }}\n\
         others() {{ files | grep -v ^var/lib/apt/ || true; }}\n\
         others >/mnt/before\n\
         for way in 'dpkg --no-triggers -i' 'apt-get install'; do\n\
           install -i '{}' '{}'; exist\n\
           $way \"$1\" </dev/null >/mnt/log 2>&1 || {{ cat /mnt/log >&2; exit 1; }}\n\
           exist; known\n\
           install -P {MAIN} {}\n\
           known\n\
         done\n\
         others >/mnt/after; diff /mnt/before /mnt/after",
        old[0].display(),
        old[1].display(),
        old_packages::PODMAN,
    );
    let once = format!(
        "/{drop_in}\n/{hooks}\n/{data}\ninstalled {MAIN}\nconfig-files {}\n",
        old_packages::PODMAN
    );
    assert_eq!(
        on_host(&script, Path::new("/nonexistent")).ok(),
        once.repeat(2)
    );
}

/// A container that was started at the stage precreate, and a hook file that cleans up after it.
fn a_running_container_keeps_its_gpus() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let old = old_packages::debs(dir.path());
    let podman = Podman::with_image();
    let poststop = dir.path().join("poststop.json");
    let hook = read(source("hooks.d/oci-nvidia-hook.json"));
    write_file(&poststop, hook.replace("prestart", "poststop"));
    let script = format!(
        "install -i '{}' '{}'\n\
         mkdir -p /{CONFIG}.d /etc/containers/containers.conf.d\n\
         printf '[nvidia-container-cli]\\nroot = \"{}\"\\n' >/{CONFIG}.d/root.toml\n\
         cp '{}/containers.conf' /etc/containers/containers.conf.d/10-test.conf\n\
         cp '{}' /usr/share/containers/oci/hooks.d\n\
         unset CONTAINERS_CONF\n\
         podman() {{ command {} \"$@\"; }}\n\
         trap 'podman rm -f -t 0 web >/dev/null' EXIT\n\
         gpus() {{ podman exec web nvidia-smi -L; oci-nvidia-hook why web | grep -o '^at [a-z-]*\\|^the container got what it requested\\|^ended'; }}\n\
         podman run -d --name web --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} sleep 600 >/dev/null\n\
         gpus; echo upgrade; install -i \"$1\"; gpus\n\
         podman stop -t 0 web >/dev/null; oci-nvidia-hook why web | grep -o ^ended\n\
         podman start web >/dev/null; gpus",
        old[0].display(),
        old[1].display(),
        fake.root.display(),
        podman.dir.path().display(),
        poststop.display(),
        podman.with_storage().join(" "),
    );
    let text = on_host(&script, Path::new("/nonexistent")).ok();
    let gpu = fake.on_host("nvidia-smi -L");
    assert!(gpu.contains("GPU 1:"), "{gpu}");
    assert_says(&text, &["upgrade\n", "ended\n"]);
}

fn purge_leaves_nothing() {
    let all = "oci-nvidia-hook oci-nvidia-hook-compat";
    let script = format!(
        "files >/mnt/before\n\
         install -i \"$@\"\n\
         test -x /usr/bin/oci-nvidia-hook; test -L /usr/bin/nvidia-ctk\n\
         dpkg --verify {all}\n\
         for unit in oci-nvidia-hook-cdi.service oci-nvidia-hook-cdi.path; do\n\
           test \"$(systemctl --root=/ is-enabled $unit)\" = enabled\n\
         done\n\
         mkdir -p /run/oci-nvidia-hook/containers /run/cdi\n\
         echo {{}} >/run/oci-nvidia-hook/containers/c.json\n\
         echo path: /usr/bin/oci-nvidia-hook >/run/cdi/nvidia.yaml\n\
         echo path: /usr/bin/nvidia-ctk >/run/cdi/other.yaml\n\
         test ! -e /{CONFIG}; test -d /{CONFIG}.d; test -e /usr/share/oci-nvidia-hook/config.toml\n\
         install -r {all}\n\
         test ! -e /run/oci-nvidia-hook; test ! -e /run/cdi/nvidia.yaml; test ! -e /usr/bin/oci-nvidia-hook\n\
         install -P {all}\n\
         files >/mnt/after\n\
         diff /mnt/before /mnt/after || true\n\
         test ! -e /etc/nvidia-container-runtime"
    );
    assert_eq!(
        on_host(&script, Path::new("/nonexistent")).ok(),
        "0a1\n> /run/cdi/other.yaml\n"
    );
}

/// The reviewers of the Debian archive compare the file with the sources.
fn the_copyright_names_each_vendored_crate() {
    let script =
        "dpkg-deb --fsys-tarfile \"$1\" | tar -xO ./usr/share/doc/oci-nvidia-hook/copyright";
    let text = run(Command::new("sh")
        .args(["-euc", script, "sh"])
        .arg(package(MAIN)))
    .ok();
    let vendored = shell!(
        "tar -tzf '{}/vendor.tar.gz' | sed -n 's:^vendor/\\([^/]*\\)/Cargo.toml$:\\1:p'",
        built::dist().display()
    );
    assert!(vendored.lines().count() > 200, "{vendored}");
    for name in vendored.lines() {
        assert!(text.contains(&format!("\n vendor/{name}/*\n")), "{name}");
    }
    // Each license has a paragraph with its text.
    let mut compared = 0;
    for paragraph in text.split("\n\n").filter(|part| part.starts_with("Files:")) {
        let (_, license) = paragraph.rsplit_once("License: ").unwrap();
        for name in license.trim().replace(" and ", " or ").split(" or ") {
            let name = name.trim_end_matches(',');
            assert!(text.contains(&format!("\nLicense: {name}\n ")), "{name}");
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared}");
}

/// As an administrator copies them, whatever is installed. apt answers its question itself.
fn the_commands_of_the_page_remove_all() {
    let commands = docs::removal_commands("Debian, Ubuntu");
    let [remove, purge] = &commands[..] else {
        panic!("{commands:?}")
    };
    let script = format!(
        "echo 'APT::Get::Assume-Yes \"true\";' >/etc/apt/apt.conf.d/99test\n\
         installed() {{ dpkg-query -W -f '${{db:Status-Abbrev}} ${{Package}}\\n' 'oci-nvidia-*' 2>/dev/null | sed -n 's/^ii *//p'; }}\n\
         run() {{ \"$@\" </dev/null >/mnt/log 2>&1 || {{ cat /mnt/log >&2; exit 1; }}; }}\n\
         copied() {{ run sh -c \"$1\"; installed; }}\n\
         others() {{ files | grep -v ^var/lib/apt/ || true; }}\n\
         others >/mnt/before\n\
         for packages in \"$1\" \"$1 $2\"; do\n\
           install -i $packages; installed | wc -l\n\
           copied '{remove}'; copied \"{purge}\"\n\
         done\n\
         others >/mnt/after; diff /mnt/before /mnt/after || true"
    );
    let stdout = on_host(&script, Path::new("/nonexistent")).ok();
    assert_eq!(stdout, "1\n2\n");
}

/// NVIDIA's toolkit creates the file during installation, so no package owns it. An unattended installation with apt asks nothing.
fn an_existing_config_stays() {
    let script = format!(
        "mkdir -p /etc/nvidia-container-runtime; echo disable-require = true >/{CONFIG}\n\
         for step in 'install --reinstall' 'install --reinstall' remove purge; do\n\
           case $step in install*) package=$1 ;; *) package={MAIN} ;; esac\n\
           DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends --allow-downgrades -o APT::Sandbox::User=root \\\n\
             $step \"$package\" </dev/null >/mnt/log 2>&1 || {{ cat /mnt/log >&2; exit 1; }}\n\
           cat /{CONFIG}; ls /etc/nvidia-container-runtime\n\
         done"
    );
    let (with, without) = (
        "disable-require = true\nconfig.toml\nconfig.toml.d\n",
        "disable-require = true\nconfig.toml\n",
    );
    assert_eq!(
        on_host(&script, Path::new("/nonexistent")).ok(),
        [with, with, without, without].concat()
    );
}

fn links_of_installed_pages_lead_somewhere() {
    let dir = scratch();
    run(Command::new("dpkg-deb")
        .arg("--extract")
        .arg(package(MAIN))
        .arg(dir.path()))
    .ok();
    docs::follow_links(&dir.path().join("usr/share/doc/oci-nvidia-hook"));
}
