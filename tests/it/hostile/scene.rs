//! A hostile image next to a canary of the host, and the conditions that must hold for both.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::driver::{FakeDriver, Image, Waiting};
use crate::support::{HOOK, OWN_PROCESSES, Ran, fingerprint, read, run, scratch, sh, shell};

/// The resources that an image may cost the hook; most cases need a hundredth of them.
const BOUND: Duration = Duration::from_secs(10);

/// One hostile image, for both halves of a test. All fields except for the name are shell; [`Scene::script`] lists the variables.
/// `$$` is the container's init in `mounts`.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    /// Creates the image.
    pub image: &'static str,
    /// The mounts of a runtime in the image.
    pub mounts: &'static str,
    /// The vulnerable program, run on that image.
    pub naive: &'static str,
    /// True if that program was vulnerable.
    pub fell: &'static str,
    pub ours: Ours,
}

/// The expected result of the hook with an image.
#[derive(Clone, Copy, Debug)]
pub enum Ours {
    /// The driver works in the container.
    Works,
    /// The container starts, with this message; its contents can block its own loader.
    Warns(&'static str),
    /// The image is unusable; one line with this text gives the reason.
    Refuses(&'static str),
}

/// Fields that most cases do not have.
pub const CASE: Case = Case {
    name: "",
    image: "",
    mounts: "",
    naive: "",
    fell: "",
    ours: Ours::Works,
};

/// An image, and a directory `host` next to it that the image must not reach.
pub struct Scene {
    dir: tempfile::TempDir,
    layout: &'static str,
    pub canary: PathBuf,
    pub rootfs: PathBuf,
}

impl Scene {
    /// Creates an image of this layout, changed by the shell script `image`.
    pub fn new(layout: &'static str, image: &str) -> Self {
        let dir = scratch();
        let (canary, rootfs) = (dir.path().join("host/canary"), dir.path().join("image"));
        shell!(
            "mkdir -p '{0}/compat' '{0}/etc/ld.so.conf.d' '{0}/usr/lib64' '{0}/nvidia'; cp -a '{1}' '{2}'; cd '{0}'; \
             for file in file etc/ld.so.cache etc/ld.so.conf compat/libcuda.so.575.57.08 nvidia/params; do \
               echo host >\"$file\"; \
             done",
            canary.display(),
            base_image(layout).display(),
            rootfs.display()
        );
        let scene = Self {
            dir,
            layout,
            canary,
            rootfs,
        };
        scene.sh(image).ok();
        scene
    }

    /// The directory of the scene.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns `script` with the variables that it can use.
    pub fn script(&self, script: &str) -> String {
        let libdir = match self.layout {
            "debian" => "/usr/lib/x86_64-linux-gnu",
            _ => "/usr/lib64",
        };
        format!(
            "rootfs='{}'; canary='{}'; libdir={libdir}; driver=535.183.01; up={}\n{script}\n",
            self.rootfs.display(),
            self.canary.display(),
            "../".repeat(20)
        )
    }

    /// Runs a script.
    pub fn sh(&self, script: &str) -> Ran {
        sh(&self.script(script))
    }

    /// Runs a script in a mount and PID namespace that end with it.
    pub fn naive(&self, script: &str) -> Ran {
        let mut unshare = Command::new("unshare");
        unshare.args(OWN_PROCESSES);
        run(unshare.args(["sh", "-euc", &self.script(script)]))
    }

    /// The container, which requests all GPUs and all capabilities.
    pub fn start(&self, mounts: &str) -> Waiting {
        let env = [
            "NVIDIA_VISIBLE_DEVICES=all",
            "NVIDIA_DRIVER_CAPABILITIES=all",
        ];
        Waiting::start(self.dir(), &self.rootfs, &env, &self.script(mounts))
    }

    /// Returns everything that must not change: all files except for files of the image and the driver, and the mounts of the
    /// host; in the container's mount namespace, the mounts outside of its rootfs.
    pub fn host(&self, container: &Waiting) -> String {
        let mounts = read("/proc/thread-self/mountinfo");
        let inside = container.mountinfo();
        let is_outside = |line: &&str| {
            line.split(' ')
                .nth(4)
                .is_some_and(|at| !Path::new(at).starts_with(&self.rootfs))
        };
        let outside: Vec<_> = inside.lines().filter(is_outside).collect();
        let (files, driver) = (
            fingerprint(self.dir(), "image"),
            fingerprint(&FakeDriver::shared().root, ""),
        );
        [files, driver, mounts, outside.join("\n")].join("\n")
    }

    /// Checks that nothing of it changed.
    #[track_caller]
    pub fn is_untouched(&self, container: &Waiting, before: &str, what: &str) {
        let after = self.host(container);
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
        let (was, is) = (lines(before), lines(&after));
        let changed: Vec<_> = was.symmetric_difference(&is).collect();
        assert!(before == after, "{what}: on the host {changed:#?}");
    }

    /// Calls the hook in the image's own directory, like some stages.
    #[track_caller]
    pub fn hook(&self, container: &Waiting) -> Ran {
        let mut hook = Command::new("timeout");
        hook.args(["--signal=KILL", "60", HOOK])
            .current_dir(&self.rootfs);
        let start = Instant::now();
        let ran = container.call(&mut hook, &FakeDriver::shared().config);
        assert!(
            start.elapsed() < BOUND,
            "took {:?}: {ran:?}",
            start.elapsed()
        );
        assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
        if ran.code == Some(1) {
            let said = ran
                .stderr
                .lines()
                .filter(|line| line.starts_with("oci-nvidia-hook: "));
            let errors = said.filter(|line| !line.contains(": warning: ")).count();
            assert!(errors == 1 && ran.stderr.len() < 4096, "{ran:?}");
        }
        ran
    }

    /// Checks that the container has no file of the host.
    #[track_caller]
    pub fn is_out_of_reach(&self, container: &Waiting) {
        let canary = ids(&self.dir().join("host"), usize::MAX);
        let root = std::fs::metadata("/").unwrap();
        let inside = PathBuf::from(format!(
            "/proc/{}/root{}",
            container.pid(),
            self.rootfs.display()
        ));
        let inside = ids(&inside, 100_000);
        assert!(
            inside.len() > 20 && inside.len() < 100_000,
            "{} files in the container",
            inside.len()
        );
        assert!(
            !inside.contains(&(root.dev(), root.ino())),
            "the host's root in\n{}",
            container.mountinfo()
        );
        assert!(
            inside.is_disjoint(&canary),
            "the canary in\n{}",
            container.mountinfo()
        );
    }
}

/// Runs both halves for each case.
pub fn check(layout: &'static str, cases: &[Case]) {
    for case in cases {
        let scene = Scene::new(layout, case.image);
        let ran = scene.naive(&format!("{}\n{}\n{}", case.mounts, case.naive, case.fell));
        assert_eq!(
            ran.code,
            Some(0),
            "{}: the naive program did not fall: {ran:?}",
            case.name
        );

        let scene = Scene::new(layout, case.image);
        let container = scene.start(case.mounts);
        let before = scene.host(&container);
        let ran = scene.hook(&container);
        scene.is_untouched(&container, &before, &format!("{}: {ran:?}", case.name));
        scene.is_out_of_reach(&container);
        match case.ours {
            Ours::Works => {
                assert_eq!(ran.code, Some(0), "{}: {ran:?}", case.name);
                let seen = container.exec("nvidia-smi -L && probe-dlopen libnvidia-ml.so.1");
                assert!(
                    seen.code == Some(0) && seen.stdout.starts_with("GPU 0: "),
                    "{}: {seen:?}",
                    case.name
                );
            }
            Ours::Warns(what) => {
                assert!(
                    ran.code == Some(0) && ran.stderr.contains(what),
                    "{}: {ran:?}",
                    case.name
                );
            }
            Ours::Refuses(why) => {
                let stderr = ran.failed(1);
                assert!(
                    stderr.contains(why),
                    "{}: {why:?} is not in\n{stderr}",
                    case.name
                );
            }
        }
    }
}

/// Returns whether none of its mounts has peers elsewhere.
pub fn is_private(container: &Waiting) -> bool {
    container
        .mountinfo()
        .lines()
        .all(|line| line.split(' ').nth(6) == Some("-"))
}

/// Returns device and inode of everything below `dir`, including `dir` itself, up to a maximum number.
fn ids(dir: &Path, limit: usize) -> BTreeSet<(u64, u64)> {
    let mut found = BTreeSet::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        let Ok(metadata) = std::fs::symlink_metadata(&path) else {
            continue;
        };
        // A directory that is mounted in two places is walked once, and procfs does not belong to the container.
        let is_new = found.insert((metadata.dev(), metadata.ino()));
        if is_new && metadata.is_dir() && found.len() < limit && !is_procfs(&path) {
            todo.extend(
                std::fs::read_dir(&path)
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|entry| entry.path()),
            );
        }
    }
    found
}

fn is_procfs(dir: &Path) -> bool {
    rustix::fs::statfs(dir).is_ok_and(|fs| fs.f_type == rustix::fs::PROC_SUPER_MAGIC)
}

/// Returns one image for each layout, because copying is fast.
fn base_image(layout: &str) -> &'static Path {
    static DEBIAN: OnceLock<(tempfile::TempDir, Image)> = OnceLock::new();
    static LIB64: OnceLock<(tempfile::TempDir, Image)> = OnceLock::new();
    let cell = if layout == "debian" { &DEBIAN } else { &LIB64 };
    let (_, image) = cell.get_or_init(|| {
        let dir = scratch();
        let image = Image::new(dir.path(), &["--layout", layout]);
        (dir, image)
    });
    &image.rootfs
}
