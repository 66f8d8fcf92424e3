//! Hosts as directories: the driver files that are found on each distribution, for each capability. The results are in
//! `tests/fixtures/hosts/NAME.found` and must be reviewed when they change: `UPDATE_GOLDEN=1 cargo test --test it hosts`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use base::paths::HostPath;
use base::tree::Tree;
use nvidia_host::capability::Capabilities;
use nvidia_host::driver::DriverKind;
use nvidia_host::driver::files::DriverFiles;
use nvidia_host::driver::libraries::{LinkerCache, Search};
use nvidia_host::driver::locate::locate;

use crate::support::{Need, read, run, scratch, source, write_file};

tests! {
    &[Need::Program("cc")] => what_is_found_on_each;
}

/// Only a request for all capabilities gets the last one.
const CAPABILITIES: [&str; 8] = [
    "compute", "utility", "video", "graphics", "display", "ngx", "compat32", "all",
];

fn what_is_found_on_each() {
    let mut seen = 0;
    let mut different = Vec::new();
    let dir = source("tests/fixtures/hosts");
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.sort();
    for file in files.iter().filter(|file| {
        file.extension()
            .is_some_and(|extension| extension == "host")
    }) {
        let host = Host::parse(&read(file));
        let scratch = scratch();
        host.build(scratch.path());
        let found = host.found(scratch.path());
        let golden = file.with_extension("found");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            write_file(&golden, &found);
        }
        if std::fs::read_to_string(&golden).unwrap_or_default() != found {
            different.push(format!("{}:\n{found}", golden.display()));
        }
        seen += 1;
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
    assert!(seen >= 10, "{seen} hosts");
}

/// A description: lines `root DIR`, `version V`, `ldconfig DIR…` (none: no linker cache), `gone PATH` (removed after
/// ldconfig ran), `file PATH`, `link PATH TEXT`, `lib PATH SONAME` (a 64-bit library) and `lib32 PATH SONAME`.
#[derive(Default)]
struct Host {
    root: String,
    version: String,
    ldconfig: Option<String>,
    gone: Vec<String>,
    files: Vec<String>,
    links: BTreeMap<String, String>,
    libraries: Vec<(String, String, bool)>,
}

impl Host {
    fn parse(text: &str) -> Self {
        let mut host = Self {
            root: "/".into(),
            ..Self::default()
        };
        for line in text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            let (word, rest) = line.split_once(' ').unwrap();
            let two = || {
                rest.split_once(' ')
                    .map(|(a, b)| (a.to_owned(), b.to_owned()))
                    .unwrap()
            };
            match word {
                "root" => host.root = rest.into(),
                "version" => host.version = rest.into(),
                "ldconfig" => host.ldconfig = Some(rest.into()),
                "gone" => host.gone.push(rest.into()),
                "file" => host.files.push(rest.into()),
                "link" => host.links.extend([two()]),
                "lib" | "lib32" => {
                    let (path, soname) = two();
                    host.libraries.push((
                        path,
                        soname.replace("$V", &host.version),
                        word == "lib32",
                    ));
                }
                _ => panic!("{line}"),
            }
        }
        host
    }

    fn build(&self, top: &Path) {
        let place = |path: &str| {
            let path = top.join(path.replace("$V", &self.version).trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        for (link, text) in &self.links {
            std::os::unix::fs::symlink(text.replace("$V", &self.version), place(link)).unwrap();
        }
        for file in &self.files {
            write_file(place(file), "");
        }
        for (path, soname, is_32) in &self.libraries {
            std::fs::copy(stub(soname, *is_32), place(path)).unwrap();
        }
        let root = place(&format!("{}/.", self.root));
        if let Some(dirs) = &self.ldconfig {
            std::fs::create_dir_all(root.join("etc")).unwrap();
            write_file(root.join("etc/ld.so.conf"), dirs.replace(' ', "\n"));
            run(Command::new("/sbin/ldconfig").arg("-r").arg(&root)).ok();
        }
        for path in &self.gone {
            std::fs::remove_file(place(path)).unwrap();
        }
    }

    fn found(&self, top: &Path) -> String {
        let root = top.join(self.root.trim_start_matches('/'));
        let root = Tree::open(&HostPath::new(root)).unwrap();
        let cache = LinkerCache::of(&root, None);
        let search = Search {
            root: &root,
            cache: &cache,
            version: &self.version,
            dirs: &[],
            kind: DriverKind::Linux,
        };
        let mut text = String::new();
        let (mut said, mut seen) = (
            std::collections::BTreeSet::new(),
            std::collections::BTreeSet::new(),
        );
        for capability in CAPABILITIES {
            // 32-bit libraries belong to the other capabilities.
            let asked = if capability == "compat32" {
                "compat32,compute,utility,video,graphics"
            } else {
                capability
            };
            writeln!(text, "[{capability}]").unwrap();
            match locate(&search, Capabilities::supported(asked).unwrap(), &[]) {
                Ok((files, findings)) => {
                    let all = lines(&files);
                    let kept = all
                        .into_iter()
                        .filter(|line| capability != "compat32" || line.starts_with("I386"));
                    let kept: Vec<_> = kept
                        .filter(|line| capability != "all" || !seen.contains(line))
                        .collect();
                    kept.iter()
                        .for_each(|line| writeln!(text, "{line}").unwrap());
                    seen.extend(kept);
                    said.extend(
                        findings
                            .into_iter()
                            .map(|finding| format!("{} {}", finding.kind.id(), finding.what)),
                    );
                }
                Err(error) => writeln!(text, "error: {error}").unwrap(),
            }
        }
        writeln!(text, "[findings]").unwrap();
        said.iter()
            .for_each(|finding| writeln!(text, "{finding}").unwrap());
        text.replace(top.to_str().unwrap(), "")
    }
}

fn lines(files: &DriverFiles) -> Vec<String> {
    let libraries = files.libraries.iter().map(|library| {
        let sonames: Vec<_> = library
            .sonames
            .iter()
            .map(|soname| soname.to_string_lossy())
            .collect();
        format!(
            "{:?} {} {}",
            library.arch,
            library.source,
            sonames.join(" ")
        )
        .trim_end()
        .to_owned()
    });
    let binaries = files
        .binaries
        .iter()
        .map(|binary| format!("bin {} {}", binary.source, binary.name));
    let placed = files
        .placed
        .iter()
        .map(|file| format!("file {} {}", file.source, file.target));
    libraries.chain(binaries).chain(placed).collect()
}

/// Returns a library with this SONAME, compiled once. It needs libc.so.6, like every real library: otherwise ldconfig takes it
/// for a library of libc5. (The libc with which it is linked is also a stub, because a 32-bit one may be missing here.)
pub fn stub(soname: &str, is_32: bool) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(if is_32 { "stubs32" } else { "stubs" });
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join(soname);
    if path.is_file() {
        return path;
    }
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-nostdlib"]);
    if is_32 {
        cc.arg("-m32");
    }
    cc.arg(format!("-Wl,-soname,{soname}"))
        .args(["-x", "c", "/dev/null", "-x", "none"]);
    if soname != "libc.so.6" {
        cc.arg("-Wl,--no-as-needed").arg(stub("libc.so.6", is_32));
    }
    // Tests that run at once create the same file.
    let own = tempfile::tempdir_in(&dir).unwrap();
    let new = own.path().join(soname);
    run(cc.arg("-o").arg(&new)).ok();
    std::fs::rename(new, &path).unwrap();
    path
}
