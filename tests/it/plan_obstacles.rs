//! What lies in an image or on a volume, for `plan` and for a start: both report the same.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::cdi::generate;
use crate::cdi_containers::with_mounts;
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::engine::Cgroup;
use crate::support::{HOOK, Need, Ran, fingerprint, private_dir, run, run_with, scratch, sh};

tests! {
    NEEDS => plan_and_start_agree, plan_and_the_entry_of_cdi_agree, what_plan_cannot_know;
    &[Need::Root, Need::Program("cc"), Need::Program("unshare"), Need::Program("runc")] =>
        read_only_volumes = read_only_volumes("runc");
    &[Need::Root, Need::Program("cc"), Need::Program("unshare"), Need::Program("crun")] =>
        read_only_volumes_with_crun = read_only_volumes("crun");
}

const ALL: &[&str] = &[
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_DRIVER_CAPABILITIES=all",
];
const LIB: &str = "usr/lib/x86_64-linux-gnu";

/// A mount of config.json: destination, kind, and options. `bind`: of the directory `volume`; `file`: of the file `file`.
type Mounted = (&'static str, &'static str, &'static [&'static str]);

/// One obstacle. `image`: a shell script in the image, next to which are a directory `../volume` and a file `../file`.
struct Obstacle {
    image: &'static str,
    mounts: &'static [Mounted],
    /// The numbers that must be among the findings
    says: &'static [&'static str],
}

const fn in_image(image: &'static str, says: &'static [&'static str]) -> Obstacle {
    Obstacle {
        image,
        mounts: &[],
        says,
    }
}

const fn on_volume(
    image: &'static str,
    mounts: &'static [Mounted],
    says: &'static [&'static str],
) -> Obstacle {
    Obstacle {
        image,
        mounts,
        says,
    }
}

const OBSTACLES: &[Obstacle] = &[
    in_image("true", &[]),
    // Something is at the path of a driver file or link.
    in_image("mkdir $lib/libcuda.so.535.183.01", &["ONH-046"]),
    in_image("mkdir $lib/libcuda.so.1", &["ONH-046"]),
    in_image("mkfifo $lib/libcuda.so.1", &["ONH-046"]),
    in_image("mkdir usr/bin/nvidia-smi", &["ONH-303"]),
    in_image("echo x >$lib/libcuda.so.1", &["ONH-301"]),
    in_image("echo x >$lib/libcuda.so.535.183.01", &["ONH-301"]),
    in_image("touch $lib/libcuda.so.535.183.01", &[]),
    in_image("ln -s /etc/passwd $lib/libcuda.so.535.183.01", &["ONH-301"]),
    in_image("ln -s elsewhere $lib/libcuda.so.1", &[]),
    in_image(
        "rm -f usr/bin/nvidia-smi; ln -s sh usr/bin/nvidia-smi",
        &["ONH-301"],
    ),
    in_image("mkdir -p etc/OpenCL/vendors/nvidia.icd", &[]),
    in_image(
        "mkdir -p etc/nvidia; touch etc/nvidia/nvidia-application-profiles-rc.d",
        &["ONH-303"],
    ),
    in_image("rm -rf usr/share; touch usr/share", &["ONH-303"]),
    in_image("rm -rf usr/share; ln -s /nowhere usr/share", &["ONH-303"]),
    // Links of the image.
    in_image("mv $lib usr/real; ln -s /usr/real $lib", &[]),
    in_image("mv $lib usr/real; ln -s ../../../../usr/real $lib", &[]),
    in_image("rm -r $lib; ln -s x86_64-linux-gnu $lib", &["ONH-046"]),
    in_image("rm -r $lib; ln -s /nowhere $lib", &["ONH-046"]),
    in_image("rm -r $lib; echo >$lib", &["ONH-046"]),
    // The linker cache.
    in_image(
        "rm -f etc/ld.so.cache; mkfifo etc/ld.so.cache",
        &["ONH-302"],
    ),
    in_image("rm -f etc/ld.so.cache; mkdir etc/ld.so.cache", &["ONH-302"]),
    in_image(
        "rm -f etc/ld.so.cache; truncate -s 17M etc/ld.so.cache",
        &["ONH-302"],
    ),
    in_image("head -c 5000 /dev/urandom >etc/ld.so.cache", &["ONH-302"]),
    in_image("ln -sf /nowhere etc/ld.so.cache", &[]),
    in_image("rm -f etc/ld.so.cache", &[]),
    in_image("rm -r etc", &[]),
    // An image of another kind.
    in_image(
        "rm -f lib64/ld-linux-* usr/lib64/ld-linux-*; mkdir -p lib; touch lib/ld-musl-x86_64.so.1",
        &["ONH-306"],
    ),
    in_image("rm etc/debian_version", &[]),
    in_image(
        "rm etc/debian_version; ln -s /nowhere etc/ld.so.conf.d/dangling.conf",
        &[],
    ),
    // Volumes.
    on_volume(
        "cp -a $lib/. ../volume",
        &[("/usr/lib/x86_64-linux-gnu", "bind", &[])],
        &["ONH-307"],
    ),
    on_volume(
        "cp -a $lib/. ../volume",
        &[("/usr/lib/x86_64-linux-gnu", "bind", &["ro"])],
        &[],
    ),
    on_volume(
        "cp -a $lib/. ../volume; rm -r $lib; ln -s /volume $lib",
        &[("/volume", "bind", &[])],
        &["ONH-307"],
    ),
    on_volume(
        "cp -a $lib/. ../volume; mkdir ../volume/inner",
        &[
            ("/usr/lib/x86_64-linux-gnu", "bind", &[]),
            ("/usr/lib/x86_64-linux-gnu/inner", "tmpfs", &[]),
        ],
        &["ONH-048"],
    ),
    on_volume(
        "mkdir -p $lib/inner",
        &[("/usr/lib/x86_64-linux-gnu/inner", "bind", &[])],
        &[],
    ),
    on_volume(
        "cp -a usr/bin/. ../volume",
        &[("/usr/bin", "bind", &[])],
        &["ONH-303"],
    ),
    on_volume(
        "cp -a usr/bin/. ../volume; rm -r usr/bin; ln -s ../volume usr/bin",
        &[("/volume", "bind", &["ro"])],
        &[],
    ),
    on_volume(
        "rm -rf usr/share; ln -s /volume usr/share",
        &[("/volume", "bind", &[])],
        &["ONH-303"],
    ),
    on_volume(
        "cp -a etc/. ../volume",
        &[("/etc", "bind", &[])],
        &["ONH-303"],
    ),
    on_volume(
        "cp -a etc/. ../volume; rm ../volume/ld.so.cache",
        &[("/etc", "bind", &[])],
        &["ONH-302"],
    ),
    on_volume("true", &[("/etc", "bind", &[])], &["ONH-302"]),
    on_volume("cp -a etc/. ../volume", &[("/etc", "bind", &["ro"])], &[]),
    on_volume("true", &[("/etc", "tmpfs", &[])], &[]),
    on_volume("true", &[("/usr/share/glvnd", "bind", &[])], &["ONH-303"]),
    on_volume(
        "true",
        &[
            ("/etc/hosts", "file", &["ro"]),
            ("/usr/local/cuda", "bind", &[]),
        ],
        &[],
    ),
    on_volume(
        "true",
        &[("/etc/ld.so.cache", "file", &["ro"])],
        &["ONH-302"],
    ),
    on_volume(
        "true",
        &[(
            "/usr/lib/x86_64-linux-gnu/libcuda.so.535.183.01",
            "file",
            &["ro"],
        )],
        &["ONH-301"],
    ),
    on_volume(
        "true",
        &[("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "file", &["ro"])],
        &["ONH-301"],
    ),
    on_volume(
        "cp -a $lib/. ../volume",
        &[("/usr/lib/x86_64-linux-gnu", "bind", &["shared"])],
        &["ONH-042"],
    ),
    on_volume("true", &[("/dev/dri", "bind", &[])], &["ONH-307"]),
    on_volume("true", &[("/usr/share", "tmpfs", &[])], &[]),
];

/// Two GPUs, and a file for a directory that images lack.
fn fake() -> &'static FakeDriver {
    static FAKE: OnceLock<FakeDriver> = OnceLock::new();
    FAKE.get_or_init(|| {
        let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
        let vendors = fake.root.join("usr/share/glvnd/egl_vendor.d");
        std::fs::create_dir_all(&vendors).unwrap();
        std::fs::write(vendors.join("10_nvidia.json"), "{}").unwrap();
        fake
    })
}

impl Obstacle {
    fn name(&self) -> String {
        format!("{}, {:?}", self.image, self.mounts)
    }

    fn image(&self, dir: &Path) -> Image {
        let image = Image::new(dir, &["--layout", "debian"]);
        let (dir, rootfs) = (dir.display(), image.rootfs.display());
        sh(&format!(
            "mkdir '{dir}/volume'; echo host >'{dir}/file'; lib={LIB}; cd '{rootfs}'; {}",
            self.image
        ))
        .ok();
        image
    }

    /// The shell commands of the mounts, as a runtime makes them.
    fn script(&self, dir: &Path) -> String {
        let dir = dir.display();
        let mut script = String::new();
        for (at, kind, options) in self.mounts {
            // A runtime follows links of the image below the root file system.
            let make = format!("at=$rootfs{at}");
            let mount = match *kind {
                "tmpfs" => "mkdir -p $at; mount -t tmpfs tmpfs $at".to_owned(),
                "file" => format!("test -e $at || touch $at; mount --bind '{dir}/file' $at"),
                _ => format!("mkdir -p $at; mount --bind '{dir}/volume' $at"),
            };
            script += &format!("{make}; {mount}; ");
            if options.contains(&"ro") {
                script += "mount -o remount,bind,ro $at; ";
            }
            if options.contains(&"shared") {
                script += "mount --make-shared $at; ";
            }
        }
        script
    }

    /// The mounts in config.json.
    fn mounts(&self, dir: &Path) -> Vec<Value> {
        let mut mounts = vec![
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}),
        ];
        for (at, kind, options) in self.mounts {
            let mut options = options.to_vec();
            let (kind, source) = match *kind {
                "tmpfs" => ("tmpfs", Path::new("tmpfs").to_owned()),
                "file" => ("bind", dir.join("file")),
                _ => ("bind", dir.join("volume")),
            };
            if kind == "bind" {
                options.push("rbind");
            }
            mounts.push(
                json!({"destination": at, "type": kind, "source": source, "options": options}),
            );
        }
        mounts
    }
}

/// The numbers and messages of findings.
type Said = BTreeSet<(String, String)>;

/// Returns what `plan` reports.
fn planned(ran: Ran, about: &str) -> Said {
    let text = ran.stdout.clone();
    let plan: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{about}: {ran:?}"));
    let is_error = plan["outcome"] == "error";
    assert_eq!(ran.code, Some(i32::from(is_error)), "{about}: {text}");
    assert_eq!(plan.get("unknown"), None, "{about}");
    let findings = plan["findings"].as_array().unwrap().iter();
    findings
        .map(|finding| {
            let text = |key: &str| finding[key].as_str().unwrap().to_owned();
            (text("id"), text("what"))
        })
        .collect()
}

/// Returns what the log of a start reports.
fn reported(log: &str) -> Said {
    let mut said = Said::new();
    for line in log.lines() {
        let line = line.split("; hint: ").next().unwrap_or_default();
        let found = line
            .strip_suffix(')')
            .and_then(|line| line.rsplit_once(" (ONH-"));
        let Some((what, id)) = found else {
            continue;
        };
        let mut what = what;
        for start in ["note: ", "warning: ", "error: ", "waiting: "] {
            what = what.split_once(start).map_or(what, |(_, rest)| rest);
        }
        said.insert((format!("ONH-{id}"), what.to_owned()));
    }
    said
}

fn plan(config: &Path, stdin: &str) -> Ran {
    let mut plan = Command::new(HOOK);
    plan.args(["plan", "-", "--json", "--config"]).arg(config);
    run_with(plan.env_clear(), stdin.as_bytes())
}

/// A config.toml that logs to a file.
fn with_log(dir: &Path) -> (std::path::PathBuf, std::path::PathBuf) {
    let (config, log) = (dir.join("config.toml"), dir.join("log"));
    let text = std::fs::read_to_string(&fake().config).unwrap();
    std::fs::write(&config, format!("{text}debug = \"{}\"\n", log.display())).unwrap();
    (config, log)
}

fn plan_and_start_agree() {
    let mut wrong = Vec::new();
    for case in OBSTACLES {
        let (dir, private) = (scratch(), private_dir());
        let (config, log) = with_log(private.path());
        let image = case.image(dir.path());
        let about = case.name();
        let more = json!({"mounts": case.mounts(dir.path())});
        let before = fingerprint(dir.path(), "");
        let spec = json!({"process": {"args": ["sh"], "env": ALL}, "root": {"path": image.rootfs}, "mounts": more["mounts"]});
        let of_spec = planned(plan(&config, &spec.to_string()), &about);
        assert_eq!(
            fingerprint(dir.path(), ""),
            before,
            "{about}: plan changes nothing"
        );
        let container = Waiting::start(dir.path(), &image.rootfs, ALL, &case.script(dir.path()));
        container.set_spec(ALL, &more);
        let of_state = planned(plan(&config, &container.state()), &about);
        let ran = container.hook(&config);
        let log = std::fs::read_to_string(log).unwrap();
        let start = reported(&log);
        let has = |id: &str| start.iter().any(|(found, _)| found == id);
        if !case.says.iter().all(|id| has(id)) {
            wrong.push(format!(
                "{about}: {:?} are not all in the log: {log}\n{ran:?}",
                case.says
            ));
        }
        if of_spec != start || of_state != start {
            wrong.push(format!(
                "{about}: {:?}\nplan of config.json: {of_spec:#?}\nplan of the state: {of_state:#?}\nstart: {start:#?}\n",
                ran.code
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differences\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// crun makes volumes read-only after the hooks, runc before.
fn read_only_volumes(runtime: &str) {
    let mut wrong = Vec::new();
    let is_read_only = |(_, _, options): &Mounted| options.contains(&"ro");
    for case in OBSTACLES {
        if !case.mounts.iter().any(is_read_only) {
            continue;
        }
        let (dir, private) = (scratch(), private_dir());
        let (config, log) = with_log(private.path());
        let image = case.image(dir.path());
        let about = case.name();
        let mut mounts = case.mounts(dir.path());
        mounts.insert(
            0,
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        );
        let hook =
            json!({"path": HOOK, "args": ["oci-nvidia-hook", "--config", config, "prestart"]});
        let spec = json!({
            "ociVersion": "1.0.2", "root": {"path": image.rootfs}, "mounts": mounts, "hooks": {"prestart": [hook]},
            "process": {"args": ["probe-dlopen", "libcuda.so.1"], "cwd": "/", "env": [ALL[0], ALL[1], "PATH=/usr/bin:/bin"], "user": {"uid": 0, "gid": 0}},
            "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]},
        });
        let planned = planned(plan(&config, &spec.to_string()), &about);
        std::fs::write(dir.path().join("config.json"), spec.to_string()).unwrap();
        let script = format!(
            "{} cd '{}'; exec {runtime} --root \"$PWD/state\" run onh-$$",
            Cgroup::WithCrun.prepare(),
            dir.path().display()
        );
        let ran = run(Command::new("unshare").args(["-m", "sh", "-euc", &script]));
        let started = reported(&std::fs::read_to_string(log).unwrap_or_default());
        let is_reported = |(id, what): &(String, String)| {
            started
                .iter()
                .any(|(other, text)| other == id && text.ends_with(what))
        };
        if planned.len() != started.len() || !planned.iter().all(is_reported) {
            wrong.push(format!(
                "{about}: {ran:?}\nplan: {planned:#?}\nstart: {started:#?}"
            ));
        }
        ran.ok();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// With CDI, the engine mounts the files, and the hook entry does the rest.
fn plan_and_the_entry_of_cdi_agree() {
    let edits = generate(fake(), &["--hook-path", HOOK]).container_edits;
    let mut wrong = Vec::new();
    for case in OBSTACLES {
        // The runtime fails there before the hook is called.
        let is_in_the_way = case.image.contains("mkdir usr/bin") || case.says == ["ONH-046"];
        if is_in_the_way
            || ["usr/share", "$lib;", "/usr/real"]
                .iter()
                .any(|part| case.image.contains(part))
            || !case.mounts.is_empty()
        {
            continue;
        }
        let dir = scratch();
        let image = case.image(dir.path());
        let about = case.name();
        let container = with_mounts(dir.path(), &image.rootfs, &edits);
        let mut mounts = vec![json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"})];
        for mount in &edits.mounts {
            mounts.push(json!({"destination": mount.container_path, "type": "bind", "source": mount.host_path, "options": mount.options}));
        }
        let more = json!({"mounts": mounts, "hooks": {"createRuntime": [{"path": HOOK, "args": edits.hooks[0].args}]}});
        container.set_spec(&["NVIDIA_VISIBLE_DEVICES=void"], &more);
        let config = std::fs::read_to_string(container.bundle.join("config.json")).unwrap();
        let of_spec = planned(plan(&fake().config, &config), &about);
        let ran = container.create_runtime_hook(&edits.hooks[0].args[1..]);
        // Notes are not printed.
        let is_printed = |(id, _): &(String, String)| id != "ONH-301";
        let of_spec: Said = of_spec.into_iter().filter(is_printed).collect();
        let stderr = ran.stderr.replace("oci-nvidia-hook: ", "");
        let start = reported(&stderr);
        if of_spec != start {
            wrong.push(format!(
                "{about}: {:?}\nplan: {of_spec:#?}\nstart: {start:#?}\n",
                ran.code
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differences\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// An image that no engine has mounted, and a mount that exists only in the engine's namespace.
fn what_plan_cannot_know() {
    let dir = scratch();
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let spec = |rootfs: &Path, mounts: Value| {
        json!({"process": {"env": ALL}, "root": {"path": rootfs}, "mounts": mounts}).to_string()
    };
    let unknown = |spec: String| {
        let ran = plan(&fake().config, &spec);
        let plan: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!((ran.code, &plan["outcome"]), (Some(0), &json!("inject")));
        plan["unknown"].clone()
    };
    let text = format!("the files of the image: the root file system {empty:?} is not mounted");
    let found = unknown(spec(&empty, json!([])));
    assert!(found[0].as_str().unwrap().starts_with(&text), "{found}");
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let gone = json!([{"destination": "/usr/bin", "type": "bind", "source": "/nonexistent/volume"},
                      {"destination": "/data", "type": "bind", "source": "/nonexistent/data"}]);
    assert_eq!(
        unknown(spec(&image.rootfs, gone)),
        json!(["the files in \"/usr/bin\": its mount is not visible"]),
        "no driver file is in /data"
    );
}
