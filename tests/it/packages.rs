//! Real package managers in a container with a driver whose libraries are in directories that the image's ldconfig does not
//! search. The triggers and scriptlets of the distributions run ldconfig, and the libraries must be found afterwards.

use std::path::Path;
use std::process::Command;

use crate::driver::{FakeDriver, Image, Waiting};
use crate::ldconfig::{LIST, LOOK, cdi_container, edited_container};
use crate::support::{Need, run, scratch, shell};

const DPKG: &[Need] = &[Need::Root, Need::Programs(&["cc", "dpkg", "dpkg-deb"])];
const RPM: &[Need] = &[Need::Root, Need::Programs(&["cc", "rpm", "rpmbuild"])];

tests! {
    DPKG => dpkg_with_cdi = installs(cdi_container, Manager::Dpkg),
        dpkg_with_an_edited_config = installs(edited_container, Manager::Dpkg);
    RPM => rpm_with_cdi = installs(cdi_container, Manager::Rpm);
}

#[derive(Clone, Copy, Debug)]
enum Manager {
    Dpkg,
    Rpm,
}

/// An image with this host's dpkg, and with a libc-bin whose trigger runs ldconfig, like Debian's. Some builds of dpkg do not
/// contain start-stop-daemon.
const DPKG_ROOT: &str = r#"
for program in dpkg dpkg-deb dpkg-split dpkg-query dpkg-trigger tar rm diff start-stop-daemon; do
    command -v $program >/dev/null || continue
    for file in $(command -v $program) $(ldd $(command -v $program) | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p'); do
        mkdir -p "$root$(dirname $file)"; [ -e "$root$file" ] || cp -L $file "$root$file"
    done
done
info=$root/var/lib/dpkg/info
mkdir -p $info $root/var/lib/dpkg/updates $root/var/lib/dpkg/triggers $root/var/log
printf "Package: libc-bin\nStatus: install ok installed\nArchitecture: $(dpkg --print-architecture)\n" >$root/var/lib/dpkg/status
printf "Version: 1\nMaintainer: a <a@b.c>\nDescription: x\n" >>$root/var/lib/dpkg/status
echo 'interest-noawait ldconfig' >$info/libc-bin.triggers
printf '#!/bin/sh\n[ "$1" != triggered ] || ldconfig\n' >$info/libc-bin.postinst
chmod 755 $info/libc-bin.postinst
echo /. >$info/libc-bin.list
echo libc-bin >$root/var/lib/dpkg/triggers/ldconfig
: >$root/var/lib/dpkg/triggers/File
"#;

/// A library package with the trigger that debhelper writes for libraries; `$n` is its number.
const DEB: &str = r#"
mkdir -p $top/$n/DEBIAN $top/$n/usr/lib
cp "$top/libmine.so.1" $top/$n/usr/lib/libmine$n.so.1
printf "Package: libmine$n\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n" >$top/$n/DEBIAN/control
echo 'activate-noawait ldconfig' >$top/$n/DEBIAN/triggers
dpkg-deb --build $top/$n $root/libmine$n.deb
"#;

/// The same with the scriptlet of openSUSE's library packages.
const RPM_SPEC: &str = r#"
printf "Name: libmine$n\nVersion: 1\nRelease: 1\nSummary: x\nLicense: MIT\nBuildArch: noarch\nAutoReqProv: no\n" >$top/spec
printf "%%define _binaries_in_noarch_packages_terminate_build 0\n" >>$top/spec
printf "%%description\nx\n%%install\ninstall -D $top/libmine.so.1 %%{buildroot}/usr/lib/libmine$n.so.1\n" >>$top/spec
printf "%%post -p /sbin/ldconfig\n%%files\n/usr/lib/libmine$n.so.1\n" >>$top/spec
rpmbuild -bb --quiet --define "_topdir $top/rpm" --define "__strip /bin/true" $top/spec
"#;

fn installs(make: fn(&Path, &FakeDriver, &Path) -> Waiting, manager: Manager) {
    let (dir, fake) = (
        scratch(),
        FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]),
    );
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let words = format!(
        "root='{}'; top='{}'\n",
        image.rootfs.display(),
        dir.path().display()
    );
    shell!(
        "{words} echo 'int mine;' | cc -shared -o $top/libmine.so.1 -Wl,-soname,libmine.so.1 -x c -"
    );
    for number in [1, 2] {
        match manager {
            Manager::Dpkg if number == 1 => shell!("{words} n=1\n{DPKG_ROOT}{DEB}"),
            Manager::Dpkg => shell!("{words} n={number}\n{DEB}"),
            Manager::Rpm => shell!("{words} n={number}\n{RPM_SPEC}"),
        };
    }
    let container = make(dir.path(), &fake, &image.rootfs);
    let install = |number: u32| match manager {
        Manager::Dpkg => {
            let said = container.output(&format!("dpkg -i /libmine{number}.deb"));
            assert!(said.contains("Processing triggers for libc-bin"), "{said}");
        }
        // The host's rpm, which enters the container's root for the scriptlet.
        Manager::Rpm => {
            let package = format!(
                "{}/rpm/RPMS/noarch/libmine{number}-1-1.noarch.rpm",
                dir.path().display()
            );
            let mut rpm = Command::new("nsenter");
            rpm.args(["-m", "-t", &container.pid().to_string(), "rpm", "--root"])
                .arg(&container.rootfs);
            let ran = run(rpm.args(["--dbpath", "/var/lib/rpm", "--nodeps", "-i", &package]));
            assert!(!ran.stderr.contains("scriptlet"), "{ran:?}");
            ran.ok();
        }
    };
    let before = container.output(LOOK);
    install(1);
    container.output("ldconfig -p | grep libmine.so.1");
    assert_eq!(container.output(LOOK), before, "{manager:?}");
    // The list in ld.so.conf.d keeps the driver's own directory in the cache. Without it, the links in the image's directory do.
    container.output(&format!("rm {LIST}"));
    install(2);
    container.output("probe-dlopen libcuda.so.1");
    let listed = container.output("ldconfig -p");
    assert!(!listed.contains("=> /usr/lib64/libcuda.so.1"), "{listed}");
}
