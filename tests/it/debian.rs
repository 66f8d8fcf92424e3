//! NVIDIA's real user-space files, as Debian packages them, unpacked into a driver root.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use base::paths::HostPath;
use base::tree::Tree;
use nvidia_host::capability::Capabilities;
use nvidia_host::driver::DriverKind;
use nvidia_host::driver::libraries::{LinkerCache, Search};
use nvidia_host::driver::locate::locate;

use crate::driver::{FakeDriver, Waiting};
use crate::support::{
    HOOK, Need, assert_lacks, assert_says, read, run, run_with, scratch, sh, shell, source,
    write_file,
};

// The packages come from the mirror that this Debian machine uses.
const NEEDS: &[Need] = &[
    Need::Root,
    Need::Debian,
    Need::Programs(&["apt-get", "dpkg-deb", "cc"]),
];

const NEEDS_STRACE: &[Need] = &[
    Need::Root,
    Need::Debian,
    Need::Programs(&["apt-get", "dpkg-deb", "cc", "strace"]),
];

tests! {
    NEEDS => every_library_has_its_capability, list_prints_them, the_real_files_resolve_in_a_container,
        the_fake_library_serves_a_device_plugin, the_real_library_without_a_gpu, the_table_of_nvml_is_that_of_nvml_h;
    NEEDS_STRACE => the_real_library_is_denied_nothing_that_it_needs;
}

/// Returns the driver root, which is created once and kept between runs.
fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("debian-driver");
        // A mirror may fail temporarily; a test must not.
        let make = || run(Command::new(source("tests/debian-driver")).arg(&root));
        let tries = (0..2).map(|_| make()).find(|ran| ran.code == Some(0));
        tries.unwrap_or_else(make).ok();
        root
    })
}

/// Returns every library of the driver in the packages, below `root`.
fn shipped() -> (String, BTreeSet<String>) {
    let listed = shell!("cd '{}'; find usr -name '*.so.*' -type f", root().display());
    let native = listed.lines().filter(|path| !path.contains("i386"));
    let libraries: BTreeSet<_> = native.map(|path| format!("/{path}")).collect();
    let ml = libraries
        .iter()
        .find_map(|path| path.split_once("libnvidia-ml.so."))
        .expect("libnvidia-ml");
    (ml.1.to_owned(), libraries)
}

fn every_library_has_its_capability() {
    let (version, shipped) = shipped();
    assert!(shipped.len() > 20, "{shipped:?}");
    let driver = Tree::open(&HostPath::new(root())).unwrap();
    let cache = LinkerCache::of(&driver, None);
    let search = Search {
        root: &driver,
        cache: &cache,
        version: &version,
        dirs: &[],
        kind: DriverKind::Linux,
    };
    let capabilities = Capabilities::supported("compute,utility,video,graphics").unwrap();
    let (files, findings) = locate(&search, capabilities, &[]).unwrap();
    assert_eq!(findings, []);
    let below = |path: &Path| format!("/{}", path.strip_prefix(root()).unwrap().display());
    let found: BTreeSet<_> = files
        .libraries
        .iter()
        .map(|library| below(library.source.as_path()))
        .collect();
    assert_eq!(found, shipped);
    assert!(
        files
            .libraries
            .iter()
            .all(|library| !library.sonames.is_empty())
    );
    assert!(files.binaries.iter().any(|binary| {
        binary
            .source
            .as_path()
            .ends_with("nvidia/current/nvidia-smi")
    }));
    let placed: Vec<_> = files
        .placed
        .iter()
        .map(|file| file.target.absolute())
        .collect();
    for path in [
        "/etc/OpenCL/vendors/nvidia.icd",
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    ] {
        assert!(
            placed.iter().any(|target| target == Path::new(path)),
            "{path} is not in {placed:?}"
        );
    }
}

fn list_prints_them() {
    let (_, shipped) = shipped();
    let list = |options: &[&str]| {
        let mut hook = Command::new(HOOK);
        let config = source("config/config.toml");
        let ran = run(hook
            .arg("--config")
            .arg(config)
            .args(["files", "--root"])
            .arg(root())
            .args(options)
            .env_clear());
        ran.ok().lines().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(list(&["--libraries"]), shipped);
    let compat32 = list(&["--compat32"]);
    for name in [
        "libcuda.so",
        "libnvidia-ml.so",
        "libnvidia-encode.so",
        "libGLX_nvidia.so",
        "libnvidia-glcore.so",
    ] {
        assert!(
            compat32
                .iter()
                .any(|path| path.contains("i386") && path.contains(name)),
            "{name} is not in {compat32:?}"
        );
    }
    // Devices are not listed, because there is no GPU here.
    let all = list(&[
        "--binaries",
        "--libraries",
        "--compat32",
        "--ipcs",
        "--firmwares",
    ]);
    assert!(
        all.is_superset(&shipped) && all.contains("/usr/lib/nvidia/current/nvidia-smi"),
        "{all:?}"
    );
    let firmware = list(&["-f"]);
    assert!(
        firmware.len() >= 2 && firmware.iter().all(|path| path.contains("/gsp_")),
        "{firmware:?}"
    );
}

/// Everything that the real programs and libraries need exists, and the description files for loaders name libraries that can be
/// loaded.
fn the_real_files_resolve_in_a_container() {
    let (version, _) = shipped();
    let fake = FakeDriver::among_real_files(root(), &version);
    let env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video,graphics",
    ];
    let container = Waiting::debian(&env, "");
    assert_eq!(container.hook(&fake.config).ok(), "");
    let libdir = "/usr/lib/x86_64-linux-gnu";
    let needed = container.output("LD_TRACE_LOADED_OBJECTS=1 /usr/bin/nvidia-smi");
    assert_says(&needed, &["libc.so.6 => "]);
    assert_lacks(&needed, &["not found"]);
    container.output(
        "probe-dlopen libcuda.so.1 libcuda.so libnvidia-ptxjitcompiler.so.1 libnvidia-nvvm.so.4",
    );
    container.output(&format!(
            "probe-dlopen libnvcuvid.so.1 libnvidia-encode.so.1 libnvidia-opencl.so.1 libnvidia-glvkspirv.so.{version}"
        ));
    for (json, library) in [
        ("/etc/vulkan/icd.d/nvidia_icd.json", "libGLX_nvidia.so.0"),
        (
            "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
            "libEGL_nvidia.so.0",
        ),
        ("/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1"),
    ] {
        assert!(
            container.output(&format!("cat {json}")).contains(library),
            "{json}"
        );
        assert!(
            container
                .output("ldconfig -p")
                .contains(&format!("{library} (libc6,x86-64) => {libdir}/{library}"))
        );
    }
}

/// The real libnvidia-ml reports "driver not loaded", which is true but does not help.
fn the_real_library_without_a_gpu() {
    let dir = scratch();
    std::fs::create_dir(dir.path().join("rootfs")).unwrap();
    let spec = serde_json::json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "root": {"path": "rootfs"}});
    write_file(dir.path().join("config.json"), spec.to_string());
    let state =
        serde_json::json!({"id": "c", "pid": std::process::id(), "bundle": dir.path()}).to_string();
    let host = dir.path().join("host");
    shell!("cp -al '{}' '{}'", root().display(), host.display());
    let config = dir.path().join("config.toml");
    write_file(
        &config,
        format!("[nvidia-container-cli]\nroot = \"{}\"\n", host.display()),
    );
    let hook = || {
        let mut hook = Command::new(HOOK);
        run_with(
            hook.arg("--config")
                .arg(&config)
                .arg("prestart")
                .env_clear(),
            state.as_bytes(),
        )
        .failed(1)
    };
    let devices = host.join("sys/bus/pci/devices");
    std::fs::create_dir_all(&devices).unwrap();
    assert!(hook().contains("(ONH-010)"));
    let device = devices.join("0000:01:00.0");
    std::fs::create_dir(&device).unwrap();
    write_file(device.join("vendor"), "0x10de\n");
    write_file(device.join("class"), "0x030200\n");
    let stderr = hook();
    assert_says(
        &stderr,
        &["(ONH-011)\nhint: load it with \"modprobe nvidia\""],
    );
}

/// The real libnvidia-ml opens the nodes as it does without Landlock and a filter. Only its attempts to repair nodes and to start
/// nvidia-modprobe are denied.
fn the_real_library_is_denied_nothing_that_it_needs() {
    const REPAIRS: [&str; 7] = [
        "chmod", "chown", "execve", "mkdir", "mknod", "symlink", "unlink",
    ];
    let (version, _) = shipped();
    let name = format!("libnvidia-ml.so.{version}");
    let dir = scratch();
    for (mode, group, user, owner) in [
        ("0666", "root", "", 65534),
        ("0660", "video", "user = \"root:video\"", 65534),
        ("0600", "root", "user = \"root\"", 0),
    ] {
        let fake = FakeDriver::new(&[
            "--gpus",
            "2",
            "--version",
            &version,
            "--dev-mode",
            mode,
            "--dev-group",
            group,
        ]);
        fake.configure(user);
        let real = root()
            .join("usr/lib/x86_64-linux-gnu/nvidia/current")
            .join(&name);
        let library = fake.library();
        std::fs::remove_file(&library).unwrap();
        std::fs::copy(real, library).unwrap();
        let trace = dir.path().join("trace");
        let mut hook = Command::new("strace");
        hook.args(["-f", "-qq", "-a1", "-o"])
            .arg(&trace)
            .arg(HOOK)
            .arg("--config")
            .arg(&fake.config)
            .arg("info")
            .env_clear();
        let stderr = run_with(&mut hook, b"").failed(1);
        assert_says(&stderr, &["nvmlInit_v2 reports \"driver not loaded\""]);
        let trace = read(&trace);
        let (before, after) = trace
            .rsplit_once(&format!("{name}\", O_RDONLY|O_CLOEXEC) = "))
            .unwrap();
        assert!(
            before.contains(&format!("setresuid({owner}, {owner}, {owner}) = 0")),
            "{mode}"
        );
        assert_says(
            after,
            &["openat(AT_FDCWD, \"/dev/nvidiactl\", O_RDWR) = -1 ENXIO"],
        );
        let denied = after
            .lines()
            .filter(|line| line.contains(" = -1 EPERM ") || line.contains(" = -1 EACCES "));
        let denied: Vec<_> = denied
            .filter(|line| {
                !REPAIRS
                    .iter()
                    .any(|call| line.contains(&format!("{call}(")))
            })
            .collect();
        assert_eq!(denied, [""; 0], "{mode}");
    }
}

/// Translates the type of a parameter to C.
fn in_c(parameter: &str) -> String {
    let name = parameter
        .trim_start_matches("&mut ")
        .trim_start_matches('[')
        .split([';', '<', ']'])
        .next()
        .unwrap();
    let name = match name {
        "c_int" | "Count" => "int".to_owned(),
        "c_uint" | "Length" | "Room" => "unsigned int".to_owned(),
        "ProcessList" => "nvmlProcessInfo_t".to_owned(),
        "c_ulonglong" => "unsigned long long".to_owned(),
        "Text" => "char".to_owned(),
        "BorrowedSet" => "nvmlEventSet_t".to_owned(),
        "DeviceHandle" => "nvmlDevice_t".to_owned(),
        name => structure_in_c(name),
    };
    name + if parameter.starts_with('&') { " *" } else { "" }
}

/// Translates the name of a structure or an enumeration to C.
fn structure_in_c(name: &str) -> String {
    match name.strip_suffix("V2") {
        Some(name) => format!("nvml{name}_v2_t"),
        None => format!("nvml{name}_t"),
    }
}

/// Returns an assertion in C for each function, each enumeration and each size in the source.
fn assertions_about_nvml() -> Vec<String> {
    let ffi = |name: &str| read(source(&format!("crates/nvml/src/ffi/{name}")));
    let (table, structs) = (ffi("table.rs"), ffi("structs.rs"));
    let functions = table
        .split_once("prototypes! {")
        .unwrap()
        .1
        .lines()
        .filter_map(|line| {
            let (name, parameters) = line.trim().strip_suffix(");")?.split_once('(')?;
            let types: Vec<_> = parameters
                .split(", ")
                .filter_map(|one| Some(in_c(one.split_once(": ")?.1)))
                .collect();
            let types = if types.is_empty() {
                "void".to_owned()
            } else {
                types.join(", ")
            };
            let same =
                format!("__builtin_types_compatible_p(__typeof__({name}), nvmlReturn_t({types}))");
            Some(format!("_Static_assert({same}, \"{name}\");"))
        });
    let enums = table
        .lines()
        .filter_map(|line| line.split_once("type ")?.1.strip_suffix(" = c_uint;"));
    let enums = enums.map(|name| (name, "sizeof(unsigned)"));
    let sizes = structs.split("size_of::<").filter_map(|text| {
        let (name, rest) = text.split_once(">() == ")?;
        Some((name, rest.split([' ', ')']).next()?))
    });
    let sizes = enums.chain(sizes).map(|(name, size)| {
        let structure = structure_in_c(name);
        format!("_Static_assert(sizeof({structure}) == {size}, \"{name}\");")
    });
    functions.chain(sizes).collect()
}

fn the_table_of_nvml_is_that_of_nvml_h() {
    let assertions = assertions_about_nvml();
    assert_eq!(assertions.len(), 47 + 6 + 8, "{assertions:#?}");
    let dir = scratch();
    let compile = |assertions: &str, options: &[&str]| {
        let file = dir.path().join("table.c");
        write_file(&file, format!("#include <nvml.h>\n{assertions}\n"));
        let mut cc = Command::new("cc");
        run(cc
            .arg("-fsyntax-only")
            .args(options)
            .arg("-I")
            .arg(root().join("usr/include"))
            .arg(file))
    };
    // The header declares functions of older drivers only for programs that select versions themselves.
    let (older, assertions): (Vec<_>, Vec<_>) = assertions
        .into_iter()
        .partition(|one| one.contains("RunningProcesses_v2"));
    assert_eq!(older.len(), 3, "{older:#?}");
    // The header that Debian has lacks addressing modes and the newer name of the reasons of clocks.
    let (newer, assertions): (Vec<_>, Vec<_>) = assertions
        .into_iter()
        .partition(|one| one.contains("AddressingMode") || one.contains("ClocksEventReasons"));
    assert_eq!(newer.len(), 3, "{newer:#?}");
    // Another type with the same layout.
    let older = older
        .join("\n")
        .replace("nvmlProcessInfo_t", "nvmlProcessInfo_v2_t");
    let layout = "_Static_assert(sizeof(nvmlProcessInfo_v2_t) == sizeof(nvmlProcessInfo_t), \"layout\");\n\
                  _Static_assert(__builtin_offsetof(nvmlProcessInfo_v2_t, gpuInstanceId) == 16, \"layout\");\n";
    compile(
        &(layout.to_owned() + &older),
        &["-DNVML_NO_UNVERSIONED_FUNC_DEFS"],
    )
    .ok();
    compile(&assertions.join("\n"), &[]).ok();
    let wrong = assertions.join("\n").replace(
        "nvmlDeviceGetName), nvmlReturn_t(nvmlDevice_t, char *",
        "nvmlDeviceGetName), nvmlReturn_t(char *",
    );
    assert!(compile(&wrong, &[]).stderr.contains("nvmlDeviceGetName"));
}

/// The calls of NVIDIA's device plugin: it initializes the library twice and shuts it down once, and asks for the profiles of MIG devices.
/// The program is compiled with NVIDIA's header.
fn the_fake_library_serves_a_device_plugin() {
    let dir = scratch();
    let layout = dir.path().join("layout");
    write_file(
        &layout,
        "mig gpu=0 gi=1 ci=0 profile=1g.10gb uuid=MIG-1\nmig gpu=0 gi=2 ci=0 profile=3g.40gb uuid=MIG-3\n",
    );
    // Paths that are relative, as a user would give them.
    let make = "cd \"$1\"; \"$2\" fake --build build --gpus 1; \"$2\" fake --mig-layout layout";
    let make_root = source("tests/fake-driver/make-root");
    run(Command::new("sh")
        .args(["-euc", make, "sh"])
        .arg(dir.path())
        .arg(make_root))
    .ok();
    let find = format!(
        "find '{}' -name libnvidia-ml.so.1",
        dir.path().join("fake").display()
    );
    let library = sh(&find).ok();
    let program = dir.path().join("program");
    let mut compile = Command::new("cc");
    compile
        .arg("-I")
        .arg(root().join("usr/include"))
        .arg("-o")
        .arg(&program);
    run(compile
        .arg(source("tests/fixtures/nvml-user.c"))
        .arg(library.trim()))
    .ok();
    let libraries = Path::new(library.trim()).parent().unwrap();
    let nodes = format!(
        "mount --bind '{}/dev' /dev; exec '{}'",
        dir.path().join("fake").display(),
        program.display()
    );
    let mut user = Command::new("unshare");
    let ran = run(user
        .args(["-m", "sh", "-euc", &nodes])
        .env("LD_LIBRARY_PATH", libraries));
    assert_eq!(
        ran.ok(),
        "MIG-1: instance 1 with profile 0, compute instance 0 with profile 0\n\
                          MIG-3: instance 2 with profile 2, compute instance 0 with profile 2\n"
    );
}
