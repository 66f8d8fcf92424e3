//! Computes the identity of these sources, which the programs that talk about NVML compare.
#![allow(
    clippy::disallowed_methods,
    reason = "these rules are for the program, not for a build"
)]
#![allow(
    clippy::print_stdout,
    reason = "build scripts pass instructions to cargo on stdout"
)]

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::path::{Path, PathBuf};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    let mut files = Vec::new();
    list(Path::new("src"), &mut files)?;
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        hasher.write(file.as_os_str().as_encoded_bytes());
        hasher.write(&fs::read(&file)?);
    }
    println!("cargo::rustc-env=NVML_PROTOCOL={:016x}", hasher.finish());
    Ok(())
}

fn list(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
