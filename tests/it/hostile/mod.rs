//! Images that attack the host: one test for each published vulnerability of NVIDIA's stack, and the races.
//!
//! Each test has two halves. First, a naive program that works like the vulnerable code processes the image in a separate mount
//! namespace, and must be vulnerable: the exploit is real. Then the hook gets the same image.

pub mod blocking;
pub mod engine;
pub mod environment;
pub mod host_sources;
pub mod inherited;
pub mod ldconfig;
pub mod nvml;
pub mod paths;
pub mod processes;
pub mod races;
mod scene;
pub mod volumes;

use crate::support::Need;

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter", "timeout"]),
];
const NEEDS_SETPRIV: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter", "setpriv"]),
];
const NEEDS_SETPRIV_STRACE: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "setpriv", "strace"]),
    Need::CgroupV2,
];
const NEEDS_READELF: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter", "readelf"]),
];
const NEEDS_PODMAN: &[Need] = &[Need::Root, Need::Programs(&["podman", "runc", "cc"])];

const NEEDS_PODMAN_CRUN: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "crun", "cc"]),
    Need::CgroupV2,
];
const NEEDS_STATIC: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "cc"]),
    Need::Build,
    Need::StaticLibc,
];
const NEEDS_STATIC_CRUN: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "crun", "cc"]),
    Need::Build,
    Need::StaticLibc,
];
const NEEDS_STATIC_STRACE: &[Need] = &[
    Need::Root,
    Need::Programs(&["strace", "unshare", "nsenter", "cc"]),
    Need::Build,
    Need::StaticLibc,
];
pub const NEEDS_FUSE: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter"]),
    Need::Device("/dev/fuse"),
];
