# Targets for developers. `make demo`, `make test` and `make test-all` install missing tools (as root).

# Runs a cargo that is new enough.
CARGO ?= $(CURDIR)/tests/cargo
export CARGO

# make splits lists at spaces, and rpmbuild cannot build in such a directory.
ifneq ($(words $(CURDIR)),1)
$(error the path "$(CURDIR)" contains a space; hint: move the clone to a path without spaces)
endif

.PHONY: all help build demo test run-tests test-all run-other-tests engines fresh vm gpu gpu-kit lint lint-variants fuzz bench dist rpm deb repository release release-checks reproducible deny advisories aarch64 sbom clean

all: build

## Lists these targets.
help:
	@awk '/^## / { text = text (text == "" ? "" : " ") substr($$0, 4); next } \
		/^[a-z][a-z0-9-]*:/ && text != "" { sub(/:.*/, "", $$1); sub(/[.:] .*/, "", text); sub(/[.]$$/, "", text); \
		printf "make %-15s %s\n", $$1, text } !/^SECONDS/ { text = "" }' Makefile

## Builds target/release/oci-nvidia-hook, oci-nvidia-mps and oci-nvidia-nvml, which both start. The first two are static, which needs libc.a.
build:
	$(CARGO) rustc --release --locked --features lean --bin oci-nvidia-hook -- -C target-feature=+crt-static
	$(CARGO) rustc --release --locked --package oci-nvidia-mps --bin oci-nvidia-mps -- -C target-feature=+crt-static
	$(CARGO) build --release --locked --package oci-nvidia-nvml
	packaging/check-programs $${CARGO_TARGET_DIR:-target}/release/oci-nvidia-hook $${CARGO_TARGET_DIR:-target}/release/oci-nvidia-mps

## Starts a container with a GPU, with the driver of this host or else a fake one. As root.
demo:
	@tests/keep-owner tests/demo

# Everything is compiled once, by clippy: tests/rustc. Without the files for incremental builds and without debug information, our crates
# compile in two thirds of the time. `cargo test` has both.
run-tests run-other-tests engines: export CARGO_INCREMENTAL := 0
run-tests run-other-tests engines: export CARGO_PROFILE_DEV_DEBUG := false
TESTED := LINTING_RUSTC=$(CURDIR)/tests/rustc $(CARGO) test --config 'build.rustc-workspace-wrapper="$(CURDIR)/tests/rustc"' \
	--locked --workspace --no-fail-fast

# The tests of the device plugin wait most of the time, so they run beside those of the hook, tests/it. Their output comes last.
define SIDE_BY_SIDE
log=$$(mktemp); result=0; \
{ $(TESTED) --lib --bins --test '[!i]*' && $(TESTED) --doc; } >$$log 2>&1 & others=$$!; \
$(TESTED) --test it || result=$$?; \
wait $$others || result=$$?; \
cat $$log; rm $$log; exit $$result
endef

## Checks formatting, runs clippy, and runs the tests that judge a change. Tests that cannot run on this machine
## are reported as ignored; with CI=true they fail.
test:
	@tests/install-tools test
	@tests/keep-owner $(MAKE) --no-print-directory run-tests

run-tests:
	$(CARGO) fmt --all --check
	$(CARGO) fmt --check --manifest-path tests/fuzz/Cargo.toml
	$(TESTED) --no-run
	@$(SIDE_BY_SIDE)
	@echo 'make test: all passed. Not run, and run by "make test-all": packages and repositories, release builds and what they may cost,'
	@echo '  the other simulated kernels, the tables of host and node states, the driver packages of Debian, a thousand containers, the checks of "make gpu", the rules of'
	@echo '  Prometheus, the features of the packages and rustdoc, tests as a plain user.'
	@echo '  Other targets: "make engines" (other releases), "make vm" (udev, SELinux), "make gpu" (a real GPU), "make release-checks".'

## Runs test, and then everything that test leaves out, for releases and CI. Containers under the systemd of
## Debian testing (tests/engines/booted) need network access, and are left out without it.
test-all: test
	@tests/install-tools
	@tests/keep-owner $(MAKE) --no-print-directory run-other-tests

# With --ignored, a test program runs only the tests that run-tests left out: tests/it/harness.rs.
run-other-tests: lint-variants
	$(TESTED) --test '*' -- --ignored
	@tests/as-plain-user
	@tests/keep-owner tests/engines/booted || { [ $$? = 77 ] && echo 'booted: not run, because there is no mirror of Debian' >&2; }

## Runs the tests with the engines of other releases of Debian and Ubuntu, in root file systems that it creates: docs/engines.md.
## First, containers are started under the systemd of each release (tests/engines/booted).
## Then runs fresh. As root, with network access; it downloads 1.5 GB, and this part takes half an hour. SUITES=trixie selects one release.
engines:
	@tests/keep-owner tests/engines/booted --all $(SUITES)
	@tests/keep-owner tests/engines/run $(SUITES)
	IMAGES=bullseye,bookworm,trixie,focal,jammy,noble,resolute $(TESTED) --test it -- real_images:: --nocapture
	CONTAINERDS=bookworm,trixie,sid $(TESTED) --test it -- containerd::
	@$(MAKE) --no-print-directory fresh

## Runs `make demo` and `make test` on bare systems: Debian 12, 13 and testing, and Ubuntu 24.04. Before each release, as root, with
## network access; each takes as long as these two commands. SUITES=noble selects one release. Then builds the Debian packages, boots these
## systems, and runs each command of README.md, docs/install.md, docs/migration.md and docs/recipes.md there (tests/engines/pages).
fresh:
	@tests/keep-owner tests/engines/fresh $(SUITES)
	@$(MAKE) --no-print-directory deb
	@tests/keep-owner tests/engines/pages $(SUITES)

## Checks the hook and the device plugin on this machine, which has a GPU and its driver. Writes a report to target/gpu-report, and changes
## nothing else. As root; takes at most eight minutes after the build. OPTIONS=--help lists the options.
gpu:
	@tests/keep-owner tests/gpu/build
	@tests/keep-owner target/gpu-kit/oci-nvidia-hook-gpu-kit/run --report target/gpu-report $(OPTIONS)

## Packs these checks with all programs into target/gpu-kit, for a machine without a compiler or a network: unpack it there, and start ./run
## as root.
gpu-kit:
	@tests/keep-owner tests/gpu/build --archive

# A newer compiler has new lints: only in CI is a warning an error.
WARNINGS := $(if $(CI),-D warnings)

## Checks formatting, runs clippy, and checks the links in the documentation of the code. With CI=true, a warning is an error.
lint: lint-variants
	$(CARGO) fmt --all --check
	$(CARGO) fmt --check --manifest-path tests/fuzz/Cargo.toml
	$(CARGO) clippy --locked --workspace --all-targets -- $(WARNINGS)

# What run-tests does not compile. The examples and the benchmarks need the crates of the tests: with their features, crates are checked
# once for clippy and rustdoc.
lint-variants:
	$(CARGO) clippy --locked --workspace --lib --bins --examples --benches --features oci-nvidia-hook/lean -- $(WARNINGS)
	RUSTDOCFLAGS="$(WARNINGS) -A rustdoc::private-intra-doc-links" $(CARGO) doc --locked --workspace --quiet --no-deps --document-private-items \
		--lib --examples --bin oci-nvidia-nvml --bin oci-nvidia-kubelet-plugin --bin oci-nvidia-mps

## Searches for inputs that crash a parser, SECONDS for each of TARGETS (default: all). Works with a stable compiler, because the
## script sets RUSTC_BOOTSTRAP.
SECONDS ?= 60
fuzz:
	@tests/fuzz/run $(SECONDS) $(TARGETS)

# The hook is static, as in the packages.
BENCH := $(CARGO) bench --config 'build.rustc-workspace-wrapper="$(CURDIR)/tests/rustc"' --locked --profile dist --features lean

## Measures container starts. The results are compared with docs/performance.md. As root, on a quiet machine. OPTIONS="--compare PROGRAM"
## compares this build with another build of the hook.
bench:
	@tests/install-tools bench
	$(CARGO) build --locked --profile dist --package oci-nvidia-nvml
	$(BENCH) --bench cost -- $(OPTIONS)
	$(CARGO) bench --locked --profile dist --package oci-nvidia-kubelet-plugin --bench footprint

## Runs the tests in a virtual machine. It boots Debian with these packages, the fake driver and its kernel modules four times, the last
## time with SELinux enforcing. As root, on Debian; downloads 300 MB the first time. Takes a quarter of an hour without KVM.
vm:
	@tests/install-tools vm
	@tests/vm/run

## Creates the tarballs of the sources and of all crates in target/dist.
dist:
	@packaging/dist

## Builds the RPM packages in target/rpm/RPMS from these tarballs. Installs rpmbuild if it is missing (as root).
rpm:
	@tests/install-tools rpm
	@tests/keep-owner packaging/build-rpm

## Builds the Debian packages in target/deb from the same tarballs, on Debian or Ubuntu. Installs debhelper if it is missing (as root).
deb:
	@tests/install-tools deb
	@tests/keep-owner packaging/build-deb

## Creates signed repositories for zypper, dnf and apt in target/repository, from the packages of rpm and deb. KEY is the key of gpg
## that signs, URL the address at which the directory will be published.
repository:
	@tests/install-tools repository
	@tests/keep-owner packaging/repository "$(KEY)" "$(URL)"

## Creates everything that a release consists of in target/publish, signed with KEY, a key of gpg: docs/releasing.md. On Debian or
## Ubuntu; takes half an hour.
release:
	@tests/install-tools rpm
	@tests/install-tools deb
	@tests/install-tools repository
	@tests/keep-owner packaging/release "$(KEY)"

## Runs reproducible, deny and aarch64, as CI does.
release-checks: reproducible deny aarch64

## Checks that two builds are identical. Prints the hash and the oldest supported glibc.
reproducible:
	@packaging/reproducible

## Checks licenses and sources of all crates with deny.toml. Installs cargo-deny if it is missing.
deny:
	@packaging/deny

## Checks all crates for known vulnerabilities. This needs access to the RustSec database: CI runs it if the database can be reached.
advisories:
	@packaging/deny advisories

## Checks that the programs compile for aarch64.
aarch64:
	@packaging/check-aarch64

## Prints the bill of materials of PACKAGE (oci-nvidia-hook) as CycloneDX JSON.
sbom:
	@packaging/sbom $(PACKAGE)

## Removes target.
clean:
	$(CARGO) clean
