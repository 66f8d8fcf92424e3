//! Volumes: they are below the rootfs, and links of the image decide which paths lead into them.

use std::path::Path;
use std::process::Command;

use super::scene::Scene;
use super::{NEEDS, NEEDS_PODMAN, NEEDS_PODMAN_CRUN};
use crate::driver::{FakeDriver, Image, Waiting};
use crate::engine::{Cgroup, IMAGE, Podman};
use crate::support::{
    HOOK, OWN_PROCESSES, assert_says, chmod, fingerprint, run, scratch, shell, write_file,
};

tests! {
    NEEDS => volumes_nothing_is_created_on_them, volumes_are_left_alone_by_what_fails,
        volumes_with_others_inside_are_refused, volumes_elsewhere_change_nothing, volumes_keep_their_flags_below_layers,
        volumes_with_shared_propagation_get_no_layers, no_mount_namespace_is_refused;
    NEEDS_PODMAN_CRUN => volumes_with_the_hosts_etc, volumes_with_the_hosts_dev;
    NEEDS_PODMAN => files_of_others_in_a_user_namespace;
}

/// The image's changes to its directory, and the volume: `$canary/volume` on the host. Shell as in a `Case`.
struct Volume {
    name: &'static str,
    image: &'static str,
    mounts: &'static str,
    /// A program that does what its name describes, without checking where it is.
    naive: &'static str,
    /// The hook's message; empty if there is none.
    says: &'static str,
}

const VOLUME: Volume = Volume {
    name: "",
    image: "",
    mounts: BIND,
    naive: "",
    says: "",
};

const BIND: &str = "mkdir -p $rootfs/volume; mount --bind $canary/volume $rootfs/volume";

const VOLUMES: &[Volume] = &[
    Volume {
        name: "/etc is a link into a volume with an /etc",
        image: "cp -a $rootfs/etc/. $canary/volume; rm -r $rootfs/etc; ln -s /volume $rootfs/etc",
        naive: "echo evil >$rootfs/volume/.new; mv $rootfs/volume/.new $rootfs/volume/ld.so.cache",
        says: "ONH-303",
        ..VOLUME
    },
    Volume {
        name: "/etc is a volume",
        image: "cp -a $rootfs/etc/. $canary/volume",
        mounts: "mount --bind $canary/volume $rootfs/etc",
        naive: "echo evil >$rootfs/etc/.new; mv $rootfs/etc/.new $rootfs/etc/ld.so.cache",
        says: "ONH-303",
    },
    Volume {
        name: "/etc is a volume without a linker cache",
        image: "cp -a $rootfs/etc/. $canary/volume; rm $canary/volume/ld.so.cache",
        mounts: "mount --bind $canary/volume $rootfs/etc",
        naive: "echo evil >$rootfs/etc/ld.so.cache",
        says: "\"/etc\" is on a volume that lacks this file (ONH-302)",
    },
    Volume {
        name: "the directory of libraries is a link into a volume",
        image: "cp -a $rootfs$libdir/. $canary/volume; rm -r $rootfs$libdir; ln -s /volume $rootfs$libdir; \
                ln -s elsewhere $canary/volume/libcuda.so.1; ln -s elsewhere $canary/volume/libcuda.so.$driver",
        naive: "touch $rootfs/volume/libnvidia-ml.so.$driver; ln -sfn libcuda.so.$driver $rootfs/volume/libcuda.so.1",
        says: "ONH-307",
        ..VOLUME
    },
    Volume {
        name: "the directory of libraries is a volume",
        image: "cp -a $rootfs$libdir/. $canary/volume",
        mounts: "mount --bind $canary/volume $rootfs$libdir",
        naive: "touch $rootfs$libdir/libnvidia-ml.so.$driver",
        says: "ONH-307",
    },
    Volume {
        name: "the directory of programs is a link into a read-only volume",
        image: "cp -a $rootfs/usr/bin/. $canary/volume; rm -r $rootfs/usr/bin; ln -s ../volume $rootfs/usr/bin",
        mounts: "mkdir -p $rootfs/volume; mount --bind $canary/volume $rootfs/volume; \
                 mount -o remount,bind,ro $rootfs/volume",
        naive: "touch $canary/volume/nvidia-smi",
        ..VOLUME
    },
    Volume {
        name: "a directory that is missing would be made in a volume",
        image: "rm -rf $rootfs/usr/share; ln -s /volume $rootfs/usr/share",
        naive: "mkdir $rootfs/volume/glvnd",
        says: "ONH-303",
        ..VOLUME
    },
    Volume {
        name: "the volume is a tmpfs",
        image: "cp -a $rootfs/usr/bin $canary/bin; rm -r $rootfs/usr/bin; ln -s /volume $rootfs/usr/bin",
        mounts: "mount -t tmpfs volume $canary/volume; cp -a $canary/bin/. $canary/volume; \
                 mkdir -p $rootfs/volume; mount --bind $canary/volume $rootfs/volume",
        naive: "touch $rootfs/volume/nvidia-smi",
        says: "ONH-303",
    },
    Volume {
        name: "a tmpfs is the volume at /dev",
        mounts: "mount -t tmpfs volume $canary/volume; mount --bind $canary/volume $rootfs/dev",
        naive: "touch $rootfs/dev/nvidia0",
        says: "ONH-307",
        ..VOLUME
    },
    Volume {
        name: "a tmpfs is the volume below a /dev of the runtime's",
        mounts: "mkdir $rootfs/dev/dri; mount -t tmpfs volume $canary/volume; mount --bind $canary/volume $rootfs/dev/dri",
        naive: "touch $rootfs/dev/dri/card1",
        says: "ONH-307",
        ..VOLUME
    },
];

/// A driver file for /usr/share.
fn add_vendor(fake: &FakeDriver) {
    let dir = fake.root.join("usr/share/glvnd/egl_vendor.d");
    std::fs::create_dir_all(&dir).unwrap();
    write_file(dir.join("10_nvidia.json"), "{}");
}

/// config.json may list a tmpfs at /dev, whatever the runtime mounted there.
fn set_own_dev(container: &Waiting) {
    let more = serde_json::json!({"mounts": [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}]});
    container.set_spec(
        &[
            "NVIDIA_VISIBLE_DEVICES=all",
            "NVIDIA_DRIVER_CAPABILITIES=all",
        ],
        &more,
    );
}

/// Returns everything on the volume, as the container's mount namespace shows it.
fn volume(scene: &Scene, container: &Waiting) -> String {
    let inside = format!(
        "/proc/{}/root{}/volume",
        container.pid(),
        scene.canary.display()
    );
    fingerprint(Path::new(&inside), "")
}

/// Nothing is created, replaced or removed on a volume.
fn volumes_nothing_is_created_on_them() {
    let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
    add_vendor(&fake);
    for case in VOLUMES {
        let scene = Scene::new("debian", &prepare(case));
        let seen = "find $canary/volume -printf '%p %i %y %s %l\\n' | sort | sha256sum";
        let script = format!(
            "{}\nbefore=$({seen})\n{}\ntest \"$({seen})\" != \"$before\"",
            case.mounts, case.naive
        );
        let ran = scene.naive(&script);
        assert_eq!(
            ran.code,
            Some(0),
            "{}: the naive program changed nothing: {ran:?}",
            case.name
        );

        for own_dev in [false, true] {
            let scene = Scene::new("debian", &prepare(case));
            let container = scene.start(case.mounts);
            if own_dev {
                set_own_dev(&container);
            }
            let (before, host) = (volume(&scene, &container), scene.host(&container));
            let ran = container.hook(&fake.config);
            let about = format!("{}, {own_dev}: {ran:?}", case.name);
            assert_eq!(volume(&scene, &container), before, "{about}");
            scene.is_untouched(&container, &host, &about);
            assert!(
                ran.code == Some(0) && ran.stderr.contains(case.says),
                "{about}"
            );
            assert!(!case.says.is_empty() || ran.stderr.is_empty(), "{about}");
            let works = "probe-dlopen libnvidia-ml.so.1 libcuda.so.1 && test -c /dev/nvidia1";
            // A program does not make a volume read-only.
            let has_smi = !case.naive.contains("nvidia-smi") || case.says.is_empty();
            let works = container.exec(&format!(
                "{} {works}",
                if has_smi { "nvidia-smi -L &&" } else { "" }
            ));
            assert_eq!(works.code, Some(0), "{about}: {works:?}");
            // A second run changes nothing.
            let mounts = container.mountinfo();
            container.hook(&fake.config).ok();
            assert_eq!(container.mountinfo(), mounts, "{about}");
            assert_eq!(volume(&scene, &container), before, "{about}");
        }
    }
}

fn prepare(case: &Volume) -> String {
    format!("mkdir $canary/volume; {}", case.image)
}

/// A step that fails late has not changed a volume that it passed through.
fn volumes_are_left_alone_by_what_fails() {
    let image = "mkdir $canary/volume; cp -a $rootfs$libdir/. $canary/volume; rm -r $rootfs$libdir; \
                 ln -s /volume $rootfs$libdir; ln -s elsewhere $canary/volume/libnvidia-ml.so.1; \
                 mkdir $canary/volume/libcuda.so";
    let scene = Scene::new("debian", image);
    let container = scene.start(BIND);
    let (before, mounts) = (volume(&scene, &container), container.mountinfo());
    let stderr = scene.hook(&container).failed(1);
    assert_says(
        &stderr,
        &["libcuda.so\"", "something other than a regular file"],
    );
    assert_eq!(
        (volume(&scene, &container), container.mountinfo()),
        (before, mounts)
    );
}

/// If a directory cannot be covered, the error names the reason.
fn volumes_with_others_inside_are_refused() {
    let image =
        "mkdir $canary/volume; cp -a $rootfs$libdir/. $canary/volume; mkdir $canary/volume/inner";
    let mounts =
        "mount --bind $canary/volume $rootfs$libdir; mount -t tmpfs inner $rootfs$libdir/inner";
    let scene = Scene::new("debian", image);
    let container = scene.start(mounts);
    let (before, mounts) = (volume(&scene, &container), container.mountinfo());
    let stderr = scene.hook(&container).failed(1);
    assert!(stderr.contains("(ONH-048)\nhint: "), "{stderr}");
    assert_eq!(
        (volume(&scene, &container), container.mountinfo()),
        (before, mounts)
    );
}

/// Volumes next to and below the directories of the driver do not cause a layer.
fn volumes_elsewhere_change_nothing() {
    let image = "mkdir $canary/volume; cd $rootfs; mkdir -p usr/local/cuda run/secrets; touch etc/hosts run/secrets/s; \
                 mkdir -p $rootfs$libdir/elsewhere";
    let mounts = "mount --bind $canary/volume $rootfs/usr/local/cuda; mount --bind $canary/file $rootfs/etc/hosts; \
                  mount --bind $canary/file $rootfs/run/secrets/s; mount --bind $canary/volume $rootfs$libdir/elsewhere; \
                  mount -t tmpfs run $rootfs/tmp";
    let scene = Scene::new("debian", image);
    let container = scene.start(mounts);
    let before = volume(&scene, &container);
    let ran = scene.hook(&container);
    assert!(ran.code == Some(0) && ran.stderr.is_empty(), "{ran:?}");
    assert!(
        !container.mountinfo().contains(" overlay "),
        "{}",
        container.mountinfo()
    );
    assert_eq!(volume(&scene, &container), before);
    container.output("nvidia-smi -L && probe-dlopen libcuda.so.1 && grep -q host /etc/hosts");
}

/// A layer does not permit what the volume below it forbids: libraries are mounted on it, and other files belong to the volume.
fn volumes_keep_their_flags_below_layers() {
    let image = "mkdir $canary/volume; cp -a $rootfs$libdir/. $canary/volume";
    for flags in ["ro", "ro,noexec", "noexec", "ro,nodev,nosuid,noexec"] {
        let scene = Scene::new("debian", image);
        let container = scene.start(&format!(
            "mount --bind $canary/volume $rootfs$libdir; mount -o remount,bind,{flags} $rootfs$libdir"
        ));
        container.hook(&FakeDriver::shared().config).ok();
        let is = container.mount_options("/usr/lib/x86_64-linux-gnu");
        let has = |flag: &str| is.split(',').any(|option| option == flag);
        assert!(
            flags.split(',').all(has) && has("ro") && has("nosuid") && has("nodev"),
            "{flags}: {is}"
        );
        assert_eq!(has("noexec"), flags.contains("noexec"), "{flags}: {is}");
        assert!(container.mountinfo().contains(" overlay "), "{flags}");
    }
}

/// Mounts on a volume with shared propagation would appear on the host, so there are no layers on it.
fn volumes_with_shared_propagation_get_no_layers() {
    let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
    for (place, image, required) in [
        ("dev/dri/by-path", "true", false),
        ("usr/bin", "cp -a $rootfs/usr/bin/. $canary/volume", false),
        (
            "usr/lib/x86_64-linux-gnu",
            "cp -a $rootfs$libdir/. $canary/volume",
            true,
        ),
        ("etc", "cp -a $rootfs/etc/. $canary/volume", true),
    ] {
        for kind in ["ro", "rw"] {
            let scene = Scene::new("debian", &format!("mkdir $canary/volume; {image}"));
            // The host's side is a peer of it, in a namespace from which the container's is created.
            let container = scene.start(&format!(
                "mkdir -p $rootfs/{place}; mount --bind $canary/volume $canary/volume; mount --make-shared $canary/volume; \
                 mount --bind $canary/volume $rootfs/{place}; mount -o remount,bind,{kind} $rootfs/{place}"
            ));
            let before = (volume(&scene, &container), scene.host(&container));
            let ran = container.hook(&fake.config);
            let about = format!("{place}, {kind}: {ran:?}");
            assert_eq!(ran.code, Some(i32::from(required)), "{about}");
            let id = if required {
                "(ONH-042)\nhint: "
            } else {
                "(ONH-303)\nhint: "
            };
            assert!(ran.stderr.contains(id), "{about}");
            assert!(
                (volume(&scene, &container), scene.host(&container)) == before,
                "{about}\n{}",
                container.mountinfo()
            );
            if !required {
                container.output("probe-dlopen libcuda.so.1 && test -c /dev/dri/card1");
            }
        }
    }
}

/// The properties of the file `$1`: inode, owner, content.
const SEEN: &str = "seen() { find \"$1\" -printf '%p %i %y %U:%G %m %s %l\\n' | sort; find \"$1\" -type f -exec sha256sum {} + | sort; }";

/// With podman and both runtimes, with and without a user namespace: the container's root user could not change the file, and the
/// hook does not do it either.
fn volumes_with_the_hosts_etc() {
    let podman = Podman::with_image();
    let (dir, image) = Image::debian();
    let etc = podman.dir.path().join("host-etc").display().to_string();
    // The host's directory to which the image's links lead. It contains the runtime's mount points.
    shell!(
        "cd '{}'; touch etc/hosts etc/hostname etc/resolv.conf; ln -s /proc/mounts etc/mtab; cp -a etc '{etc}'; \
         rm -r etc; ln -s /host etc; mkdir -p host run/secrets; touch run/.containerenv; chmod 755 '{etc}'",
        image.rootfs.display()
    );
    podman.import(&image.rootfs, "localhost/etc-link");
    podman.import(
        &Image::new(&dir.path().join("plain"), &["--layout", "debian"]).rootfs,
        "localhost/plain",
    );
    let users = ["--uidmap=0:100000:65536", "--gidmap=0:100000:65536"];
    for (cgroup, more, image, place) in rows! {
        Cgroup::AsMounted, &users[..], "localhost/etc-link", "/host";
        Cgroup::WithCrun, &users[..], "localhost/etc-link", "/host";
        Cgroup::AsMounted, &users[..], "localhost/plain", "/etc";
        Cgroup::AsMounted, &["--user=1000", "--cap-drop=all"], "localhost/etc-link", "/host";
        Cgroup::AsMounted, &["--read-only"], "localhost/etc-link", "/host";
        Cgroup::WithCrun, &[], "localhost/plain", "/etc";
    } {
        let script = format!(
            "{SEEN}; before=$(seen '{etc}'); \"$@\" run --rm --network=none --log-driver=none {} -v '{etc}:{place}' \
             -e NVIDIA_VISIBLE_DEVICES=1 {image} sh -c 'probe-dlopen libcuda.so.1 && nvidia-smi -L; \
               (echo evil >>/etc/ld.so.cache) 2>/dev/null || echo kept' 2>&1; \
             after=$(seen '{etc}'); [ \"$after\" = \"$before\" ] && echo untouched || echo \"$after\"",
            more.join(" ")
        );
        let text = podman.shell(cgroup, &script).ok();
        assert!(
            text.ends_with("kept\nuntouched\n"),
            "{cgroup:?} {more:?} {image}: {text:?}"
        );
        assert!(
            text.contains("GPU 0: ") && text.contains("libcuda.so.1: ok"),
            "{cgroup:?} {more:?} {image}: {text}"
        );
    }
}

/// ONH-047 whatever path leads to the host's /dev: a link of the image, and a user without any permissions.
fn volumes_with_the_hosts_dev() {
    let podman = Podman::with_image();
    let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
    add_vendor(&fake);
    podman.install_hook(&fake.config);
    let (_dir, image) = Image::debian();
    shell!(
        "cd '{}'; rm -rf usr/share; ln -s /dev usr/share",
        image.rootfs.display()
    );
    podman.import(&image.rootfs, "localhost/share-link");
    for cgroup in [Cgroup::AsMounted, Cgroup::WithCrun] {
        let nodes = scratch();
        let script = format!(
            // Without udev's links to the nodes in /dev/dri
            "{}; cp -a '{root}/dev/dri' /dev; rm -rf /dev/dri/by-path; \
             seen() {{ find /dev -xdev ! -path '/dev/shm*' -printf '%p %i %y %l\n' | sort; }}; before=$(seen); \
             on() {{ \"$@\" localhost/share-link sh -c 'mkdir /usr/share/zz'; }}; \
             on \"$@\" run --rm --network=none --log-driver=none -v /dev:/dev; rmdir /dev/zz; \
             \"$@\" run --rm --network=none --log-driver=none --user 1000 --cap-drop=all -v /dev:/dev \
               -e NVIDIA_VISIBLE_DEVICES=1 -e NVIDIA_DRIVER_CAPABILITIES=all localhost/share-link nvidia-smi -L 2>&1; \
             \"$@\" run --rm --network=none --log-driver=none --name plain -v /dev:/dev -e NVIDIA_VISIBLE_DEVICES=1 \
               -e NVIDIA_DRIVER_CAPABILITIES=all {IMAGE} true; '{HOOK}' why plain; \
             [ \"$(seen)\" = \"$before\" ] && echo untouched",
            crate::cdi_containers::nodes_at_dev(&fake, nodes.path()),
            root = fake.root.display()
        );
        let text = podman.shell(cgroup, &script).ok();
        assert!(
            text.contains("GPU 0: ") && text.ends_with("\nuntouched\n"),
            "{cgroup:?}: {text}"
        );
        // The host's udev decides which links are in its /dev.
        assert!(
            text.contains("got what it requested") && !text.contains("(ONH-303)"),
            "{cgroup:?}: {text}"
        );
    }
}

/// A file whose owner is unknown in the user namespace is not changed, not even on the container's own rootfs.
fn files_of_others_in_a_user_namespace() {
    let podman = Podman::with_image();
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    chmod(dir.path(), 0o755);
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let rootfs = image.rootfs.display();
    shell!(
        "cd '{rootfs}'; mkdir -p run/secrets var/tmp; ln -s /proc/mounts etc/mtab; \
         touch etc/hosts etc/hostname etc/resolv.conf run/.containerenv"
    );
    let before = fingerprint(&image.rootfs, "");
    let script = format!(
        "\"$@\" run --rm --network=none --log-driver=none --uidmap=0:100000:65536 --gidmap=0:100000:65536 \
         -e NVIDIA_VISIBLE_DEVICES=1 --rootfs '{rootfs}' sh -c 'probe-dlopen libcuda.so.1; touch /etc/x || echo kept; \
           echo evil >>/etc/ld.so.cache || echo kept; nvidia-smi -L'"
    );
    let text = podman.shell(Cgroup::AsMounted, &script);
    assert!(
        text.stdout.matches("kept").count() == 2 && text.stdout.contains("GPU 0: "),
        "{text:?}"
    );
    assert_eq!(fingerprint(&image.rootfs, ""), before);
}

/// A container in the mount namespace of the host, or of the hook's caller: mounts would stay there.
fn no_mount_namespace_is_refused() {
    let (dir, image) = Image::debian();
    let fake = FakeDriver::shared();
    let spec = serde_json::json!({
        "ociVersion": "1.0.2", "process": {"args": ["sh"], "env": ["NVIDIA_VISIBLE_DEVICES=all"]},
        "root": {"path": image.rootfs},
    });
    write_file(dir.path().join("config.json"), spec.to_string());
    // Process 1 represents the host's process 1, in a PID namespace of the test.
    let inner = format!(
        "mount -t tmpfs dev '{rootfs}/dev'; before=$(cat /proc/1/mountinfo); sleep 60 & sleeping=$!; \
         state() {{ echo \"{{\\\"id\\\": \\\"x\\\", \\\"pid\\\": $1, \\\"bundle\\\": \\\"{dir}\\\"}}\"; }}; \
         try() {{ state $1 | $2 {HOOK} --config '{config}' prestart 2>&1 && echo started || echo \"ended $?\"; }}; \
         try $sleeping ''; try 1 'unshare -m'; kill $sleeping; \
         [ \"$(cat /proc/1/mountinfo)\" = \"$before\" ] && echo untouched",
        rootfs = image.rootfs.display(),
        dir = dir.path().display(),
        config = fake.config.display(),
    );
    let mut unshare = Command::new("unshare");
    unshare.args(OWN_PROCESSES);
    let text = run(unshare.args(["sh", "-euc", &inner])).ok();
    assert_eq!(
        text.matches("the container has no separate mount namespace")
            .count(),
        2,
        "{text}"
    );
    assert!(
        text.matches("(ONH-040)\nhint: ").count() == 2 && text.ends_with("untouched\n"),
        "{text}"
    );
    assert_eq!(text.matches("ended 1").count(), 2, "{text}");
}
