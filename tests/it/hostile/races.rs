//! Directories, files and links of an image that change while the hook works on them (CVE-2025-23359, CVE-2026-24260).

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::NEEDS;
use super::scene::{Scene, is_private};
use crate::driver::{FakeDriver, Waiting};

tests! {
    NEEDS => cve_2025_23359_swapped_after_the_check, cve_2026_24260_swapped_after_resolution,
        swapping_directories_while_500_injections_run;
}

/// A name in an image, and a link to the host that replaces it temporarily. Shell as in a `Case`, with a function `swap NAME` for
/// the naive program, which it calls at the worst moment.
#[derive(Clone, Copy)]
struct Swap {
    name: &'static str,
    /// Below the rootfs
    what: &'static str,
    /// On the host
    link: &'static str,
    naive: &'static str,
    fell: &'static str,
}

/// The objects that a race needs; the mounts of a runtime in an image also exist.
const IMAGE: &str = "cd $rootfs; mkdir -p usr/local/cuda/compat usr/share/vulkan; \
                     : >usr/local/cuda/compat/libcuda.so.575.57.08; ln -s x $rootfs$libdir/libcuda.so";
const MOUNTS: &str = "mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver/nvidia $rootfs/dev/dri; \
                      echo 'ModifyDeviceFiles: 1' >$rootfs/proc/driver/nvidia/params";
const SWAP: &str = "swap() { mv $rootfs/$1 $rootfs/$1.was; mv $rootfs/$1.evil $rootfs/$1; }";

/// Between the check of a compatibility library and its mount by path, it is swapped.
fn cve_2025_23359_swapped_after_the_check() {
    let check = "library=$rootfs/usr/local/cuda/compat/libcuda.so.575.57.08; target=$rootfs$libdir/libcuda.so.575.57.08; \
                 test -f $library && test ! -L $library; : >$target";
    race(
        check,
        60,
        &[
            Swap {
                name: "the directory of libraries",
                what: "usr/local/cuda/compat",
                link: "$canary/compat",
                naive: "swap usr/local/cuda/compat; mount --bind $library $target",
                fell: "grep -q host $target",
            },
            Swap {
                name: "a library",
                what: "usr/local/cuda/compat/libcuda.so.575.57.08",
                link: "/",
                naive: "rm $target; mkdir $target; swap usr/local/cuda/compat/libcuda.so.575.57.08; \
                        mount --rbind $library $target",
                fell: "test -f $target$canary/file",
            },
            Swap {
                name: "the directory that they are mounted in",
                what: "usr/lib/x86_64-linux-gnu",
                link: "$canary/compat",
                naive: "echo evil >$library; swap usr/lib/x86_64-linux-gnu; mount --bind $library $target",
                fell: "grep -q evil $canary/compat/libcuda.so.575.57.08",
            },
        ],
    );
}

/// Between the resolution of a path and its use, a part of it is swapped.
fn cve_2026_24260_swapped_after_resolution() {
    let resolve =
        "at() { echo $rootfs$(chroot $rootfs readlink -f $1); }; cp -a $canary/file $canary/new";
    race(
        resolve,
        30,
        &[
            Swap {
                name: "mount point",
                what: "usr/bin",
                link: "$canary",
                naive: "point=$(at /usr/bin); swap usr/bin; : >$point/nvidia-smi",
                fell: "test -e $canary/nvidia-smi",
            },
            Swap {
                name: "directory",
                what: "usr/share/vulkan",
                link: "$canary",
                naive: "point=$(at /usr/share/vulkan); swap usr/share/vulkan; mkdir $point/icd.d",
                fell: "test -d $canary/icd.d",
            },
            Swap {
                name: "symlink",
                what: "usr/lib/x86_64-linux-gnu",
                link: "$canary/usr/lib64",
                naive: "point=$(at $libdir); swap usr/lib/x86_64-linux-gnu; ln -s x $point/libnvidia-ml.so.1",
                fell: "test -L $canary/usr/lib64/libnvidia-ml.so.1",
            },
            Swap {
                name: "symlink that is replaced",
                what: "usr/lib/x86_64-linux-gnu/libcuda.so",
                link: "$canary/usr/lib64",
                naive: "swap usr/lib/x86_64-linux-gnu/libcuda.so; ln -sf libcuda.so.1 $rootfs$libdir/libcuda.so",
                fell: "test -L $canary/usr/lib64/libcuda.so.1",
            },
            Swap {
                name: "drop-in and cache",
                what: "etc",
                link: "$canary/etc",
                naive: "point=$(at /etc); swap etc; echo x >$point/ld.so.conf.d/x.conf; : >$point/ld.so.cache",
                fell: "test -e $canary/etc/ld.so.conf.d/x.conf; test ! -s $canary/etc/ld.so.cache",
            },
            Swap {
                name: "cache",
                what: "etc/ld.so.cache",
                link: "$canary/etc/ld.so.cache",
                naive: "test ! -L $rootfs/etc/ld.so.cache; swap etc/ld.so.cache; : >$rootfs/etc/ld.so.cache",
                fell: "test ! -s $canary/etc/ld.so.cache",
            },
            Swap {
                name: "node",
                what: "dev/dri",
                link: "$canary",
                naive: "point=$(at /dev/dri); swap dev/dri; : >$point/card1",
                fell: "test -e $canary/card1",
            },
            Swap {
                name: "params",
                what: "proc/driver/nvidia",
                link: "$canary/nvidia",
                naive: "point=$(at /proc/driver/nvidia)/params; swap proc/driver/nvidia; mount --bind /dev/null $point",
                fell: "test ! -s $canary/nvidia/params",
            },
        ],
    );
}

/// Runs both halves for each: the naive program once, the hook `count` times.
fn race(check: &str, count: usize, swaps: &[Swap]) {
    for swap in swaps {
        let plant = format!("ln -s {} $rootfs/{}.evil", swap.link, swap.what);
        let scene = Scene::new("debian", IMAGE);
        let ran = scene.naive(&[MOUNTS, &plant, SWAP, check, swap.naive, swap.fell].join("\n"));
        assert_eq!(
            ran.code,
            Some(0),
            "{}: the naive program did not fall: {ran:?}",
            swap.name
        );

        let mut ends = Ends::default();
        while ends.total() < count {
            let scene = injections(&plant, &[swap.what], 5, &mut ends);
            if ends.total() == count {
                works_now(&scene);
            }
        }
        assert!(ends.swaps >= 100, "{}: {ends:?}: no race", swap.name);
    }
}

/// Calls the hook that many times for one new container, while `names` in it are swapped. Files that one call leaves in an image
/// reduce the work of the next one, hence the small number.
#[track_caller]
fn injections(plant: &str, names: &[&str], count: usize, ends: &mut Ends) -> Scene {
    let scene = Scene::new("debian", IMAGE);
    let container = scene.start(&format!("{MOUNTS}\n{plant}"));
    let before = scene.host(&container);
    let pairs = pairs(&scene, &container, names);
    ends.swaps += while_swapping(&pairs, || {
        for _ in 0..count {
            match scene.hook(&container).code {
                Some(0) => ends.ok += 1,
                _ => ends.failed += 1,
            }
        }
    });
    scene.is_untouched(&container, &before, &format!("{names:?}: {ends:?}"));
    scene.is_out_of_reach(&container);
    drop(container);
    scene
}

/// Files that disturbed calls left in an image do not stop the next one.
#[track_caller]
fn works_now(scene: &Scene) {
    let container = scene.start(MOUNTS);
    container.hook(&FakeDriver::shared().config).ok();
    container.output("nvidia-smi -L && probe-dlopen libcuda.so.1");
    assert!(is_private(&container), "{}", container.mountinfo());
}

/// The names and their malicious counterparts, in the container's own mounts.
fn pairs(scene: &Scene, container: &Waiting, names: &[&str]) -> Vec<[PathBuf; 2]> {
    let inside = format!("/proc/{}/root{}", container.pid(), scene.rootfs.display());
    names
        .iter()
        .map(|name| {
            [
                format!("{inside}/{name}").into(),
                format!("{inside}/{name}.evil").into(),
            ]
        })
        .collect()
}

/// Runs `body` while all pairs are swapped again and again, and returns the number of swaps.
fn while_swapping(pairs: &[[PathBuf; 2]], body: impl FnOnce()) -> usize {
    let (stop, times) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = 1u64;
            let mut pause = |below: u64| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                std::thread::sleep(Duration::from_micros((random >> 33) % below));
            };
            // A call takes some milliseconds: during some calls many names change, during others none.
            for long in [100, 1000, 10_000]
                .into_iter()
                .cycle()
                .take_while(|_| !stop.load(Ordering::Relaxed))
            {
                for [a, b] in pairs {
                    exchange(a, b);
                    pause(200);
                }
                for [a, b] in pairs {
                    exchange(a, b);
                }
                times.fetch_add(2 * pairs.len(), Ordering::Relaxed);
                pause(long);
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        stop.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    times.load(Ordering::Relaxed)
}

fn exchange(a: &Path, b: &Path) {
    renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)
        .unwrap_or_else(|error| panic!("{a:?}, {b:?}: {error}"));
}

/// The results of the calls of the hook.
#[derive(Debug, Default)]
struct Ends {
    ok: usize,
    failed: usize,
    swaps: usize,
}

impl Ends {
    fn total(&self) -> usize {
        self.ok + self.failed
    }
}

/// The vulnerabilities of the two tests above at the same time: libraries, programs, /etc, /dev and /proc are directories, links
/// to the host, and other directories.
fn swapping_directories_while_500_injections_run() {
    const NAMES: [&str; 7] = [
        "usr/lib/x86_64-linux-gnu",
        "usr/bin",
        "usr/share/vulkan",
        "etc",
        "dev",
        "proc/driver/nvidia",
        "usr/local/cuda/compat",
    ];
    let plant = "cd $rootfs; ln -s $canary/usr/lib64 usr/lib/x86_64-linux-gnu.evil; ln -s $canary usr/share/vulkan.evil; \
                 mkdir usr/bin.evil; ln -s $up$canary/etc etc.evil; ln -s /proc/self/root$canary dev.evil; \
                 ln -s $canary/nvidia proc/driver/nvidia.evil; ln -s . usr/local/cuda/compat.evil";
    let start_time = Instant::now();
    let mut ends = Ends::default();
    for _ in 0..50 {
        let scene = injections(plant, &NAMES, 10, &mut ends);
        if ends.total() % 100 == 0 {
            works_now(&scene);
        }
    }
    assert!(
        ends.total() == 500 && ends.ok > 0 && ends.failed > 0,
        "{ends:?}: no race"
    );
    assert!(
        start_time.elapsed() < Duration::from_secs(120),
        "{ends:?} took {:?}",
        start_time.elapsed()
    );
}
