# Everything a developer needs. `make demo` and `make test` install what is missing (as root).

CARGO ?= cargo

.PHONY: all build demo test engines vm lint fuzz bench dist rpm release-checks reproducible deny aarch64 sbom clean

all: build

build:
	$(CARGO) build --release --locked

## A container with a GPU, from nothing: the real driver if this host has one, else the fake one.
demo:
	@tests/demo

## All tests. What cannot run here is listed as ignored; with CI=true it is an error.
test: lint
	@tests/install-tools
	$(CARGO) test --locked
	@tests/as-plain-user

## The tests with engines of other Debian releases, in root file systems that it makes: docs/compatibility.md. As root, with
## a network. Not part of test: it downloads 1.5 GB and takes half an hour. SUITES=trixie for one of them.
engines:
	@tests/engines/run $(SUITES)

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CARGO) fmt --check --manifest-path tests/fuzz/Cargo.toml

## Looks for inputs that break a parser, SECONDS for each of TARGETS (all). The script sets RUSTC_BOOTSTRAP, because the
## compiler's sanitizer and coverage are unstable features, and with it a stable compiler has them: no nightly is needed.
SECONDS ?= 60
fuzz:
	@tests/fuzz/run $(SECONDS) $(TARGETS)

## What a container start costs, beside what was aimed at: docs/performance.md. As root, on a quiet machine.
bench:
	@tests/install-tools
	$(CARGO) bench --locked --profile dist --bench pure --bench cost

## A whole machine: boots Debian with these packages, the fake driver and its kernel modules in /, four times, the last one
## with SELinux enforcing. As root, on Debian; the first time it downloads 300 MB. It takes a quarter of an hour without KVM.
vm:
	@tests/install-tools vm
	@CARGO=$(CARGO) tests/vm/run

## Tarballs of the sources and of all crates: target/dist.
dist:
	@CARGO=$(CARGO) packaging/dist

## All packages, built from these tarballs: target/rpm/RPMS. Installs rpmbuild if it is missing (as root).
rpm:
	@tests/install-tools rpm
	@CARGO=$(CARGO) packaging/build-rpm

## What a release must be: see each. CI runs it.
release-checks: reproducible deny aarch64

## The same program from the same tree, wherever it is built. Prints its hash and the oldest glibc it runs with.
reproducible:
	@CARGO=$(CARGO) packaging/reproducible

## Licences, sources and known holes of all crates (deny.toml). Installs cargo-deny if it is missing.
deny:
	@packaging/deny

## Compiles for aarch64.
aarch64:
	@packaging/check-aarch64

## What is in the program, as CycloneDX JSON.
sbom:
	@CARGO=$(CARGO) packaging/sbom

clean:
	$(CARGO) clean
