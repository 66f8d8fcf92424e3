//! Compares the linker cache with the host's real ldconfig and the real dynamic loader.
//!
//! Needs `cc` and `/sbin/ldconfig`. The loader runs in a chroot, which needs root.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use nvidia_host::driver::ldcache::{Arch, Cache, CacheFormat, NewEntry, parse};

use crate::support::{Need, write_file};

const NEEDS: &[Need] = &[Need::Programs(&["cc", "/sbin/ldconfig"])];
const NEEDS_ROOT: &[Need] = &[Need::Root, Need::Programs(&["cc", "/sbin/ldconfig"])];

tests! {
    NEEDS => reads_and_rewrites_the_hosts_cache_as_ldconfig_sees_it, reads_every_layout_that_ldconfig_writes,
        ldconfig_lists_what_was_merged;
    NEEDS_ROOT => the_loader_finds_ours_through_the_cache;
}

/// Our libraries: the image also has two of them, and all are outside of the loader's default directories.
const OURS: [&str; 5] = [
    "libours.so.1",
    "libdriver.so.1",
    "libx7.so.13",
    "libx07-a.so",
    "libx6.so.3",
];
/// The image's libraries: in a glibc-hwcaps directory and outside, and many names around ours for the binary search.
const THEIRS: [&str; 4] = ["libother.so.1", "libx1.so.1", "libx12.so.12", "libx7.so.12"];

const LAYOUTS: [(&str, CacheFormat); 3] = [
    ("old", CacheFormat::Old),
    ("compat", CacheFormat::Compat),
    ("new", CacheFormat::New),
];

const LIBRARY: &str = "const char *which(void) { return WHICH; }\n";
/// A program that prints for each name which library it loaded.
const PROBE: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        void *library = dlopen(argv[i], RTLD_NOW);
        const char *(*which)(void) = library ? (const char *(*)(void))dlsym(library, "which") : 0;
        printf("%s %s\n", argv[i], which ? which() : "none");
    }
}
"#;

fn run(command: &mut Command) -> String {
    let out = command
        .env("LC_ALL", "C")
        .output()
        .expect("start a program");
    assert!(
        out.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).expect("UTF-8")
}

fn ldconfig() -> Command {
    Command::new("/sbin/ldconfig")
}

/// (name, path) as `ldconfig -p` lists them, which is the order of the file.
fn listed(text: &str) -> Vec<(String, PathBuf)> {
    text.lines()
        .filter_map(|line| {
            let (name, path) = line.strip_prefix('\t')?.split_once(" => ")?;
            Some((name.split_once(" (")?.0.to_owned(), path.into()))
        })
        .collect()
}

fn entries(cache: &Cache<'_>) -> Vec<(String, PathBuf)> {
    cache
        .entries()
        .iter()
        .map(|entry| {
            (
                entry.name.to_str().unwrap().to_owned(),
                entry.path.to_owned(),
            )
        })
        .collect()
}

/// A root directory with a C library, a probe, libraries of an image, and ours.
struct Image(TempDir);

impl Image {
    fn new() -> Self {
        let image = Self(TempDir::new().unwrap());
        for dir in [
            "etc",
            "src",
            "opt/image/glibc-hwcaps/x86-64-v2",
            "opt/driver",
        ] {
            fs::create_dir_all(image.path(dir)).unwrap();
        }
        write_file(image.path("src/library.c"), LIBRARY);
        write_file(image.path("src/probe.c"), PROBE);

        let plain = image.path("opt/image/libother.so.1");
        let special = image.path("opt/image/glibc-hwcaps/x86-64-v2/libother.so.1");
        image.compile("image", &plain);
        image.compile("v2", &special);
        for name in ["libours.so.1", "libx6.so.3"] {
            fs::copy(&special, special.with_file_name(name)).unwrap();
        }
        fs::copy(&plain, plain.with_file_name("libours.so.1")).unwrap();
        for name in 1..=12 {
            for version in 1..=12 {
                fs::copy(
                    &plain,
                    plain.with_file_name(format!("libx{name}.so.{version}")),
                )
                .unwrap();
            }
        }
        for name in OURS {
            image.compile("ours", &image.path("opt/driver").join(name));
        }
        run(Command::new("cc")
            .arg(image.path("src/probe.c"))
            .arg("-o")
            .arg(image.path("probe"))
            .arg("-ldl"));

        // Real libraries if the host has them: the C library must also be found without a cache.
        let bytes = fs::read("/etc/ld.so.cache").expect("read the host's cache");
        let host = parse(&bytes).unwrap();
        let mut dirs = vec![PathBuf::from("/opt/image")];
        for name in [
            "libc.so.6",
            "libm.so.6",
            "libdl.so.2",
            "libpthread.so.0",
            "libgcc_s.so.1",
        ] {
            if let Some(entry) = host.lookup(OsStr::new(name), Arch::native()) {
                image.copy(entry.path);
                dirs.extend(entry.path.parent().map(Path::to_owned));
            }
        }
        for loader in ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"] {
            if Path::new(loader).is_file() {
                image.copy(Path::new(loader));
            }
        }
        dirs.sort();
        dirs.dedup();
        let conf: Vec<_> = dirs
            .iter()
            .map(|dir| format!("{}\n", dir.display()))
            .collect();
        write_file(image.path("etc/ld.so.conf"), conf.concat());
        image
    }

    fn path(&self, below: &str) -> PathBuf {
        self.0.path().join(below)
    }

    fn cache_path(&self) -> PathBuf {
        self.path("etc/ld.so.cache")
    }

    /// Compiles a library without a SONAME, so that copies of it are listed by their file names.
    fn compile(&self, which: &str, to: &Path) {
        let define = format!("-DWHICH=\"{which}\"");
        run(Command::new("cc")
            .args(["-shared", "-fPIC", &define, "-o"])
            .arg(to)
            .arg(self.path("src/library.c")));
    }

    fn copy(&self, from: &Path) {
        let to = self.0.path().join(from.strip_prefix("/").unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    }

    fn ldconfig(&self, args: &[&str]) -> String {
        run(ldconfig().arg("-r").arg(self.0.path()).args(args))
    }

    /// Does the same as the hook.
    fn merge(&self) {
        let bytes = fs::read(self.cache_path()).unwrap();
        let mut cache = parse(&bytes).unwrap();
        let paths: Vec<_> = OURS
            .iter()
            .map(|name| Path::new("/opt/driver").join(name))
            .collect();
        let ours: Vec<_> = OURS
            .iter()
            .zip(&paths)
            .map(|(name, path)| NewEntry {
                name: OsStr::new(name),
                path,
                arch: Arch::native(),
            })
            .collect();
        cache.merge(&ours);
        write_file(self.cache_path(), cache.to_bytes().unwrap());
    }

    /// Returns the library that a program in the root gets for each name.
    fn probe(&self, names: &[&str]) -> Vec<String> {
        let mut chroot = Command::new("chroot");
        chroot
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_PRELOAD")
            .arg(self.0.path())
            .arg("/probe")
            .args(names);
        let text = run(&mut chroot);
        text.lines()
            .map(|line| line.split_once(' ').unwrap().1.to_owned())
            .collect()
    }
}

fn reads_and_rewrites_the_hosts_cache_as_ldconfig_sees_it() {
    let bytes = fs::read("/etc/ld.so.cache").expect("read the host's cache");
    let cache = parse(&bytes).unwrap();
    let shown = run(ldconfig().arg("-p"));
    assert!(
        shown.starts_with(&format!("{} libs found", cache.entries().len())),
        "{shown}"
    );
    assert_eq!(entries(&cache), listed(&shown));

    let dir = TempDir::new().unwrap();
    let copy = dir.path().join("cache");
    write_file(&copy, cache.to_bytes().unwrap());
    let told_of_copy = run(ldconfig().arg("-p").arg("-C").arg(&copy));
    assert_eq!(
        told_of_copy.replace(copy.to_str().unwrap(), "/etc/ld.so.cache"),
        shown
    );
}

fn reads_every_layout_that_ldconfig_writes() {
    let image = Image::new();
    for (format, layout) in LAYOUTS {
        image.ldconfig(&["-c", format]);
        let bytes = fs::read(image.cache_path()).unwrap();
        let cache = parse(&bytes).unwrap();
        assert_eq!(cache.layout(), layout);
        let shown = image.ldconfig(&["-p"]);
        assert!(cache.entries().len() > 144, "{shown}");
        // parse sorts the entries, so equality also shows that our order is ldconfig's order.
        assert_eq!(entries(&cache), listed(&shown), "{format}");
        assert_eq!(
            cache.generator().is_some(),
            shown.contains("Cache generated by"),
            "{format}"
        );
        if cfg!(target_arch = "x86_64") && cache.generator().is_some() {
            assert_eq!(cache.hwcaps(), ["x86-64-v2"], "{format}");
        }

        write_file(image.cache_path(), cache.to_bytes().unwrap());
        assert_eq!(listed(&image.ldconfig(&["-p"])), listed(&shown), "{format}");
    }
}

fn ldconfig_lists_what_was_merged() {
    let image = Image::new();
    for (format, layout) in LAYOUTS {
        image.ldconfig(&["-c", format]);
        let before = listed(&image.ldconfig(&["-p"]));
        image.merge();
        let merged = fs::read(image.cache_path()).unwrap();
        assert_eq!(parse(&merged).unwrap().layout(), layout);
        let after = listed(&image.ldconfig(&["-p"]));

        for name in OURS {
            let paths: Vec<_> = after
                .iter()
                .filter(|entry| entry.0 == name)
                .map(|entry| &entry.1)
                .collect();
            assert_eq!(paths, [&Path::new("/opt/driver").join(name)], "{format}");
        }
        let theirs = |list: &[(String, PathBuf)]| -> Vec<_> {
            list.iter()
                .filter(|entry| !OURS.contains(&&*entry.0))
                .cloned()
                .collect()
        };
        assert_eq!(theirs(&after), theirs(&before), "{format}");

        image.merge();
        assert_eq!(fs::read(image.cache_path()).unwrap(), merged, "{format}");
    }
}

fn the_loader_finds_ours_through_the_cache() {
    let image = Image::new();
    // Without entries, nothing is found: the libraries below are found only with the cache.
    for (_, layout) in LAYOUTS {
        write_file(image.cache_path(), Cache::empty(layout).to_bytes().unwrap());
        assert_eq!(image.probe(&OURS), ["none"; 5], "{layout:?}");
        assert_eq!(image.probe(&THEIRS), ["none"; 4], "{layout:?}");
    }
    for (format, layout) in LAYOUTS {
        image.ldconfig(&["-c", format]);
        let theirs = image.probe(&THEIRS);
        assert!(!theirs.contains(&"none".to_owned()), "{format} {theirs:?}");
        assert_ne!(image.probe(&OURS[..1]), ["ours"], "{format}");
        let bytes = fs::read(image.cache_path()).unwrap();
        if layout == CacheFormat::New && !parse(&bytes).unwrap().hwcaps().is_empty() {
            assert_eq!(theirs[0], "v2", "the loader supports glibc-hwcaps");
            assert_eq!(image.probe(&OURS[..1]), ["v2"]);
        }

        image.merge();
        assert_eq!(image.probe(&OURS), ["ours"; 5], "{format}");
        assert_eq!(image.probe(&THEIRS), *theirs, "{format}");
    }
    // A container without a cache.
    for (_, layout) in LAYOUTS {
        write_file(image.cache_path(), Cache::empty(layout).to_bytes().unwrap());
        image.merge();
        assert_eq!(image.probe(&OURS), ["ours"; 5], "{layout:?}");
    }
}
