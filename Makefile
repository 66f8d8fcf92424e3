# Targets for developers. `make demo` and `make test` install missing tools (as root).

# Runs a cargo that is new enough.
CARGO ?= $(CURDIR)/tests/cargo
export CARGO

.PHONY: all help build demo test engines vm lint fuzz bench dist rpm deb release-checks reproducible deny advisories aarch64 sbom clean

all: build

## Lists these targets.
help:
	@awk '/^## / { text = text (text == "" ? "" : " ") substr($$0, 4); next } \
		/^[a-z][a-z0-9-]*:/ && text != "" { sub(/:.*/, "", $$1); sub(/[.:] .*/, "", text); sub(/[.]$$/, "", text); \
		printf "make %-15s %s\n", $$1, text } !/^SECONDS/ { text = "" }' Makefile

## Builds target/release/oci-nvidia-hook, and the static program of the package -compat, which needs libc.a.
build:
	$(CARGO) build --release --locked --features lean
	$(CARGO) rustc --release --locked --package oci-nvidia-hook-compat -- -C target-feature=+crt-static

## Starts a container with a GPU, with the driver of this host or else a fake one. As root.
demo:
	@tests/demo

## Runs all tests. Tests that cannot run on this machine are reported as ignored; with CI=true they fail.
test:
	@tests/install-tools
	@$(MAKE) --no-print-directory lint
	$(CARGO) test --locked --workspace
	@tests/as-plain-user

## Runs the tests with the engines of other Debian releases, in root file systems that it creates: docs/compatibility.md. As root, with
## network access. Not part of test: it downloads 1.5 GB and takes half an hour. SUITES=trixie selects one release.
engines:
	@tests/engines/run $(SUITES)

# The examples need the crates of the tests: with their features, crates are checked once for clippy, the feature lean and rustdoc.
## Checks formatting, runs clippy, and checks the links in the documentation of the code.
lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --workspace --lib --bins --examples --features oci-nvidia-hook/lean -- -D warnings
	$(CARGO) clippy --locked --package oci-nvidia-hook-compat -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" $(CARGO) doc --locked --workspace --quiet --no-deps --document-private-items \
		--lib --examples --bin oci-nvidia-hook-compat --bin oci-nvidia-kubelet-plugin
	$(CARGO) fmt --check --manifest-path tests/fuzz/Cargo.toml

## Searches for inputs that crash a parser, SECONDS for each of TARGETS (default: all). Works with a stable compiler, because the
## script sets RUSTC_BOOTSTRAP.
SECONDS ?= 60
fuzz:
	@tests/fuzz/run $(SECONDS) $(TARGETS)

## Measures container starts. The results are compared with docs/performance.md. As root, on a quiet machine.
bench:
	@tests/install-tools bench
	$(CARGO) bench --locked --profile dist --features lean --bench pure --bench cost
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
	@packaging/build-rpm

## Builds the Debian packages in target/deb from the same tarballs, on Debian or Ubuntu. Installs debhelper if it is missing (as root).
deb:
	@tests/install-tools deb
	@packaging/build-deb

## Runs reproducible, deny and aarch64, as CI does.
release-checks: reproducible deny aarch64

## Checks that two builds are identical. Prints the hash and the oldest supported glibc.
reproducible:
	@packaging/reproducible

## Checks licenses and sources of all crates with deny.toml. Installs cargo-deny if it is missing.
deny:
	@packaging/deny

## Checks all crates for known vulnerabilities. This needs access to the RustSec database, so it is not part of CI.
advisories:
	@packaging/deny advisories

## Checks that the programs compile for aarch64.
aarch64:
	@packaging/check-aarch64

## Prints the bill of materials as CycloneDX JSON.
sbom:
	@packaging/sbom

## Removes target.
clean:
	$(CARGO) clean
