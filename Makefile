# Everything a developer needs. `make demo` and `make test` install what is missing (as root).

CARGO ?= cargo

.PHONY: all build demo test lint clean

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

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings

clean:
	$(CARGO) clean
