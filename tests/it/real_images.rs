//! Root file systems as distributions make them, in each mode: a program finds libcuda with and without the linker cache, after ldconfig,
//! in a read-only container, and as a user.
//!
//! With `--nocapture`, the test prints the table of docs/engines.md. `IMAGES=bookworm,noble` selects releases; the host has its driver
//! in /usr/lib64, as openSUSE does, so no path of an image is one of the host by chance.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cdi::cdi;
use crate::cdi_containers::only_spec;
use crate::driver::FakeDriver;
use crate::engine::{Cgroup, Podman};
use crate::support::{HOOK, Need, Ran, read, run, scratch, source};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Debian,
    Need::Programs(&["podman", "runc", "cc"]),
];

tests! {
    NEEDS => each_image_in_each_mode, images_without_glibc;
}

/// A root file system, and how its programs are started.
struct Image {
    name: String,
    rootfs: PathBuf,
    /// A program of the image and its arguments, which the loader runs
    program: &'static str,
    /// The loader with the option that ignores the linker cache
    without_cache: String,
    has_shell: bool,
    /// Whether the loader reads the linker cache
    reads_cache: bool,
}

/// A layout that is made from the files of Debian, with a script that runs in the new root file system. `$0` is Debian's.
struct Layout {
    name: &'static str,
    script: &'static str,
    program: &'static str,
    without_cache: &'static str,
    has_shell: bool,
    reads_cache: bool,
}

const LIBRARY_DIR: &str = if cfg!(target_arch = "aarch64") {
    "aarch64-linux-gnu"
} else {
    "x86_64-linux-gnu"
};
const LOADER: &str = if cfg!(target_arch = "aarch64") {
    "/lib/ld-linux-aarch64.so.1"
} else {
    "/lib64/ld-linux-x86-64.so.2"
};

const LAYOUTS: [Layout; 3] = [
    Layout {
        name: "Arch: one library directory",
        script: "mkdir -p usr/lib usr/bin etc; ln -s usr/lib lib; ln -s usr/lib lib64; ln -s lib usr/lib64; ln -s usr/bin bin; ln -s usr/bin sbin; \
            cp -a \"$0\"/usr/bin/* usr/bin; cp -a \"$0\"/usr/sbin/ldconfig usr/bin; cp -a \"$0\"/usr/lib/$DIR/*.so* usr/lib; \
            cp -aL \"$0/usr/lib/$DIR/${LOADER##*/}\" usr/lib; : >etc/ld.so.conf; ldconfig -r .",
        program: "/bin/true",
        without_cache: "",
        has_shell: true,
        reads_cache: true,
    },
    Layout {
        name: "distroless: libc and a program, no cache",
        script: "mkdir -p usr/bin usr/lib/$DIR etc; ln -s usr/lib lib; [ ! -e \"$0/lib64\" ] || { mkdir usr/lib64; ln -s usr/lib64 lib64; }; \
            cp \"$0/bin/true\" usr/bin/true; cd \"$0/usr/lib/$DIR\"; \
            cp libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libgcc_s.so.1 \"$OLDPWD/usr/lib/$DIR\"; cd \"$OLDPWD\"; \
            cp -L \"$0/usr/lib/$DIR/${LOADER##*/}\" \".$LOADER\"; echo 12 >etc/debian_version",
        program: "/usr/bin/true",
        without_cache: "",
        has_shell: false,
        reads_cache: true,
    },
    Layout {
        name: "NixOS: /nix/store, with LD_LIBRARY_PATH",
        script: "mkdir -p nix/store/glibc/lib nix/store/coreutils/bin etc; cp -a \"$0\"/usr/lib/$DIR/*.so* nix/store/glibc/lib; \
            cp -L \"$0/usr/lib/$DIR/${LOADER##*/}\" nix/store/glibc/lib/ld.so; cp \"$0/bin/true\" nix/store/coreutils/bin/true",
        program: "/nix/store/coreutils/bin/true",
        without_cache: "/nix/store/glibc/lib/ld.so --inhibit-cache --library-path /nix/store/glibc/lib:/usr/lib64",
        has_shell: false,
        reads_cache: false,
    },
];

/// Creates the root file systems of these releases, which later runs use again, and the layouts.
fn images(dir: &Path) -> Vec<Image> {
    let releases = std::env::var("IMAGES").unwrap_or_else(|_| "bookworm".to_owned());
    let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join("images");
    let mut images = Vec::new();
    for suite in releases.split(',') {
        let rootfs = store.join(suite);
        run(Command::new(source("tests/engines/make-root"))
            .arg(suite)
            .arg(&rootfs))
        .ok();
        let release = read(rootfs.join("etc/os-release"));
        let name = release
            .lines()
            .find_map(|line| line.strip_prefix("PRETTY_NAME="))
            .unwrap();
        images.push(Image {
            name: name.trim_matches('"').to_owned(),
            rootfs,
            program: "/bin/true",
            without_cache: format!("{LOADER} --inhibit-cache"),
            has_shell: true,
            reads_cache: true,
        });
    }
    let debian = images[0].rootfs.clone();
    for layout in LAYOUTS {
        let rootfs = dir.join(images.len().to_string());
        std::fs::create_dir(&rootfs).unwrap();
        run(Command::new("sh")
            .args(["-euc", layout.script])
            .arg(&debian)
            .current_dir(&rootfs)
            .env("DIR", LIBRARY_DIR)
            .env("LOADER", LOADER))
        .ok();
        let without_cache = match layout.without_cache {
            "" => format!("{LOADER} --inhibit-cache"),
            given => given.to_owned(),
        };
        images.push(Image {
            name: layout.name.to_owned(),
            rootfs,
            program: layout.program,
            without_cache,
            has_shell: layout.has_shell,
            reads_cache: layout.reads_cache,
        });
    }
    images
}

/// The loader prints what it maps, instead of starting the program.
const TRACE: [&str; 4] = [
    "-e",
    "LD_TRACE_LOADED_OBJECTS=1",
    "-e",
    "LD_PRELOAD=libcuda.so.1",
];

/// A container with a request.
struct Check<'a> {
    podman: &'a Podman,
    before: &'a str,
    /// How the mode is requested
    request: &'a [&'a str],
    image: &'a Image,
}

impl Check<'_> {
    fn run(&self, options: &[&str], words: &[&str]) -> Ran {
        let rootfs = format!("{}:O", self.image.rootfs.display());
        let mut arguments = vec![
            "-e",
            "PATH=/usr/bin:/usr/sbin:/bin:/sbin",
            "-e",
            "NVIDIA_DRIVER_CAPABILITIES=all",
        ];
        arguments.extend(self.request);
        arguments.extend(options);
        arguments.extend(["--rootfs", &rootfs]);
        arguments.extend(words);
        self.podman
            .run_after(self.before, Cgroup::AsMounted, &arguments)
    }

    /// Reports what the loader prints about libcuda. In its trace mode, it maps all libraries and names each that it lacks.
    fn finds(&self, options: &[&str], words: &[&str]) -> bool {
        let ran = self.run(options, words);
        let is_mapped = |line: &str| line.contains("libcuda.so") && line.contains("(0x");
        let found = ran.stdout.lines().any(is_mapped) && !ran.stdout.contains("not found");
        if !found {
            println!("{}, {options:?}, {words:?}: {ran:?}", self.image.name);
        }
        found
    }

    /// Returns what the container has of the driver: the name and checksum of each file, in whatever directory it is, and the type, mode,
    /// owner and number of each node. `names` are the names of the driver's files.
    fn contents(&self, names: &[String]) -> String {
        let names: Vec<_> = names.iter().map(|name| format!("-name '{name}'")).collect();
        let script = format!(
            "stat -c '%n %F %a %u:%g %t:%T' /dev/nvidia* | sort; \
             find /usr /etc /lib /opt ! -type d \\( {} \\) -exec sha256sum {{}} + | sed 's, .*/, ,' | sort -u",
            names.join(" -o ")
        );
        self.run(&[], &["sh", "-c", &script]).ok()
    }

    /// Returns a row of the table, and whether each start has succeeded.
    fn row(&self, mode: &str) -> (String, bool) {
        let image = self.image;
        let mut without_cache: Vec<&str> = image.without_cache.split(' ').collect();
        without_cache.push(image.program);
        let in_shell = format!(
            "ldconfig; LD_TRACE_LOADED_OBJECTS=1 LD_PRELOAD=libcuda.so.1 {}",
            image.program
        );
        let mut cached = vec![image.program];
        if !image.reads_cache {
            cached.clone_from(&without_cache);
        }
        let with = |option: &'static [&'static str]| [&TRACE[..], option].concat();
        let cells = [
            image.reads_cache.then(|| self.finds(&TRACE, &cached)),
            Some(self.finds(&TRACE, &without_cache)),
            image
                .has_shell
                .then(|| self.finds(&[], &["sh", "-c", &in_shell])),
            Some(self.finds(&with(&["--read-only"]), &cached)),
            Some(self.finds(&with(&["--user=1000:1000"]), &cached)),
        ];
        let mut row = format!("| {} | {mode} |", image.name);
        for cell in &cells {
            let text = match cell {
                Some(true) => "yes",
                Some(false) => "no",
                None => "",
            };
            write!(row, " {text} |").unwrap();
        }
        (row, !cells.contains(&Some(false)))
    }
}

const MODES: [&str; 2] = ["hook", "CDI"];

/// Enables a mode. Returns the script that runs before Podman, and how the mode is requested.
fn enable<'a>(
    mode: &str,
    podman: &Podman,
    fake: &FakeDriver,
    with_spec: &'a str,
) -> (&'a str, [&'static str; 2]) {
    podman.remove_hooks();
    if mode == "CDI" {
        return (with_spec, ["--device", "nvidia.com/gpu=all"]);
    }
    podman.install_hook(&fake.config);
    ("", ["-e", "NVIDIA_VISIBLE_DEVICES=all"])
}

fn each_image_in_each_mode() {
    let (dir, podman) = (scratch(), Podman::new());
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let spec = dir.path().join("nvidia.yaml");
    let path = spec.to_str().unwrap();
    cdi(&fake, &["generate", "--hook-path", HOOK, "--output", path]).ok();
    let with_spec = only_spec(&spec);
    let images = images(dir.path());
    let names = fake.file_names();
    let mut contents: Vec<Vec<String>> = vec![Vec::new(); images.len()];
    let (mut table, mut failed) = (String::new(), Vec::new());
    for mode in MODES {
        let (before, request) = enable(mode, &podman, &fake, &with_spec);
        // The check must be able to fail.
        let control = Check {
            podman: &podman,
            before: "",
            request: &["-e", "NVIDIA_VISIBLE_DEVICES=void"],
            image: &images[0],
        };
        assert!(!control.finds(&TRACE, &[images[0].program]));
        for (image, contents) in images.iter().zip(&mut contents) {
            let check = Check {
                podman: &podman,
                before,
                request: &request,
                image,
            };
            let (row, is_complete) = check.row(mode);
            writeln!(table, "{row}").unwrap();
            if image.has_shell {
                contents.push(check.contents(&names));
            }
            if !is_complete {
                failed.push(row);
            }
        }
    }
    println!("{table}");
    for (image, contents) in images.iter().zip(&contents) {
        for other in contents.iter().skip(1) {
            assert_eq!(&contents[0], other, "{}: the modes differ", image.name);
        }
        let is_complete = |text: &String| {
            text.contains("/dev/nvidia0 character") && text.contains(" libcuda.so.1")
        };
        assert!(
            contents.iter().all(is_complete),
            "{}: {contents:?}",
            image.name
        );
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Alpine's loader and shell, from the packages of Debian, and an image of which all programs are static.
const WITHOUT_GLIBC: [(&str, &str, &str); 2] = [
    (
        "musl and busybox, as Alpine",
        "mkdir -p bin lib usr/lib etc; cp -aL $(find \"$0\" -name 'ld-musl-*.so.1') lib; cp $(find \"$0\" -name busybox -type f -perm -100) bin; \
            ln -s busybox bin/sh; ln -s busybox bin/ls; ln -s busybox bin/find; touch etc/alpine-release",
        "the image is built on musl",
    ),
    (
        "static programs only, as busybox",
        "mkdir -p bin; cp $(find \"$0\" -name busybox -type f -perm -100) bin; for name in sh ls find; do ln -s busybox bin/$name; done",
        "the image has no dynamic loader",
    ),
];

/// Unpacks the packages of Debian, and updates the lists of packages only if they are missing.
const UNPACK: &str = "get() { apt-get download -qq musl busybox-static; }; get || { apt-get update -qq; get; }; \
    for file in *.deb; do dpkg-deb -x $file .; done";

/// The driver requires glibc. The container starts in each mode, has its nodes and files, and ONH-306 states what cannot work.
fn images_without_glibc() {
    let (dir, podman) = (scratch(), Podman::new());
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let spec = dir.path().join("nvidia.yaml");
    let path = spec.to_str().unwrap();
    cdi(&fake, &["generate", "--hook-path", HOOK, "--output", path]).ok();
    let with_spec = only_spec(&spec);
    let packages = dir.path().join("packages");
    std::fs::create_dir(&packages).unwrap();
    let mut unpack = Command::new("sh");
    unpack.args(["-euc", UNPACK]).current_dir(&packages);
    run(&mut unpack).ok();
    for (name, script, says) in WITHOUT_GLIBC {
        // overlayfs reads a comma in a path as the next option.
        let rootfs = dir.path().join(name.split(' ').next().unwrap());
        std::fs::create_dir(&rootfs).unwrap();
        let mut make = Command::new("sh");
        make.args(["-euc", script]).arg(&packages);
        run(make.current_dir(&rootfs)).ok();
        for mode in MODES {
            let (before, request) = enable(mode, &podman, &fake, &with_spec);
            let script = format!(
                "{before}\n\"$@\" run --name web --network=none --log-driver=none {} --rootfs '{}:O' \
                   sh -c 'ls /dev/nvidia0; find / -xdev -name libcuda.so.1'\n\
                 {HOOK} why web; \"$@\" rm web >/dev/null",
                request.join(" "),
                rootfs.display()
            );
            let ran = podman.shell(Cgroup::AsMounted, &script);
            let text = ran.stdout.clone();
            ran.ok();
            for part in [
                "/dev/nvidia0\n",
                "/libcuda.so.1\n",
                "ONH-306 warning: ",
                says,
            ] {
                assert!(text.contains(part), "{name}, {mode}: {part} in {text}");
            }
        }
    }
}
