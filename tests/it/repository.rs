//! `make repository`: zypper and apt install from the signed repositories, upgrade to a second version and remove it, and reject
//! a repository that someone else changed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Need, assert_lacks, read, run, scratch, shell, source, write_file};
use crate::{built, deb, rpm, zypper};

const ZYPPER: &[Need] = &[
    Need::Root,
    Need::Programs(&["rpmbuild", "cc", "gpg", "rpmsign", "createrepo_c", "zypper"]),
];
const APT: &[Need] = &[
    Need::Root,
    Need::Programs(&[
        "dpkg-buildpackage",
        "dh",
        "cc",
        "gpg",
        "createrepo_c",
        "rpmbuild",
        "apt-ftparchive",
    ]),
];

tests! {
    ZYPPER => zypper_installs_upgrades_and_removes;
    APT => apt_installs_upgrades_and_removes, a_release_has_everything;
}

const KEY: &str = "packages@example.org";
const MAIN: &str = "oci-nvidia-hook";

/// A publisher: a key of gpg, and the packages that were built.
struct Publisher {
    dir: tempfile::TempDir,
}

impl Publisher {
    fn new() -> Self {
        let dir = scratch();
        shell!(
            "mkdir -m 700 '{0}/gnupg' && mkdir '{0}/rpms' '{0}/debs'; \
             GNUPGHOME='{0}/gnupg' gpg --batch --quiet --passphrase '' --quick-generate-key {KEY} rsa2048 sign never",
            dir.path().display()
        );
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn offers(&self, directory: &str, packages: &[PathBuf]) {
        std::fs::remove_dir_all(self.path(directory)).unwrap();
        std::fs::create_dir(self.path(directory)).unwrap();
        for package in packages {
            std::fs::copy(
                package,
                self.path(directory).join(package.file_name().unwrap()),
            )
            .unwrap();
        }
    }

    /// Publishes at this machine's own address.
    fn publish_here(&self) {
        let public = self.path("public");
        let mut repository = Command::new(source("packaging/repository"));
        repository
            .arg(KEY)
            .arg(format!("file://{}", public.display()));
        repository
            .arg(&public)
            .env("GNUPGHOME", self.path("gnupg"))
            .env("RPMS", self.path("rpms"))
            .env("DEBS", self.path("debs"));
        let ran = run(&mut repository);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
}

/// gpg starts an agent for each home directory, which would outlive the test.
impl Drop for Publisher {
    fn drop(&mut self) {
        run(Command::new("gpgconf")
            .args(["--kill", "all"])
            .env("GNUPGHOME", self.path("gnupg")));
    }
}

fn zypper_installs_upgrades_and_removes() {
    let (publisher, packages) = (Publisher::new(), rpm::Packages::shared());
    let host = scratch();
    let root = host.path().join("root");
    zypper::install_base(&root, &packages.now);
    publisher.offers("rpms", &packages.now);
    publisher.publish_here();
    let public = publisher.path("public");
    let zypper = |arguments: &[&str]| zypper::command(&root, arguments);
    let installed = |query: &str| zypper::rpm(&root, &["-q", "--qf", query, MAIN]).stdout;

    // The commands of docs/install.md
    zypper::rpm(
        &root,
        &[
            "--import",
            public.join("oci-nvidia-hook.asc").to_str().unwrap(),
        ],
    )
    .ok();
    zypper(&[
        "addrepo",
        public.join("rpm/oci-nvidia-hook.repo").to_str().unwrap(),
    ])
    .ok();
    let ran = zypper(&["install", MAIN]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_lacks(&ran.stdout, &["scriptlet"]);
    assert_eq!(
        installed("%{RELEASE}"),
        rpm::query(rpm::find(&packages.now, MAIN), "%{RELEASE}")
    );
    // dnf checks the signature of the package itself.
    let described = zypper::rpm(&root, &["-qi", MAIN]).stdout;
    let signature = described.split("\nSignature ").nth(1).unwrap();
    assert!(signature.contains("RSA/SHA"), "{described}");

    publisher.offers("rpms", &packages.later);
    publisher.publish_here();
    // zypper reads the repository again by itself, at the earliest after this number of minutes.
    let conf = root.join("etc/zypp/zypp.conf");
    write_file(&conf, "[main]\nrepo.refresh.delay = 0\n");
    zypper(&["update"]).ok();
    assert_eq!(
        installed("%{RELEASE}"),
        rpm::query(rpm::find(&packages.later, MAIN), "%{RELEASE}")
    );
    let earlier = shell!(
        "find '{}' -name '{MAIN}-[0-9]*.rpm' | wc -l",
        public.display()
    );
    assert_eq!(
        earlier.trim(),
        "2",
        "the earlier version is not available any more"
    );

    zypper(&["remove", MAIN]).ok();
    assert!(!root.join("usr/bin/oci-nvidia-hook").exists());

    // Another repository at this address, without the key
    shell!(
        "echo '<!-- -->' >>'{}/rpm/repodata/repomd.xml'",
        public.display()
    );
    let ran = zypper(&["refresh", "--force"]);
    assert!(
        ran.code != Some(0) && (ran.stdout + &ran.stderr).contains("ignature verification failed")
    );
}

fn apt_installs_upgrades_and_removes() {
    let (publisher, packages) = (Publisher::new(), rpm::Packages::shared());
    publisher.offers("rpms", &packages.now);
    let debs = [deb::package(MAIN)];
    publisher.offers("debs", &debs);
    publisher.publish_here();
    let first = publisher.path("first");
    std::fs::rename(publisher.path("public"), &first).unwrap();
    shell!(
        "cp -a '{0}/first' '{0}/public'",
        publisher.dir.path().display()
    );

    // The same package with a later version
    let tree = publisher.path("tree");
    run(Command::new("dpkg-deb").arg("-R").args([&debs[0], &tree])).ok();
    shell!(
        "cd '{}'; sed -i 's/^Version: .*/&.1/' tree/DEBIAN/control; dpkg-deb --root-owner-group -Znone -b tree debs >/dev/null",
        publisher.dir.path().display()
    );
    publisher.publish_here();
    shell!(
        "cd '{}'; mv public second; mkdir public",
        publisher.dir.path().display()
    );

    let script = "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists\n\
         exec 2>&1 </dev/null\n\
         apt() { apt-get -q -o APT::Sandbox::User=root \"$@\" >/mnt/log || { cat /mnt/log; exit 1; }; }\n\
         version() { dpkg-query -W -f '${db:Status-Abbrev} ${Version}\\n' oci-nvidia-hook; }\n\
         mount --bind \"$ROOT/first\" \"$ROOT/public\"\n\
         cp \"$ROOT/public/deb/oci-nvidia-hook.sources\" /etc/apt/sources.list.d\n\
         apt update; apt install -y --no-install-recommends oci-nvidia-hook; version\n\
         umount \"$ROOT/public\"; mount --bind \"$ROOT/second\" \"$ROOT/public\"\n\
         apt update; apt install -y --only-upgrade oci-nvidia-hook; version\n\
         apt remove -y oci-nvidia-hook; test ! -e /usr/bin/oci-nvidia-hook\n\
         apt purge -y oci-nvidia-hook\n\
         mkdir /mnt/changed; cp -a \"$ROOT/second/.\" /mnt/changed\n\
         sed -i 's/^Label: .*/Label: other/' /mnt/changed/deb/dists/stable/InRelease /mnt/changed/deb/dists/stable/Release\n\
         umount \"$ROOT/public\"; mount --bind /mnt/changed \"$ROOT/public\"; rm -rf /var/lib/apt/lists\n\
         if apt-get -o APT::Update::Error-Mode=any update >/mnt/log 2>&1; then echo 'accepted a changed repository'; fi\n\
         grep -qiE 'BADSIG|signature verification failed' /mnt/log && echo 'signature verification failed' || cat /mnt/log";
    // apt 2.9.19 and newer verify with sqv instead of gpg.
    let version = run(Command::new("dpkg-deb")
        .args(["--field"])
        .arg(&debs[0])
        .arg("Version"))
    .ok();
    let version = version.trim();
    let said = deb::on_host(script, publisher.dir.path());
    assert_eq!(
        said.ok(),
        format!("ii  {version}\nii  {version}.1\nsignature verification failed\n")
    );
}

/// Unpacks the sources, and returns a command that creates a release from them: a release needs a tree without changes, which the tree
/// of a developer is not.
fn release(publisher: &Publisher, tree: &Path) -> Command {
    let version = env!("CARGO_PKG_VERSION");
    let tarball = built::dist().join(format!("{MAIN}-{version}.tar.gz"));
    std::fs::create_dir(tree).unwrap();
    run(Command::new("tar")
        .arg("-xzf")
        .arg(tarball)
        .arg("-C")
        .arg(tree)
        .arg("--strip-components=1"))
    .ok();
    let mut release = Command::new(tree.join("packaging/release"));
    release
        .env("GNUPGHOME", publisher.path("gnupg"))
        .env("CARGO", env!("CARGO"));
    release
}

/// Whoever downloads a release can check its files, which are all that docs/releasing.md names.
fn a_release_has_everything() {
    let publisher = Publisher::new();
    let out = publisher.path("out");
    let kit = publisher.path("oci-nvidia-hook-gpu-kit-x86_64.tar.gz");
    write_file(&kit, "gpu_kit:: creates the kit");
    let mut command = release(&publisher, &publisher.path("tree"));
    command
        .arg(KEY)
        .arg(&out)
        .env("TARBALLS", built::dist())
        .env(
            "RPMS",
            rpm::Packages::shared().now[0]
                .parent()
                .unwrap()
                .parent()
                .unwrap(),
        )
        .env("DEBS", deb::packages())
        .env("KIT", &kit);
    run(&mut command).ok();
    let version = env!("CARGO_PKG_VERSION");
    let dir = out.join(format!("{MAIN}-{version}"));
    let checked = shell!(
        "cd '{}'; export GNUPGHOME=\"$(mktemp -d)\"; gpg --quiet --batch --import oci-nvidia-hook.asc; \
         gpg --quiet --batch --verify SHA256SUMS.asc SHA256SUMS; sha256sum --check --strict --quiet SHA256SUMS; \
         gpgconf --kill all; rm -r \"$GNUPGHOME\"; cut -d ' ' -f 3 SHA256SUMS",
        dir.display()
    );
    let names: Vec<&str> = checked.lines().collect();
    let expected = [
        format!("{MAIN}-{version}.tar.gz"),
        format!("{MAIN}-{version}-vendor.tar.gz"),
        format!("{MAIN}-{version}.cdx.json"),
        format!("oci-nvidia-kubelet-plugin-{version}.cdx.json"),
        "oci-nvidia-hook-gpu-kit-x86_64.tar.gz".to_owned(),
        "NOTES.md".to_owned(),
    ];
    for name in &expected {
        assert!(
            names.contains(&name.as_str()),
            "{name} is missing: {names:?}"
        );
    }
    for kind in [".rpm", ".deb"] {
        let packages = names.iter().filter(|name| name.ends_with(kind)).count();
        assert!(packages >= 3, "{packages} packages {kind}: {names:?}");
    }
    let notes = read(dir.join("NOTES.md"));
    assert!(
        !notes.contains("## ") && !notes.trim().is_empty(),
        "{notes}"
    );
}
