//! Device cgroups of this kernel, v1 and v2, with processes and with containers of real runtimes.
//!
//! A node without a driver shows whether a device may be opened: ENXIO if the cgroup allows it, EPERM if not.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use serde_json::json;

use base::sys::bpf::{self, BPF_F_ALLOW_MULTI, BPF_F_ALLOW_OVERRIDE, Insn};
use oci_nvidia_hook::testing::cgroup::{self, DeviceAccess, Grant, Member};
use oci_nvidia_hook::testing::oci::device_rules::DeviceRule;

use crate::driver::{ALL_GPUS, FakeDriver, Image, Waiting};
use crate::engine::{Cgroup, IMAGE, Podman};
use crate::support::{HOOK, Need, assert_says, host_wide_name, read, sh, write_file};
use crate::why::{isolated, why};

const V1: &[Need] = &[Need::Root, Need::CgroupV1];
const V1_DRIVER: &[Need] = &[
    Need::Root,
    Need::CgroupV1,
    Need::Programs(&["cc", "unshare", "nsenter"]),
];
const V2: &[Need] = &[Need::Root, Need::CgroupV2, Need::Program("unshare")];
const V2_DRIVER: &[Need] = &[
    Need::Root,
    Need::CgroupV2,
    Need::Programs(&["cc", "unshare", "nsenter"]),
];
const PODMAN_CRUN_V1: &[Need] = &[
    Need::Root,
    Need::CgroupV1,
    Need::Programs(&["podman", "crun", "cc"]),
];
const RUNC: &[Need] = &[
    Need::Root,
    Need::CgroupV2,
    Need::Programs(&["unshare", "runc"]),
];

tests! {
    V1 => v1_devices_allow, v1_below_a_cgroup_that_lacks_the_device, v1_a_cgroup_of_others_is_left_alone;
    V1_DRIVER => v1_no_cgroups_is_reported;
    V2_DRIVER => v2_no_cgroups_is_reported;
    PODMAN_CRUN_V1 => podman_without_a_cgroup;
    V2 => v2_a_cgroup_of_others_is_left_alone, v2_a_program_that_denies_is_left_in_force,
        v2_a_program_that_came_meanwhile_is_not_lost, v2_extends_what_is_attached, v2_all_of_several_programs,
        v2_many_rules_are_known_again, v2_nothing_attached_is_nothing_to_do, v2_the_scope_above_is_the_container_s_too,
        v2_what_crun_gave_to_systemd_is_extended, v2_a_program_further_up_is_named, v2_replace_wants_the_old_one;
    RUNC => v2_runc_container;
}

const fn rule(major: u32, minor: u32) -> DeviceRule {
    DeviceRule { major, minor }
}

/// The result of a call without findings.
fn granted(access: DeviceAccess) -> Grant {
    Grant {
        access,
        findings: vec![],
    }
}

const FIRST: DeviceRule = rule(195, 0);
const SECOND: DeviceRule = rule(195, 1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Allowed,
    Denied,
}
use Answer::{Allowed, Denied};

/// Returns true in a mount namespace with only cgroup2; otherwise runs the test `name` there and returns false.
fn in_v2_view(name: &str) -> bool {
    if std::env::var_os("ONH_TEST_V2_VIEW").is_some() {
        return true;
    }
    let script = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec \"$0\" --exact \"$1\" --nocapture";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .arg(name)
        .env("ONH_TEST_V2_VIEW", "1")
        .output()
        .unwrap();
    // Its count of tests is not part of the output of this run.
    let text = || {
        format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    };
    assert!(
        output.status.success(),
        "{name} in a cgroup v2 view: {}",
        text()
    );
    false
}

/// A cgroup with a process that waits in it. Both end with the value.
struct Group {
    path: PathBuf,
    /// The directories that were created, outermost first.
    made: Vec<PathBuf>,
    process: Child,
}

impl Group {
    /// Creates `below` below `mount`, in a separate directory for each test.
    fn new(mount: &str, test: &str, below: &str) -> Self {
        let mut path = Path::new(mount).join(host_wide_name(test));
        fs::create_dir(&path).unwrap();
        let mut made = vec![path.clone()];
        for name in below.split('/').filter(|name| !name.is_empty()) {
            path.push(name);
            fs::create_dir(&path).unwrap();
            made.push(path.clone());
        }
        let process = Command::new("sleep")
            .arg("600")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        write_file(path.join("cgroup.procs"), process.id().to_string());
        Self {
            path,
            made,
            process,
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().try_into().unwrap())
    }

    fn open(&self, rule: DeviceRule) -> Answer {
        self.ask(rule, ": <> \"$2\"")
    }

    /// Returns what a process in the cgroup prints when it runs `script`, with a node for `rule` as `$2`.
    fn ask(&self, rule: DeviceRule, script: &str) -> Answer {
        let scratch = tempfile::tempdir().unwrap();
        let node = scratch.path().join("node");
        mknod(
            &node,
            SFlag::S_IFCHR,
            Mode::from_bits_truncate(0o666),
            makedev(rule.major.into(), rule.minor.into()),
        )
        .unwrap();
        let output = Command::new("sh")
            .args([
                "-c",
                &format!("echo $$ > \"$1\" || exit 99; {script}"),
                "sh",
            ])
            .arg(self.path.join("cgroup.procs"))
            .arg(&node)
            .env("LC_ALL", "C")
            .output()
            .unwrap();
        assert_ne!(output.status.code(), Some(99), "{output:?}");
        answer(&String::from_utf8_lossy(&output.stderr))
    }

    fn directory(&self, up: usize) -> File {
        File::open(self.path.ancestors().nth(up).unwrap()).unwrap()
    }

    /// Attaches a program to the cgroup `up` levels above the cgroup of the process.
    fn attach(&self, up: usize, flags: u32, insns: &[Insn]) -> OwnedFd {
        let program = bpf::load_device_program("onh_test", insns).unwrap();
        bpf::attach(self.directory(up).as_fd(), program.as_fd(), flags, None).unwrap();
        program
    }

    fn attached(&self, up: usize) -> Vec<u32> {
        bpf::attached(self.directory(up).as_fd()).unwrap().ids
    }

    /// For a container whose config.json names this cgroup, if the name does not contain the container's id.
    fn member<'a>(&'a self, id: &'a str) -> Member<'a> {
        let named = if id == "x" {
            self.path.to_str().unwrap().strip_prefix("/sys/fs/cgroup/")
        } else {
            None
        };
        Member {
            pid: self.pid(),
            id,
            cgroups_path: Some(named.unwrap_or_default().trim_start_matches("devices/")),
        }
    }

    fn allow(&self, id: &str, rules: &[DeviceRule]) -> Grant {
        cgroup::allow(self.member(id), rules).unwrap_or_else(|error| panic!("{error:?}"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        for path in self.made.iter().rev() {
            remove_cgroup(path);
        }
    }
}

/// A process leaves its cgroup a moment after it was waited for. A cgroup that is left over can have the name that a later test run
/// needs.
fn remove_cgroup(path: &Path) {
    let until = Instant::now() + Duration::from_secs(5);
    while path.is_dir() && fs::remove_dir(path).is_err() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(
        std::thread::panicking() || !path.is_dir(),
        "cannot remove {}",
        path.display()
    );
}

fn answer(text: &str) -> Answer {
    let text = text.to_lowercase();
    if text.contains("not permitted") {
        return Denied;
    }
    // no text: this machine has a driver for the node
    assert!(
        text.is_empty() || text.contains("no such device or address"),
        "{text}"
    );
    Allowed
}

fn deny_all() -> Vec<Insn> {
    vec![Insn::new(0xb7, 0, 0, 0, 0), Insn::new(0x95, 0, 0, 0, 0)]
}

/// Allows `c 1:3 rwm` (/dev/null, which the shell needs) and nothing else, like runc.
fn only_null() -> Vec<Insn> {
    vec![
        Insn::new(0x69, 2, 1, 0, 0),
        Insn::new(0x61, 3, 1, 0, 0),
        Insn::new(0x74, 3, 0, 0, 16),
        Insn::new(0x61, 4, 1, 4, 0),
        Insn::new(0x61, 5, 1, 8, 0),
        Insn::new(0x55, 2, 0, 4, 2),
        Insn::new(0x55, 4, 0, 3, 1),
        Insn::new(0x55, 5, 0, 2, 3),
        Insn::new(0xb4, 0, 0, 0, 1),
        Insn::new(0x95, 0, 0, 0, 0),
        Insn::new(0xb4, 0, 0, 0, 0),
        Insn::new(0x95, 0, 0, 0, 0),
    ]
}

/// Allows all devices except major 195, like a policy agent.
fn all_but_nvidia() -> Vec<Insn> {
    vec![
        Insn::new(0x61, 2, 1, 4, 0),
        Insn::new(0x55, 2, 0, 2, 195),
        Insn::new(0xb7, 0, 0, 0, 0),
        Insn::new(0x95, 0, 0, 0, 0),
        Insn::new(0xb7, 0, 0, 0, 1),
        Insn::new(0x95, 0, 0, 0, 0),
    ]
}

fn v1_devices_allow() {
    const HIERARCHY: &str = "/sys/fs/cgroup/devices";
    let group = Group::new(HIERARCHY, "v1", "");
    assert_eq!(group.open(FIRST), Allowed);
    write_file(group.path.join("devices.deny"), "a");
    assert_eq!([group.open(FIRST), group.open(SECOND)], [Denied, Denied]);

    for _ in 0..2 {
        assert_eq!(group.allow("x", &[FIRST]), granted(DeviceAccess::Added));
        assert_eq!([group.open(FIRST), group.open(SECOND)], [Allowed, Denied]);
        assert_eq!(read(group.path.join("devices.list")), "c 195:0 rw\n");
    }
    assert_eq!(group.ask(FIRST, "mknod \"$2.new\" c 195 0"), Denied);
}

fn v1_below_a_cgroup_that_lacks_the_device() {
    const HIERARCHY: &str = "/sys/fs/cgroup/devices";
    let group = Group::new(HIERARCHY, "v1-below", "inner");
    write_file(group.made[0].join("devices.deny"), "c 195:* rwm");
    let text = base::report::render(&cgroup::allow(group.member("x"), &[FIRST]).unwrap_err());
    assert_says(
        &text,
        &["cannot write \"c 195:0 rw\" to \"/sys/fs/cgroup/devices/onh-"],
    );
    assert_says(
        &text,
        &["inner/devices.allow\": operation not permitted (EPERM) (ONH-041)\nhint: "],
    );
}

/// crun with `--cgroups=disabled`: the container runs in the cgroup of the service that started it.
fn v1_a_cgroup_of_others_is_left_alone() {
    let group = Group::new("/sys/fs/cgroup/devices", "v1-service", "web.service");
    let of_others = Member {
        pid: group.pid(),
        id: "0a",
        cgroups_path: Some("/libpod_parent/libpod-0a"),
    };
    let open = cgroup::allow(of_others, &[FIRST]).unwrap();
    assert_eq!(open, granted(DeviceAccess::Unfiltered));
    write_file(group.path.join("devices.deny"), "a");
    let outcome = cgroup::allow(of_others, &[FIRST]).unwrap();
    assert_eq!(
        (outcome.access, outcome.findings[0].kind.id()),
        (DeviceAccess::Denied, "ONH-311")
    );
    assert!(
        outcome.findings[0].what.contains("web.service"),
        "{outcome:?}"
    );
    assert_eq!(read(group.path.join("devices.list")), "");
    assert_eq!(group.open(FIRST), Denied);
    // An edit would affect the service: it would apply to its other processes.
    write_file(group.path.join("devices.allow"), FIRST.to_string());
    assert_eq!(group.open(FIRST), Allowed);
    let listed = cgroup::allow(of_others, &[FIRST]).unwrap();
    assert_eq!(listed, granted(DeviceAccess::Unfiltered));
}

fn v2_a_cgroup_of_others_is_left_alone() {
    if !in_v2_view("cgroup::v2_a_cgroup_of_others_is_left_alone") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "service", "web.service");
    let of_others = Member {
        pid: group.pid(),
        id: "0a",
        cgroups_path: Some(""),
    };
    assert_eq!(
        cgroup::allow(of_others, &[FIRST]).unwrap().access,
        DeviceAccess::Unfiltered
    );
    group.attach(0, BPF_F_ALLOW_MULTI, &only_null());
    let before = group.attached(0);
    let outcome = cgroup::allow(of_others, &[FIRST]).unwrap();
    assert_eq!(
        (outcome.access, outcome.findings[0].kind.id()),
        (DeviceAccess::Denied, "ONH-311")
    );
    assert_eq!((group.open(FIRST), group.attached(0)), (Denied, before));
    let null = rule(1, 3);
    let allowed = cgroup::allow(of_others, &[null]).unwrap();
    assert_eq!(
        allowed,
        granted(DeviceAccess::Unfiltered),
        "the filter allows it"
    );
}

/// The key that NVIDIA's guide for rootless containers sets is still set, and containers of root have a device filter.
fn v1_no_cgroups_is_reported() {
    let (dir, fake) = (
        tempfile::tempdir().unwrap(),
        FakeDriver::new(&["--gpus", "1"]),
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    // The cgroup can only be removed after the container.
    let group = Group::new("/sys/fs/cgroup/devices", "no-cgroups", "");
    let container = Waiting::with_all_gpus(dir.path(), &image);
    fake.configure("no-cgroups = true");
    assert_eq!(container.hook(&fake.config).stderr, "", "nothing filters");
    write_file(group.path.join("cgroup.procs"), container.pid().to_string());
    write_file(group.path.join("devices.deny"), "a");
    let ran = container.call(&mut isolated(dir.path()), &fake.config);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_says(
        &ran.stderr,
        &["denies the GPUs: ", "(ONH-041)\nhint: remove no-cgroups "],
    );
    fake.configure("no-cgroups = true\n[oci-nvidia-hook]\ndenied-devices = \"start\"");
    let ran = container.call(&mut isolated(dir.path()), &fake.config);
    assert!(ran.stderr.contains("(ONH-313)"), "{ran:?}");
    ran.ok();
    let text = why(dir.path(), &["waiting"]).ok();
    assert_says(
        &text,
        &["\nthe container got its GPUs, but its device cgroup denies them: injected "],
    );
    // config.json allows the devices: the engine applies its own rules.
    let rules = json!({"linux": {"resources": {"devices": [{"allow": true, "type": "a", "access": "rwm"}]}}});
    container.set_spec(ALL_GPUS, &rules);
    assert_eq!(container.hook(&fake.config).stderr, "");
    assert_eq!(read(group.path.join("devices.list")), "");
    // Without the key, the hook examines the cgroup; this one is not the container's.
    container.set_env(ALL_GPUS);
    fake.configure("[oci-nvidia-hook]\ndenied-devices = \"start\"");
    let ran = container.hook(&fake.config);
    assert!(ran.stderr.contains("(ONH-311)"), "{ran:?}");
    ran.ok();
    fake.configure("");
    let ran = container.hook(&fake.config);
    assert_says(
        &ran.stderr,
        &["(ONH-041)\nhint: start it without \"--cgroups=disabled\""],
    );
    assert_eq!(ran.code, Some(1), "{ran:?}");
}

fn v2_no_cgroups_is_reported() {
    if !in_v2_view("cgroup::v2_no_cgroups_is_reported") {
        return;
    }
    let fake = FakeDriver::new(&["--gpus", "1"]);
    // The cgroup can only be removed after the container.
    let group = Group::new("/sys/fs/cgroup", "no-cgroups", "");
    let container = Waiting::debian(ALL_GPUS, "");
    fake.configure("no-cgroups = true");
    assert_eq!(container.hook(&fake.config).stderr, "", "nothing filters");
    write_file(group.path.join("cgroup.procs"), container.pid().to_string());
    group.attach(0, BPF_F_ALLOW_MULTI, &only_null());
    let before = group.attached(0);
    let ran = container.hook(&fake.config);
    assert!(ran.stderr.contains("(ONH-041)"), "{ran:?}");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    fake.configure("no-cgroups = true\n[oci-nvidia-hook]\ndenied-devices = \"start\"");
    let ran = container.hook(&fake.config);
    assert!(ran.stderr.contains("(ONH-313)"), "{ran:?}");
    ran.ok();
    assert_eq!(
        (group.open(FIRST), group.attached(0)),
        (Denied, before.clone())
    );
    // config.json allows the devices: the engine applies its own rules.
    let rules = json!({"linux": {"resources": {"devices": [{"allow": true, "type": "a", "access": "rwm"}]}}});
    container.set_spec(ALL_GPUS, &rules);
    assert_eq!(container.hook(&fake.config).stderr, "");
    // Without the key, the program is extended if the cgroup belongs to the container.
    fake.configure("");
    let named =
        json!({"linux": {"cgroupsPath": group.path.strip_prefix("/sys/fs/cgroup").unwrap()}});
    container.set_spec(ALL_GPUS, &named);
    assert_eq!(container.hook(&fake.config).stderr, "");
    assert_eq!(group.open(FIRST), Allowed);
    assert_ne!(group.attached(0), before);
}

/// `--cgroups=disabled`, which Podman supports with crun: the container runs in the cgroup of the service that started it, whose
/// other processes must not get the GPUs.
fn podman_without_a_cgroup() {
    let group = Group::new("/sys/fs/cgroup/devices", "disabled", "backup.service");
    write_file(group.path.join("devices.deny"), "a");
    for rule in [
        "c *:* m",
        "b *:* m",
        "c 1:* rwm",
        "c 5:* rwm",
        "c 136:* rwm",
    ] {
        write_file(group.path.join("devices.allow"), rule);
    }
    let list = || read(group.path.join("devices.list"));
    let before = list();
    let run = |options: &str| {
        // Outside of the cgroup first, because NVML cannot be asked in it; the hook then has a cached inventory.
        let script = format!(
            "\"$@\" run --rm --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=0 {IMAGE} true\n\
             echo $$ >'{}/cgroup.procs'\n\
             \"$@\" run {options} --name disabled --network=none --log-driver=none -e NVIDIA_VISIBLE_DEVICES=0 {IMAGE} \
               sh -c 'echo started' || code=$?\n\
             {HOOK} why disabled; \"$@\" rm -f disabled >/dev/null",
            group.path.display()
        );
        Podman::shared().shell(Cgroup::WithCrun, &script).ok()
    };
    let text = run("--cgroups=disabled");
    assert!(!text.contains("started"), "{text}");
    assert_says(&text, &["number: ONH-041;", "backup.service"]);
    assert_eq!(list(), before);
    assert_eq!(group.open(FIRST), Denied);
}

/// A program of a policy agent next to the runtime's program.
fn v2_a_program_that_denies_is_left_in_force() {
    if !in_v2_view("cgroup::v2_a_program_that_denies_is_left_in_force") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "denied", "");
    group.attach(0, BPF_F_ALLOW_MULTI, &only_null());
    group.attach(0, BPF_F_ALLOW_MULTI, &all_but_nvidia());
    let agents = *group.attached(0).last().unwrap();
    let outcome = group.allow("x", &[FIRST]);
    assert_eq!(
        (outcome.access, outcome.findings.len()),
        (DeviceAccess::Denied, 1)
    );
    assert_eq!(outcome.findings[0].kind.id(), "ONH-312");
    assert!(
        outcome.findings[0]
            .what
            .contains(&format!("device program {agents} ")),
        "{outcome:?}"
    );
    assert_eq!(group.open(FIRST), Denied);
    assert!(group.attached(0).contains(&agents), "it is still there");
    // Devices that this program does not deny individually are added to the program of the runtime.
    let other = rule(511, 0);
    assert_eq!(group.allow("x", &[other]), granted(DeviceAccess::Added));
    assert_eq!(group.open(other), Allowed);
    // The state before the fix: a block at the start of both programs.
    let naive = Group::new("/sys/fs/cgroup", "denied-naive", "");
    for program in [only_null(), all_but_nvidia()] {
        naive.attach(
            0,
            BPF_F_ALLOW_MULTI,
            &cgroup::extend(&program, &[FIRST]).unwrap().unwrap(),
        );
    }
    assert_eq!(naive.open(FIRST), Allowed);
}

/// With one program per cgroup, attaching replaces the present program, whichever it is.
fn v2_a_program_that_came_meanwhile_is_not_lost() {
    if !in_v2_view("cgroup::v2_a_program_that_came_meanwhile_is_not_lost") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "meanwhile", "");
    group.attach(0, 0, &only_null());
    let before = bpf::attached(group.directory(0).as_fd()).unwrap();
    group.attach(0, 0, &deny_all());
    let (meanwhile, dir) = (group.attached(0), group.directory(0));
    let ours = bpf::load_device_program("onh_test", &only_null()).unwrap();
    if before.revision > 0 {
        let stale = bpf::attach_at(dir.as_fd(), ours.as_fd(), 0, before.revision);
        assert_eq!(
            (stale, group.attached(0)),
            (Err(rustix::io::Errno::STALE), meanwhile)
        );
        let now = bpf::attached(dir.as_fd()).unwrap().revision;
        bpf::attach_at(dir.as_fd(), ours.as_fd(), 0, now).unwrap();
    } else {
        bpf::attach_at(dir.as_fd(), ours.as_fd(), 0, 0).unwrap();
        assert_ne!(group.attached(0), meanwhile);
    }
}

fn v2_extends_what_is_attached() {
    if !in_v2_view("cgroup::v2_extends_what_is_attached") {
        return;
    }
    for (name, flags) in [
        ("multi", BPF_F_ALLOW_MULTI),
        ("override", BPF_F_ALLOW_OVERRIDE),
        ("alone", 0),
    ] {
        let group = Group::new("/sys/fs/cgroup", name, "");
        group.attach(0, flags, &only_null());
        assert_eq!(
            [group.open(FIRST), group.open(SECOND)],
            [Denied, Denied],
            "{name}"
        );
        let before = group.attached(0);

        assert_eq!(
            group.allow("x", &[FIRST]),
            granted(DeviceAccess::Added),
            "{name}"
        );
        assert_eq!(
            [group.open(FIRST), group.open(SECOND)],
            [Allowed, Denied],
            "{name}"
        );
        assert_eq!(group.open(rule(1, 3)), Allowed, "{name}: what was allowed");
        assert_eq!(
            group.ask(FIRST, "mknod \"$2.new\" c 195 0"),
            Denied,
            "{name}"
        );
        let after = group.attached(0);
        assert_eq!((before.len(), after.len()), (1, 1), "{name}");
        assert_ne!(before, after, "{name}");

        assert_eq!(
            group.allow("x", &[FIRST]).access,
            DeviceAccess::Present,
            "{name}"
        );
        assert_eq!(group.attached(0), after, "{name}: nothing done");
        assert_eq!(
            group.allow("x", &[SECOND]).access,
            DeviceAccess::Added,
            "{name}"
        );
        assert_eq!(
            [group.open(FIRST), group.open(SECOND)],
            [Allowed, Allowed],
            "{name}"
        );
    }
}

fn v2_all_of_several_programs() {
    if !in_v2_view("cgroup::v2_all_of_several_programs") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "several", "");
    group.attach(0, BPF_F_ALLOW_MULTI, &only_null());
    group.attach(0, BPF_F_ALLOW_MULTI, &deny_all());
    group.allow("x", &[FIRST]);
    assert_eq!([group.open(FIRST), group.open(SECOND)], [Allowed, Denied]);
    assert_eq!(group.attached(0).len(), 2);
}

/// The verifier must leave the block as we wrote it; otherwise the second call would not recognize it.
fn v2_many_rules_are_known_again() {
    if !in_v2_view("cgroup::v2_many_rules_are_known_again") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "many", "");
    group.attach(0, BPF_F_ALLOW_MULTI, &only_null());
    let rules: Vec<DeviceRule> = [195, 236, 238, 511]
        .into_iter()
        .flat_map(|major| {
            [0, 1, 2, 7, 254, 255]
                .into_iter()
                .chain(300..400)
                .map(move |minor| DeviceRule { major, minor })
        })
        .collect();
    assert_eq!(group.allow("x", &rules).access, DeviceAccess::Added);
    assert_eq!(group.allow("x", &rules).access, DeviceAccess::Present);
    assert_eq!(group.open(rule(511, 399)), Allowed);
    assert_eq!(group.open(rule(511, 400)), Denied);
}

fn v2_nothing_attached_is_nothing_to_do() {
    if !in_v2_view("cgroup::v2_nothing_attached_is_nothing_to_do") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "open", "");
    assert_eq!(
        group.allow("x", &[FIRST]),
        granted(DeviceAccess::Unfiltered)
    );
    assert!(group.attached(0).is_empty());
    assert_eq!(group.open(FIRST), Allowed);
}

fn v2_the_scope_above_is_the_container_s_too() {
    if !in_v2_view("cgroup::v2_the_scope_above_is_the_container_s_too") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "scope", "libpod-0a.scope/container");
    group.attach(0, BPF_F_ALLOW_MULTI, &only_null());
    group.attach(1, BPF_F_ALLOW_MULTI, &only_null());
    let outcome = group.allow("0a", &[FIRST]);
    assert_eq!(outcome.access, DeviceAccess::Added);
    assert_eq!(outcome.findings.len(), 1, "{:?}", outcome.findings);
    assert!(
        outcome.findings[0].what.contains("\"libpod-0a.scope\""),
        "{:?}",
        outcome.findings
    );
    assert_eq!(outcome.findings[0].kind.id(), "ONH-305");
    assert_eq!([group.open(FIRST), group.open(SECOND)], [Allowed, Denied]);
    assert_eq!(group.allow("0a", &[FIRST]), granted(DeviceAccess::Present));
}

/// crun 1.23 and newer with systemd: systemd attaches the pinned program again when it reloads. The tests in `pinned` have a systemd.
fn v2_what_crun_gave_to_systemd_is_extended() {
    if !in_v2_view("cgroup::v2_what_crun_gave_to_systemd_is_extended") {
        return;
    }
    let mounts = "mount -t bpf bpf /sys/fs/bpf && mkdir /sys/fs/bpf/crun && mount -t tmpfs run /run && \
                  mkdir -p /run/systemd/transient";
    sh(mounts).ok();
    let pin = Path::new("/sys/fs/bpf/crun/libpod-0b_scope");
    let unit_file = Path::new("/run/systemd/transient/libpod-0b.scope");
    let line = format!("BPFProgram=device:{}\n", pin.display());
    let group = Group::new("/sys/fs/cgroup", "pinned", "libpod-0b.scope/container");
    let original = group.attach(1, BPF_F_ALLOW_MULTI, &only_null());
    bpf::pin(original.as_fd(), pin).unwrap();
    let original_id = group.attached(1);

    // The unit file cannot be changed: the devices are allowed until the next reload.
    let outcome = group.allow("0b", &[FIRST]);
    assert_eq!(
        (outcome.access, outcome.findings.len()),
        (DeviceAccess::Added, 1)
    );
    assert_eq!(outcome.findings[0].kind.id(), "ONH-310");
    assert!(outcome.findings[0].what.contains("daemon-reload"));
    let extended = group.attached(1);
    assert_eq!((extended.len(), group.open(FIRST)), (1, Allowed));
    assert_eq!(group.open(SECOND), Denied);

    // A reload that runs at this moment: systemd has detached its program, or has attached it again.
    let program = bpf::prog_by_id(extended[0]).unwrap();
    let scope = group.directory(1);
    for with_original in [false, true] {
        bpf::detach(scope.as_fd(), program.as_fd()).ok();
        if with_original {
            bpf::attach(scope.as_fd(), original.as_fd(), BPF_F_ALLOW_MULTI, None).unwrap();
        }
        for id in group.attached(1) {
            if !original_id.contains(&id) {
                let ours = bpf::prog_by_id(id).unwrap();
                bpf::detach(scope.as_fd(), ours.as_fd()).unwrap();
            }
        }
        write_file(unit_file, format!("[Scope]\n{line}"));
        let outcome = group.allow("0b", &[FIRST]);
        assert_eq!(outcome.access, DeviceAccess::Added);
        // Here is no systemd to wait for.
        assert_eq!(outcome.findings.len(), 1, "{outcome:?}");
        assert_eq!([group.open(FIRST), group.open(SECOND)], [Allowed, Denied]);
        assert_eq!(group.attached(1).len(), 1, "{with_original}");
        assert_ne!(group.attached(1), original_id);
        let text = read(unit_file);
        assert_eq!(text, format!("[Scope]\n#{}", &line[1..]));
    }
    // crun compares the pin at an update.
    let pinned = bpf::prog_info(bpf::pinned(pin).unwrap().as_fd()).unwrap();
    assert_eq!([pinned.id], *original_id);
    // The hook again, with another device.
    assert_eq!(group.allow("0b", &[FIRST]).access, DeviceAccess::Present);
    assert_eq!(
        group.allow("0b", &[FIRST, SECOND]).access,
        DeviceAccess::Added
    );
    assert_eq!([group.open(FIRST), group.open(SECOND)], [Allowed, Allowed]);
}

fn v2_a_program_further_up_is_named() {
    if !in_v2_view("cgroup::v2_a_program_further_up_is_named") {
        return;
    }
    let group = Group::new("/sys/fs/cgroup", "slice", "libpod-0a");
    group.attach(1, BPF_F_ALLOW_MULTI, &only_null());
    let before = group.attached(1);
    let outcome = group.allow("0a", &[FIRST]);
    assert_eq!(
        (outcome.access, outcome.findings.len()),
        (DeviceAccess::Denied, 1)
    );
    assert!(
        outcome.findings[0].what.contains("above"),
        "{:?}",
        outcome.findings
    );
    assert_eq!(outcome.findings[0].kind.id(), "ONH-304");
    assert_eq!((group.open(FIRST), group.attached(1)), (Denied, before));
}

fn v2_replace_wants_the_old_one() {
    if !in_v2_view("cgroup::v2_replace_wants_the_old_one") {
        return;
    }
    // The rules of the kernel on which v2.rs relies.
    let group = Group::new("/sys/fs/cgroup", "rules", "");
    let old = group.attach(0, BPF_F_ALLOW_MULTI, &only_null());
    let other = bpf::load_device_program("onh_test", &deny_all()).unwrap();
    let dir = group.directory(0);
    let absent = bpf::attach(
        dir.as_fd(),
        other.as_fd(),
        BPF_F_ALLOW_MULTI,
        Some(other.as_fd()),
    );
    assert_eq!(absent, Err(rustix::io::Errno::NOENT));
    // The method before Linux 5.6.
    bpf::attach(dir.as_fd(), other.as_fd(), BPF_F_ALLOW_MULTI, None).unwrap();
    bpf::detach(dir.as_fd(), old.as_fd()).unwrap();
    assert_eq!(group.attached(0).len(), 1);

    let refused = bpf::load_device_program("onh_test", &[Insn::new(0x95, 0, 0, 0, 0)]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "permission denied (EACCES), the verifier reports \"R0 !read_ok\""
    );
}

/// Loads an allow list, as crun does.
fn allow_list_of_crun() -> OwnedFd {
    let other = rule(240, 7);
    let allow_list = cgroup::extend(&only_null(), &[other]).unwrap().unwrap();
    bpf::load_device_program("onh_test", &allow_list).unwrap()
}

/// Attaches an allow list to the scope, as crun before 1.23 does, and calls the hook for the process in it.
pub fn attach_as_crun(scope: &str) {
    let program = allow_list_of_crun();
    bpf::attach(
        File::open(scope).unwrap().as_fd(),
        program.as_fd(),
        BPF_F_ALLOW_MULTI,
        None,
    )
    .unwrap();
    allow_in_scope(scope, DeviceAccess::Added);
}

/// Pins an allow list, as crun 1.23 does before it asks systemd for the scope.
pub fn pin_as_crun(pin: &str) {
    bpf::pin(allow_list_of_crun().as_fd(), Path::new(pin)).unwrap();
}

/// Calls the hook for the process in the scope `onh-NAME.scope`, without findings.
pub fn allow_in_scope(scope: &str, access: DeviceAccess) {
    let procs = read(format!("{scope}/cgroup.procs"));
    let pid = Pid::from_raw(procs.lines().next().unwrap().parse().unwrap());
    let name = scope.rsplit("/onh-").next().unwrap();
    let id = name.strip_suffix(".scope").unwrap();
    let member = Member {
        pid,
        id,
        cgroups_path: Some(&format!("system.slice:onh:{id}")),
    };
    let outcome = cgroup::allow(member, &[FIRST]).unwrap();
    assert_eq!(outcome, granted(access));
}

fn v2_runc_container() {
    if in_v2_view("cgroup::v2_runc_container") {
        container("runc");
    }
}

/// `create`, our turn while init waits, `start`: what the container then sees of two devices.
fn container(runtime: &str) {
    let id = host_wide_name(runtime);
    let cgroup = Path::new("/sys/fs/cgroup").join(&id);
    let bundle = tempfile::tempdir().unwrap();
    let rootfs = bundle.path().join("rootfs");
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}),
    ];
    for dir in ["/usr", "/bin", "/lib", "/lib64"]
        .into_iter()
        .filter(|dir| Path::new(dir).is_dir())
    {
        mounts.push(
            json!({"destination": dir, "type": "bind", "source": dir, "options": ["rbind", "ro"]}),
        );
    }
    for mount in &mounts {
        fs::create_dir_all(
            rootfs.join(
                mount["destination"]
                    .as_str()
                    .unwrap()
                    .trim_start_matches('/'),
            ),
        )
        .unwrap();
    }
    let node = |minor: u32| json!({"path": format!("/dev/onh{minor}"), "type": "c", "major": 195, "minor": minor, "fileMode": 0o666});
    let script = "for n in 0 1; do (: <> /dev/onh$n) 2> /tmp/err; echo \"onh$n: $(cat /tmp/err)\"; done; echo null > /dev/null; echo done";
    mounts.push(json!({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}));
    fs::create_dir(rootfs.join("tmp")).unwrap();
    let config = json!({
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin", "LC_ALL=C"]},
        "root": {"path": "rootfs"},
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}],
            "cgroupsPath": format!("/{id}"),
            "devices": [node(0), node(1)],
            "resources": {"devices": [
                {"allow": false, "access": "rwm"},
                {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rw"},
                {"allow": true, "type": "c", "major": 10, "access": "r"},
                {"allow": true, "type": "b", "access": "m"},
            ]},
        },
    });
    write_file(bundle.path().join("config.json"), config.to_string());

    // The container's init keeps its stdout open, so a pipe would end only with the container.
    let out = bundle.path().join("out");
    let file = File::create(&out).unwrap();
    let pid_file = bundle.path().join("pid");
    let run = |args: &[&str]| {
        Command::new(runtime)
            .arg("--root")
            .arg(bundle.path().join("state"))
            .args(args)
            .arg(&id)
            .status()
            .unwrap()
    };
    let created = Command::new(runtime)
        .arg("--root")
        .arg(bundle.path().join("state"))
        .args(["create", "--bundle"])
        .arg(bundle.path())
        .arg("--pid-file")
        .arg(&pid_file)
        .arg(&id)
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .status()
        .unwrap();
    let text = || read(&out);
    assert!(created.success(), "{}", text());

    let pid = Pid::from_raw(read(&pid_file).trim().parse().unwrap());
    let rules = [FIRST, rule(511, 3)];
    let member = Member {
        pid,
        id: &id,
        cgroups_path: Some(""),
    };
    let first = cgroup::allow(member, &rules);
    let second = cgroup::allow(member, &rules);
    let started = run(&["start"]);
    let until = Instant::now() + Duration::from_secs(10);
    while !text().contains("done") && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    let text = text();
    run(&["delete", "--force"]);
    remove_cgroup(&cgroup);
    assert_eq!(
        first.unwrap_or_else(|error| panic!("{error:?}")).access,
        DeviceAccess::Added
    );
    assert_eq!(second.unwrap().access, DeviceAccess::Present);
    assert!(started.success());
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    let shown = |line: &str| answer(line.split_once(": ").unwrap().1);
    assert_eq!(
        [shown(lines[0]), shown(lines[1])],
        [Allowed, Denied],
        "{text}"
    );
}
