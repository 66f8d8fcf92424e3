use super::*;

/// Locates the cgroup with the texts of both files.
fn locate(mountinfo: &str, cgroup: &str) -> Result<DeviceCgroup> {
    super::locate(&hierarchies(mountinfo.as_bytes()), cgroup)
}

/// CRI-O 1.37 and runc 1.1.5 at prestart, shortened.
const HYBRID: &str = "\
80 1 254:0 / / rw,relatime - ext4 /dev/vda rw
81 80 0:22 / /sys rw,relatime - sysfs sysfs rw
82 81 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
87 82 0:32 / /sys/fs/cgroup/memory rw,relatime master:10 - cgroup cgroup rw,memory
88 82 0:33 / /sys/fs/cgroup/devices rw,relatime master:11 - cgroup cgroup rw,devices
93 82 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
94 82 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
const PROCESS: &str = "\
9:name=systemd:/crio-test/crio-0a
5:devices:/crio-test/crio-0a
4:memory:/crio-test/crio-0a
0::/crio-test/crio-0a
";

fn v1(path: &str) -> DeviceCgroup {
    DeviceCgroup::V1(HostPath::new(path))
}

fn v2(mount: &str, path: &str) -> DeviceCgroup {
    DeviceCgroup::V2 {
        mount: HostPath::new(mount),
        path: HostPath::new(path),
    }
}

fn refusal(mountinfo: &str, cgroup: &str) -> String {
    base::report::line(&locate(mountinfo, cgroup).unwrap_err())
}

#[test]
fn a_mounted_v1_hierarchy_decides() {
    assert_eq!(
        locate(HYBRID, PROCESS).unwrap(),
        v1("/sys/fs/cgroup/devices/crio-test/crio-0a")
    );
}

#[test]
fn the_controller_can_share_its_hierarchy() {
    let mountinfo = HYBRID.replace("rw,devices", "rw,cpu,devices");
    let cgroup = PROCESS.replace(":devices:", ":cpu,devices:");
    assert_eq!(
        locate(&mountinfo, &cgroup).unwrap(),
        v1("/sys/fs/cgroup/devices/crio-test/crio-0a")
    );
}

#[test]
fn only_cgroup2_mounted_is_v2_whatever_the_process_lists() {
    let mountinfo = "80 1 254:0 / / rw - ext4 /dev/vda rw\n82 80 0:38 / /sys/fs/cgroup rw - cgroup2 none rw,nsdelegate\n";
    assert_eq!(
        locate(mountinfo, PROCESS).unwrap(),
        v2("/sys/fs/cgroup", "/sys/fs/cgroup/crio-test/crio-0a")
    );
}

#[test]
fn hybrid_without_the_v1_devices_mount_is_v2() {
    let mountinfo: String = HYBRID
        .lines()
        .filter(|line| !line.ends_with("devices"))
        .map(|l| format!("{l}\n"))
        .collect();
    assert_eq!(
        locate(&mountinfo, PROCESS).unwrap(),
        v2(
            "/sys/fs/cgroup/unified",
            "/sys/fs/cgroup/unified/crio-test/crio-0a"
        )
    );
}

#[test]
fn unified_layout_wins_over_a_stray_v1_mount() {
    let mountinfo = "80 1 254:0 / / rw - ext4 /dev/vda rw\n\
        82 80 0:38 / /sys/fs/cgroup rw - cgroup2 none rw\n\
        83 80 0:33 / /mnt/devices rw - cgroup none rw,devices\n";
    assert_eq!(
        locate(mountinfo, PROCESS).unwrap(),
        v2("/sys/fs/cgroup", "/sys/fs/cgroup/crio-test/crio-0a")
    );
}

#[test]
fn a_mount_on_top_hides_what_is_below() {
    // stacked on the directory above, as `mount -t cgroup2 none /sys/fs/cgroup` without an umount leaves it
    let above = format!("{HYBRID}99 82 0:38 / /sys/fs/cgroup rw - cgroup2 none rw\n");
    assert_eq!(
        locate(&above, PROCESS).unwrap(),
        v2("/sys/fs/cgroup", "/sys/fs/cgroup/crio-test/crio-0a")
    );
    // stacked on the mount itself
    let itself = format!("{HYBRID}99 88 0:50 / /sys/fs/cgroup/devices rw - tmpfs none rw\n");
    assert_eq!(
        locate(&itself, PROCESS).unwrap(),
        v2(
            "/sys/fs/cgroup/unified",
            "/sys/fs/cgroup/unified/crio-test/crio-0a"
        )
    );
    // all mounts are hidden
    let all = format!("{HYBRID}99 81 0:50 / /sys/fs rw - tmpfs none rw\n");
    assert_eq!(locate(&all, PROCESS).unwrap(), DeviceCgroup::None);
}

#[test]
fn the_last_of_equal_mounts_counts() {
    let mountinfo = format!("{HYBRID}99 80 0:33 / /mnt/devices rw - cgroup cgroup rw,devices\n");
    assert_eq!(
        locate(&mountinfo, PROCESS).unwrap(),
        v1("/mnt/devices/crio-test/crio-0a")
    );
}

#[test]
fn a_read_only_mount_is_the_last_choice() {
    // in a mount namespace that receives the container's mounts
    let mountinfo = format!(
        "{HYBRID}99 80 0:33 /crio-test/crio-0a /merged/sys/fs/cgroup/devices ro - cgroup cgroup rw,devices\n"
    );
    assert_eq!(
        locate(&mountinfo, PROCESS).unwrap(),
        v1("/sys/fs/cgroup/devices/crio-test/crio-0a")
    );
}

#[test]
fn the_root_of_the_mount_is_stripped() {
    let nested = HYBRID.replace("0:33 /", "0:33 /crio-test");
    assert_eq!(
        locate(&nested, PROCESS).unwrap(),
        v1("/sys/fs/cgroup/devices/crio-0a")
    );
    let exact = HYBRID.replace("0:33 /", "0:33 /crio-test/crio-0a");
    assert_eq!(
        locate(&exact, PROCESS).unwrap(),
        v1("/sys/fs/cgroup/devices")
    );
    let other = HYBRID.replace("0:33 /", "0:33 /crio");
    assert_eq!(
        refusal(&other, PROCESS),
        r#"its cgroup "/crio-test/crio-0a" is not below any of the mounts ["/sys/fs/cgroup/devices"]"#
    );
}

#[test]
fn a_relative_root_is_ignored() {
    assert!(
        refusal(&HYBRID.replace("0:33 /", "0:33 net:[4026531840]"), PROCESS)
            .contains("not below any")
    );
    // a join with the mount point would discard the mount point
    assert!(refusal(&HYBRID.replace("0:33 /", "0:33 "), PROCESS).contains("not below any"));
}

#[test]
fn stacked_mounts_take_linear_time() {
    let mount = |at: u32| {
        format!(
            "{at} {} 0:33 / /mnt/{at} rw - cgroup cgroup rw,devices\n",
            at - 1
        )
    };
    let mountinfo: String = (1001..=5000).map(mount).collect();
    let start = std::time::Instant::now();
    assert_eq!(
        locate(&mountinfo, PROCESS).unwrap(),
        v1("/mnt/5000/crio-test/crio-0a")
    );
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[test]
fn nothing_outside_of_the_cgroup_namespace() {
    assert!(refusal(&HYBRID.replace("0:33 /", "0:33 /.."), PROCESS).contains("not below any"));
    let text = refusal(
        HYBRID,
        &PROCESS.replace("/crio-test/crio-0a", "/../crio-0a"),
    );
    assert!(
        text.starts_with(r#"its cgroup "/../crio-0a" is outside of this cgroup namespace"#),
        "{text}"
    );
}

#[test]
fn names_are_unescaped_and_may_hold_colons() {
    let mountinfo = r"82 80 0:33 / /sys/fs/cgroup/dev\040\134x rw - cgroup cgroup rw,devices";
    assert_eq!(
        locate(mountinfo, "5:devices:/a:b c\n").unwrap(),
        v1(r"/sys/fs/cgroup/dev \x/a:b c")
    );
}

#[test]
fn nothing_mounted_is_no_cgroup() {
    assert_eq!(locate("", PROCESS).unwrap(), DeviceCgroup::None);
    assert_eq!(
        locate("80 1 254:0 / / rw - ext4 /dev/vda rw\n", "").unwrap(),
        DeviceCgroup::None
    );
    assert_eq!(
        refusal(HYBRID, "0::/x\n"),
        "it is not in a cgroup with the devices controller"
    );
}

proptest::proptest! {
    #[test]
    fn never_panics(mountinfo in "([0-9 /a-z\\\\:,.-]{0,40} - cgroup2? x rw,devices\n){0,4}.{0,40}", cgroup in ".{0,80}") {
        let _ = locate(&mountinfo, &cgroup);
    }
}
