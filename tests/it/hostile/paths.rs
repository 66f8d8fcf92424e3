//! Paths of the image that are appended to the rootfs and used: mounted (CVE-2024-0132), created (-0133), linked (-0134).

use super::NEEDS;
use super::scene::{CASE, Case, Ours, check};

tests! {
    NEEDS => cve_2024_0132_the_hosts_root_as_a_library, cve_2024_0133_files_made_through_links,
        cve_2024_0134_links_made_through_links;
}

/// The behavior of the CLI: it expanded a glob, resolved each match once, within the rootfs, to a string, and mounted rootfs +
/// string.
const MOUNT_COMPAT_RESOLVED: &str = r#"
found=
for library in "$rootfs"/usr/local/cuda/compat/lib*.so.*; do
	found="$found $(chroot "$rootfs" readlink -f "${library#"$rootfs"}")"
done
for library in $found; do
	target=$rootfs$libdir/${library##*/}
	if [ ! -e "$target" ]; then if [ -d "$rootfs$library" ]; then mkdir "$target"; else : >"$target"; fi; fi
	mount --rbind "$rootfs$library" "$target"
done
"#;

/// The same without resolving anything.
const MOUNT_COMPAT_JOINED: &str = r#"
for library in "$rootfs"/usr/local/cuda/compat/lib*.so.*; do
	target=$rootfs$libdir/${library##*/}
	if [ ! -e "$target" ]; then if [ -d "$library" ]; then mkdir "$target"; else : >"$target"; fi; fi
	mount --rbind "$library" "$target"
done
"#;

/// A compatibility library of the image is mounted by its path, which leads to `/` or a file of the host.
fn cve_2024_0132_the_hosts_root_as_a_library() {
    let joined = Case {
        naive: MOUNT_COMPAT_JOINED,
        ..CASE
    };
    check(
        "debian",
        &[
            Case {
                name: "a: a library that is a link to /",
                image: "mkdir -p $rootfs/usr/local/cuda/compat; ln -s / $rootfs/usr/local/cuda/compat/libcuda.so.575.57.08",
                fell: "test -f $rootfs$libdir/libcuda.so.575.57.08$canary/file",
                ..joined
            },
            Case {
                name: "b: a library that is a directory",
                image: "mkdir -p $rootfs/usr/local/cuda/compat/libcuda.so.575.57.08/d; \
                        ln -s $canary $rootfs/usr/local/cuda/compat/libcuda.so.575.57.08/canary",
                fell: "test -d $rootfs$libdir/libcuda.so.575.57.08/d",
                ..joined
            },
            Case {
                name: "c: the directory of libraries is one of the host's",
                image: "mkdir -p $rootfs/usr/local/cuda; ln -s $up$canary/compat $rootfs/usr/local/cuda/compat",
                fell: "grep -q host $rootfs$libdir/libcuda.so.575.57.08",
                ..joined
            },
            Case {
                name: "d: 39 links to the host",
                image: "cd $rootfs; mkdir -p usr/local/cuda/compat; cd usr/local/cuda/compat; ln -s $canary/file liba.39; \
                        for i in $(seq 39 -1 3); do ln -s liba.$i liba.$((i-1)); done; ln -s liba.2 libcuda.so.575.57.08",
                fell: "grep -q host $rootfs$libdir/libcuda.so.575.57.08",
                ..joined
            },
            Case {
                name: "d: 41 links, more than the kernel follows",
                image: "cd $rootfs; mkdir -p usr/local/cuda/compat; cd usr/local/cuda/compat; ln -s $canary/file liba.41; \
                        for i in $(seq 41 -1 3); do ln -s liba.$i liba.$((i-1)); done; ln -s liba.2 libcuda.so.575.57.08",
                naive: "",
                fell: "! cat $rootfs/usr/local/cuda/compat/libcuda.so.575.57.08 2>/dev/null",
                ..joined
            },
            Case {
                name: "e: a good library, and a link to a file of the host in the place where it goes",
                image: "mkdir -p $rootfs/usr/local/cuda/compat; echo evil >$rootfs/usr/local/cuda/compat/libcuda.so.575.57.08; \
                        for name in libcuda.so.575.57.08 libcuda.so.$driver libcuda.so.1; do \
                          ln -s $up$canary/file $rootfs$libdir/$name; \
                        done",
                fell: "grep -q evil $canary/file",
                ..joined
            },
            Case {
                name: "f: the first mount changes what the second path means",
                image: "mkdir -p $rootfs/usr/local/cuda/compat $rootfs/pwn/d $rootfs$libdir/d; : >$rootfs$libdir/d/f; \
                        ln -s $up $rootfs/pwn/d/f; cd $rootfs/usr/local/cuda/compat; : >libcuda.so.575.57.08; \
                        ln -s /pwn/d liba.so.1; ln -s $libdir/d/f libb.so.2",
                naive: MOUNT_COMPAT_RESOLVED,
                fell: "test -f $rootfs$libdir/f$canary/file",
                ..CASE
            },
        ],
    );
}

/// The behavior of the CLI: it resolved the directory within the rootfs, appended the name and created the file.
const CREATE_LIBRARY: &str =
    r#": >>"$rootfs$(chroot "$rootfs" readlink -f $libdir)/libcuda.so.$driver""#;

/// The name under which a driver file is to be created is a dangling link to a place on the host.
fn cve_2024_0133_files_made_through_links() {
    let library = Case {
        naive: CREATE_LIBRARY,
        fell: "test -f $canary/new",
        ..CASE
    };
    check(
        "debian",
        &[
            Case {
                name: "absolute",
                image: "ln -s $canary/new $rootfs$libdir/libcuda.so.$driver",
                ..library
            },
            Case {
                name: "climbing",
                image: "ln -s $up$canary/new $rootfs$libdir/libcuda.so.$driver",
                ..library
            },
            Case {
                name: "by the magic link of the process",
                image: "ln -s /proc/self/root$canary/new $rootfs$libdir/libcuda.so.$driver",
                mounts: "mount -t proc proc $rootfs/proc",
                ..library
            },
            Case {
                name: "by the magic link of init",
                mounts: "mount -t proc proc $rootfs/proc; \
                         ln -s /proc/$$/root$canary/new $rootfs$libdir/libcuda.so.$driver",
                ..library
            },
            Case {
                name: "a program",
                image: "ln -s $canary/new $rootfs/usr/bin/nvidia-smi",
                naive: ": >>$rootfs/usr/bin/nvidia-smi",
                ..library
            },
            Case {
                name: "device nodes",
                mounts: "ln -s $canary/new $rootfs/dev/nvidiactl; ln -s $up$canary/file $rootfs/dev/nvidia0; \
                         ln -s $canary $rootfs/dev/nvidia-uvm",
                naive: ": >>$rootfs/dev/nvidiactl",
                ..library
            },
            Case {
                name: "a directory of device nodes",
                mounts: "ln -s $canary $rootfs/dev/nvidia-caps; ln -s $canary $rootfs/dev/dri",
                naive: ": >>$rootfs/dev/dri/new",
                ..library
            },
            Case {
                name: "configuration of the driver's",
                image: "mkdir -p $rootfs/etc; ln -s $canary $rootfs/etc/nvidia; ln -s $canary $rootfs/etc/vulkan",
                naive: "mkdir -p $rootfs/etc/nvidia/new.d; : >$rootfs/etc/nvidia/new",
                ..library
            },
        ],
    );
}

/// The behavior of create-symlinks.
const LINK: &str =
    r#"mkdir -p "$rootfs$libdir"; ln -s "libcuda.so.$driver" "$rootfs$libdir/libcuda.so""#;

/// The directory in which a link is to be created is itself a link, to a directory of the host.
fn cve_2024_0134_links_made_through_links() {
    let library = Case {
        naive: LINK,
        fell: "test -L $canary/usr/lib64/libcuda.so",
        ours: Ours::Refuses("open its directory \"/usr/lib64\""),
        ..CASE
    };
    check(
        "lib64",
        &[
            Case {
                name: "absolute",
                image: "rm -r $rootfs/usr/lib64; ln -s $canary/usr/lib64 $rootfs/usr/lib64",
                ..library
            },
            Case {
                name: "climbing",
                image: "rm -r $rootfs/usr/lib64; ln -s $up$canary/usr/lib64 $rootfs/usr/lib64",
                ..library
            },
            Case {
                name: "climbing from /",
                image: "rm -r $rootfs/usr/lib64; ln -s /../../$canary/usr/lib64 $rootfs/usr/lib64",
                ..library
            },
            Case {
                name: "by the magic link of init",
                image: "rm -r $rootfs/usr/lib64",
                mounts: "mount -t proc proc $rootfs/proc; ln -s /proc/$$/root$canary/usr/lib64 $rootfs/usr/lib64",
                ..library
            },
            Case {
                name: "by the magic link of the working directory",
                image: "rm -r $rootfs/usr/lib64; ln -s /proc/self/cwd/../host/canary/usr/lib64 $rootfs/usr/lib64",
                mounts: "mount -t proc proc $rootfs/proc; cd $rootfs",
                naive: "ln -s libcuda.so.$driver $rootfs$libdir/libcuda.so",
                ..library
            },
            Case {
                name: "a path that the image has too: there the driver goes",
                image: "mkdir -p $rootfs$canary/usr; mv $rootfs/usr/lib64 $rootfs$canary/usr; \
                        ln -s $up$canary/usr/lib64 $rootfs/usr/lib64; \
                        sed -i 's|^/usr/lib64$|/lib64|' $rootfs/etc/ld.so.conf.d/*; ldconfig -r $rootfs",
                ours: Ours::Works,
                ..library
            },
            Case {
                name: "all of /usr",
                image: "mv $rootfs/usr $rootfs/real; ln -s $canary/usr $rootfs/usr",
                ours: Ours::Refuses("open its directory \"/usr/"),
                ..library
            },
            Case {
                name: "the link is one to a directory: ln makes its own in there",
                image: "ln -s $canary/usr/lib64 $rootfs/usr/lib64/libcuda.so",
                naive: "ln -sf libcuda.so.$driver $rootfs/usr/lib64/libcuda.so",
                fell: "test -L $canary/usr/lib64/libcuda.so.$driver",
                ours: Ours::Works,
                ..library
            },
            Case {
                name: "a relative link, from the working directory",
                image: "mkdir -p $rootfs/cwd; ln -s $canary/usr/lib64 $rootfs/cwd/libs; ln -s cwd/libs $rootfs/libs",
                naive: "cd $rootfs; ln -s x libs/libcuda.so",
                ours: Ours::Works,
                ..library
            },
        ],
    );
}
