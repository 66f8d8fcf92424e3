//! The form of the files in the run-time directory that later processes of this program read.

use std::hash::{DefaultHasher, Hasher};

use serde::Serialize;
use serde::de::DeserializeOwned;

use base::json;
use base::sys::build_id;

/// Returns a value as the bytes of a file. The first line has the build id of this program, the kind of the file, and the checksum of the
/// rest.
pub(crate) fn to_bytes(kind: &str, value: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_string(value).unwrap_or_default();
    format!("{}{:016x}\n{body}", header(kind), checksum(body.as_bytes())).into_bytes()
}

/// Parses a file. Returns `None` if it is damaged, or another build of this program wrote it: what is stored depends on tables in the
/// program. A program without a build id accepts no file.
pub(crate) fn parse<T: DeserializeOwned>(kind: &str, bytes: &[u8]) -> Option<T> {
    build_id()?;
    let rest = bytes.strip_prefix(header(kind).as_bytes())?;
    let (sum, body) = rest.split_at_checked(16)?;
    let body = body.strip_prefix(b"\n")?;
    let sum = u64::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
    if sum != checksum(body) {
        return None;
    }
    json::from_bytes(body).ok()
}

/// Returns the name of a file for a driver root: each root has its own file.
pub(crate) fn name_for(name: &str, root: &str) -> String {
    match root {
        "/" => name.to_owned(),
        root => format!("{name}-{:016x}", checksum(root.as_bytes())),
    }
}

/// Returns the beginning of the first line.
pub(crate) fn header(kind: &str) -> String {
    format!("oci-nvidia-hook {} {kind} ", build_id().unwrap_or_default())
}

/// Computes the checksum that detects damage. It does not have to resist forgery, because other users cannot write the file.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}
