//! All kinds of containers that podman can create, rootful and rootless, with the same config.toml.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cdi_containers::nodes_at_dev;
use crate::driver::{FakeDriver, Image};
use crate::engine::{CONTAINERS_CONF, Cgroup, IMAGE, NEEDS, NEEDS_CRUN, Podman};
use crate::kernels;
use crate::support::{
    HOOK, Need, Ran, assert_says, chmod, copy_nvml_program, read, run, scratch, sh, shell, source,
    write_file,
};

pub const NEEDS_USER: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "cc", "useradd", "newuidmap", "setpriv"]),
];

tests! {
    NEEDS => rootful, read_only_rootfs;
    NEEDS_CRUN => rootful_crun, the_hosts_dev_is_left_alone;
    NEEDS_USER => rootless;
}

const WORKS: &str = "nvidia-smi -L; probe-dlopen libcuda.so.1 >/dev/null; probe-open /dev/nvidia1";

#[track_caller]
fn assert_works(ran: Ran, what: &[&str]) {
    let text = format!("{what:?}: {ran:?}");
    assert!(ran.code == Some(0), "{text}");
    assert!(
        ran.stdout.contains("UUID: GPU-51eed001-") && ran.stdout.ends_with("/dev/nvidia1: ENXIO\n"),
        "{text}"
    );
}

const HOSTS_DEV: &str = "/dev:/dev";

/// Options of podman run.
const SHAPES: &[&[&str]] = &[
    &[],
    &["--read-only"],
    &["--privileged"],
    &["--privileged", "-v", HOSTS_DEV],
    &["-v", "/:/host"],
    &["-v", "/:/host:ro,rslave"],
    &["--user", "1000:1000"],
    &["--cap-drop=all"],
    &["--security-opt=no-new-privileges"],
    &["--pid=host", "--uts=host"],
    &["--tmpfs", "/run", "--tmpfs", "/tmp"],
    &["--tmpfs", "/usr/local"],
    &["--init-path=/bin/true"],
];

fn arguments<'a>(shape: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = shape.to_vec();
    arguments.extend(["-e", "NVIDIA_VISIBLE_DEVICES=1", IMAGE, "sh", "-euc", WORKS]);
    arguments
}

fn runs(cgroup: Cgroup, shape: &[&str]) {
    // A separate /dev of this test. If the container uses it too, nothing can be created there, so it contains the nodes.
    let dir = scratch();
    let remove = if shape.contains(&HOSTS_DEV) {
        ""
    } else {
        "rm -r /dev/nvidia*"
    };
    let before = format!(
        "{}; {remove}",
        nodes_at_dev(FakeDriver::shared(), dir.path())
    );
    assert_works(
        Podman::shared().run_after(&before, cgroup, &arguments(shape)),
        shape,
    );
}

fn rootful() {
    SHAPES
        .iter()
        .for_each(|shape| runs(Cgroup::AsMounted, shape));
    for shape in [
        &["--read-only"][..],
        &["--privileged", "-v", HOSTS_DEV],
        &["--user", "1000:1000"],
    ] {
        runs(Cgroup::V2, shape);
    }
}

fn rootful_crun() {
    SHAPES
        .iter()
        .for_each(|shape| runs(Cgroup::WithCrun, shape));
}

/// The host's /dev, or a directory in it, is a volume, and the nodes are in a driver root.
fn the_hosts_dev_is_left_alone() {
    let fake = FakeDriver::new(&["--gpus", "2", "--drm", "--mig"]);
    let podman = Podman::with_image();
    podman.install_hook(&fake.config);
    for (cgroup, volume, request) in rows! {
        Cgroup::AsMounted, "/dev:/dev", "NVIDIA_VISIBLE_DEVICES=1";
        Cgroup::WithCrun, "/dev:/dev", "NVIDIA_VISIBLE_DEVICES=all";
        Cgroup::AsMounted, "/dev/dri:/dev/dri", "NVIDIA_VISIBLE_DEVICES=all";
        Cgroup::AsMounted, "/dev/nvidia-caps:/dev/nvidia-caps", "NVIDIA_VISIBLE_DEVICES=0:0";
    } {
        let dir = scratch();
        let script = format!(
            "{nodes}; rm -r /dev/nvidia*; mkdir -p /dev/dri /dev/nvidia-caps; seen() {{ find /dev -xdev ! -path '/dev/shm*' -printf '%p %i %y %l\n' | sort; }}; \
             before=$(seen); start() {{ \"$@\" run --rm --network=none --log-driver=none --privileged -v {volume} -e {request} \
             -e NVIDIA_DRIVER_CAPABILITIES=$capabilities {IMAGE} true 2>&1 || echo \"failed: $?\"; }}; capabilities=all; start \"$@\"; {HOOK} why; \
             [ \"$(seen)\" = \"$before\" ] && echo untouched; mount -t tmpfs proc /proc/driver; \
             cp -a '{root}/proc/driver/.' /proc/driver; mount --bind '{root}/proc/devices' /proc/devices; \
             '{HOOK}' prepare --root / >&2; capabilities=utility; start \"$@\" | grep failed || echo fixed",
            root = fake.root.display(),
            nodes = nodes_at_dev(&fake, dir.path()),
        );
        let text = podman.shell(cgroup, &script).ok();
        assert!(
            text.contains("failed: 12") && text.ends_with("\nuntouched\nfixed\n"),
            "{cgroup:?} {volume}: {text}"
        );
        assert!(
            text.contains("the container has the host's \"/dev\" as a volume"),
            "{cgroup:?} {volume}: {text}"
        );
        if matches!(cgroup, Cgroup::AsMounted) {
            assert_says(
                &text,
                &["(ONH-047)\nhint: run \"oci-nvidia-hook prepare --root /\""],
            );
        }
    }
}

/// An image on a read-only file system, in which nothing is created.
fn read_only_rootfs() {
    let podman = Podman::with_image();
    let image = Image::new(&podman.dir.path().join("old"), &["--layout", "debian"]);
    let rootfs = image.rootfs.display().to_string();
    // podman itself needs these paths.
    shell!(
        "cd '{rootfs}'; mkdir -p run/secrets var/tmp; ln -s /proc/mounts etc/mtab; touch etc/hosts etc/hostname etc/resolv.conf run/.containerenv"
    );
    let before = crate::support::snapshot(&image.rootfs);
    // An overlay without an upper layer. (crun makes a rootfs that is a read-only bind mount writable again.)
    let (empty, read_only) = (
        podman.dir.path().join("empty"),
        podman.dir.path().join("read-only"),
    );
    for dir in [&empty, &read_only] {
        std::fs::create_dir(dir).unwrap();
    }
    let mount = format!(
        "mount -t overlay -o lowerdir='{}':'{rootfs}' none '{}';",
        empty.display(),
        read_only.display()
    );
    let read_only = read_only.display().to_string();
    for cgroup in [Cgroup::AsMounted, Cgroup::WithCrun] {
        let shape = [
            "--read-only",
            "-e",
            "NVIDIA_VISIBLE_DEVICES=1",
            "--rootfs",
            &read_only,
            "sh",
            "-euc",
            WORKS,
        ];
        assert_works(podman.run_after(&mount, cgroup, &shape), &shape);
        assert!(
            crate::support::snapshot(&image.rootfs) == before,
            "{cgroup:?}"
        );
    }
}

/// Podman of a user who was created for this test, with all files below one directory.
pub struct User {
    pub name: String,
    pub dir: tempfile::TempDir,
}

impl User {
    pub fn new() -> Self {
        let user = Self::made();
        user.install();
        user
    }

    /// Creates the user with a home directory, subordinate ids and the group video.
    pub fn made() -> Self {
        // The same test runs for several kernels at once.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "onh-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        // Not below the source tree, which may be in a home directory that only root can enter.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        chmod(dir.path(), 0o755);
        let path = dir.path().display();
        shell!("useradd --home-dir '{path}/home' --create-home --groups video {name}");
        let user = Self { name, dir };
        let name = &user.name;
        shell!(
            "grep -q '^{name}:' /etc/subuid || usermod --add-subuids 900000-965535 --add-subgids 900000-965535 {name}"
        );
        user
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn install(&self) {
        std::fs::copy(HOOK, self.path("hook")).unwrap();
        copy_nvml_program(self.dir.path());
        let mut make = Command::new(source("tests/fake-driver/make-root"));
        let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-driver");
        // Like the nodes of SUSE's driver: the user is in that group.
        make.arg(self.path("driver"))
            .arg("--build")
            .arg(build)
            .args(["--gpus", "2", "--dev-mode", "0666", "--dev-group", "video"]);
        FakeDriver::shared(); // compiled by now
        run(&mut make).ok();
        let image = Image::new(self.dir.path(), &["--layout", "debian"]);
        assert!(image.rootfs.ends_with("image"));
        std::fs::create_dir(self.path("hooks.d")).unwrap();
        self.install_hook("hooks.d/oci-nvidia-hook.json");
        // The configuration of an administrator for root's containers.
        let config = format!(
            "[nvidia-container-cli]\nroot = \"{}\"\nuser = \"root:video\"\nno-cgroups = false\n",
            self.path("driver")
        );
        write_file(self.path("config.toml"), config);
        write_file(self.path("containers.conf"), CONTAINERS_CONF);
        shell!(
            "install -d -o {0} -m 0700 '{1}'",
            self.name,
            self.path("run")
        );
    }

    /// Installs a hook file of the packages as the only one.
    fn install_hook(&self, shipped: &str) {
        let text = read(source(shipped));
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let stage = json["stages"][0].as_str().unwrap().to_owned();
        // The user may run the programs in this directory; on an old kernel, the wrapper is run.
        let mut words = kernels::hook();
        *words.last_mut().unwrap() = self.path("hook");
        if words.len() > 1 {
            std::fs::copy(&words[0], self.path("wrapper")).unwrap();
            words[0] = self.path("wrapper");
        }
        json["hook"]["path"] = words[0].clone().into();
        words.extend(["--config".to_owned(), self.path("config.toml"), stage]);
        json["hook"]["args"] = words.into();
        write_file(self.path("hooks.d/oci-nvidia-hook.json"), json.to_string());
    }

    /// Imports the image.
    pub fn import(&self) {
        let image = self.path("image");
        self.podman(&format!(
            "import - {IMAGE} <\"$(tar -C '{image}' -cf '{image}.tar' . && echo '{image}.tar')\""
        ))
        .ok();
    }

    /// Runs `podman ARGUMENTS` as this user, as after a login.
    pub fn podman(&self, arguments: &str) -> Ran {
        let [home, run_dir, conf, hooks] =
            ["home", "run", "containers.conf", "hooks.d"].map(|name| self.path(name));
        let script = format!(
            "cd /; exec setpriv --reuid {0} --regid {0} --init-groups env -i PATH=\"$PATH\" HOME='{home}' \
             XDG_RUNTIME_DIR='{run_dir}' CONTAINERS_CONF='{conf}' podman --root '{home}/storage' --runroot '{run_dir}/run' \
             --tmpdir '{run_dir}/tmp' --storage-driver vfs --cgroup-manager cgroupfs --runtime runc --events-backend none \
             --hooks-dir '{hooks}' {arguments}",
            self.name
        );
        sh(&script)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // The process that keeps its user namespace.
        let pids = sh(&format!(
            "find '{}' -name pause.pid -exec cat {{}} \\;",
            self.path("run")
        ));
        sh(&format!(
            "for pid in {}; do kill $pid; done",
            pids.stdout.replace('\n', " ")
        ));
        // userdel rejects a user who has processes. They may belong to another test run on a machine with the same uid, so this
        // does not wait for ever.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let left = loop {
            let left = sh(&format!("pgrep -l -u {}", self.name));
            if left.code != Some(0) || std::time::Instant::now() > deadline {
                break left.stdout;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        let deleted = sh(&format!("userdel --force {0}", self.name));
        if !std::thread::panicking() {
            assert_eq!(left, "", "processes of the user {} are left", self.name);
            deleted.ok();
        }
    }
}

fn rootless() {
    let user = User::new();
    user.import();
    let users = [
        "--userns=keep-id",
        "--userns=nomap",
        "--userns=auto",
        "--user 1000:1000",
    ];
    // With the host's /dev it works if the nodes are there: a user cannot create mount points there.
    let all = SHAPES
        .iter()
        .filter(|shape| !shape.contains(&HOSTS_DEV))
        .map(|shape| shape.join(" "));
    let all = all.chain(users.map(str::to_owned));
    user.install_hook("hooks.d/oci-nvidia-hook.json");
    for shape in all {
        // Podman without a log driver can lose the output of a container that ends before podman has attached to it, so
        // the container writes its output to a file. Its user can be any in the user namespace.
        let out = user.path("out");
        shell!("rm -rf '{out}'; install -d -m 0777 '{out}'");
        let arguments = format!(
            "run --rm --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=1 -v '{out}:/out' {shape} {IMAGE} \
             sh -euc '{{ {WORKS}; }} >/out/stdout'"
        );
        let mut ran = user.podman(&arguments);
        ran.stdout = std::fs::read_to_string(format!("{out}/stdout")).unwrap_or_default();
        assert_works(ran, &[&shape]);
    }
    // The user can mount the nodes without the hook, so that the user's namespace counts like the host's.
    let config = read(user.path("config.toml"));
    let locked =
        format!("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n{config}");
    write_file(user.path("config.toml"), locked);
    for (options, gpus) in [
        ("", 0),
        ("--privileged", 1),
        ("--cap-add=SYS_ADMIN", 1),
        ("--privileged --userns=auto", 0),
    ] {
        let arguments =
            format!("{options} -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} sh -c 'nvidia-smi -L || true'");
        let text = user
            .podman(&format!("run --rm --network=none {arguments}"))
            .ok();
        assert_eq!(
            text.matches("UUID: GPU-").count(),
            gpus,
            "{options}: {text}"
        );
    }
    write_file(user.path("config.toml"), config);
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        let arguments =
            format!("--privileged -v {HOSTS_DEV} -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} true");
        let ran = user.podman(&format!(
            "run --rm --network=none --log-driver=none {arguments}"
        ));
        assert_eq!(ran.code, Some(126), "{ran:?}");
        assert_says(&ran.stderr, &["(ONH-047)\nhint: "]);
        assert!(!std::path::Path::new("/dev/nvidiactl").exists());
    }
    // The error for a user who may not open the devices names the missing group.
    shell!("chmod 0600 '{}'/dev/nvidia*", user.path("driver"));
    let ran = user.podman(&format!(
        "run --rm --network=none -e NVIDIA_VISIBLE_DEVICES=1 {IMAGE} true"
    ));
    assert_ne!(ran.code, Some(0));
    assert_says(&ran.stderr, &["(ONH-019)", "hint: "]);
}
