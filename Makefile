# Every target sets up what it needs: .venv from uv.lock, native libraries by CMake. Needs python3 >= 3.11, gcc, make.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
NATIVE := build/native
STRESS_SECONDS := 60
STRESS_PROCESSES := 64
ASAN := build/native-asan
TSAN := build/native-tsan
RELEASE := build/release
COVERAGE := build/native-coverage
CASES ?= tests/conformance/cases
JOBS ?= 2
PYTEST_ARGS ?=
RUNS ?= 100
SEED ?= 1
FAULTS_ARGS ?=
ifneq ($(words $(CURDIR)),1)
$(error The path of this checkout, "$(CURDIR)", has a space in it: make takes it for several files. Move it)
endif

NATIVE_SOURCES := $(shell find native -type f)
C_FILES := $(shell find native tests bench -name "*.[ch]" 2>/dev/null)

# Test programs find their copy of the libraries through this variable.
export HAMI_NATIVE_BUILD := $(CURDIR)/$(NATIVE)

.PHONY: help setup native sanitized release demo test stress faults coverage cluster cluster-down e2e lint format bench bench-burst conformance clean chart-test

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.synced ## Create .venv from uv.lock

.venv/.synced: pyproject.toml uv.lock tools/setup.py
	@$(PYTHON) tools/setup.py

native: $(NATIVE)/.built ## Build libvgpu.so and the simulated driver into build/native

sanitized: $(ASAN)/.built $(TSAN)/.built

$(NATIVE)/.built: SANITIZERS :=
$(ASAN)/.built: SANITIZERS := address,undefined
$(TSAN)/.built: SANITIZERS := thread
$(COVERAGE)/.built: NATIVE_OPTIONS := -DHAMI_COVERAGE=ON
$(NATIVE)/.built $(ASAN)/.built $(TSAN)/.built $(COVERAGE)/.built: .venv/.synced $(NATIVE_SOURCES)
	@$(BIN)/cmake -S native -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DHAMI_SANITIZE=$(SANITIZERS) $(NATIVE_OPTIONS) --log-level=WARNING >/dev/null
	@echo "building $(@D)"; $(BIN)/cmake --build $(@D) --parallel $(JOBS) -- --quiet
	@touch $@

release: $(RELEASE)/.built ## Build libvgpu.so and vgpu-region for x86-64 and aarch64 and glibc 2.17, the same bytes everywhere

$(RELEASE)/.built: .venv/.synced tools/release.py uv.lock $(NATIVE_SOURCES)
	@$(BIN)/python tools/release.py --output $(@D)
	@touch $@

demo: native ## Two pods share a simulated GPU; a program over its limit is refused (no root, no GPU, no Kubernetes)
	@$(BIN)/hami demo $(DEMO_ARGS)

test: native sanitized release ## All tests that need no cluster of their own
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

stress: native ## Memory accounts under load: 64 processes, 4 threads each, 60 s (STRESS_SECONDS, STRESS_PROCESSES)
	HAMI_STRESS_SECONDS=$(STRESS_SECONDS) HAMI_STRESS_PROCESSES=$(STRESS_PROCESSES) \
		$(BIN)/python -m pytest -q tests/native/test_vgpu_stress.py

faults: native ## Kill components at random moments: make faults RUNS=100 SEED=1 (FAULTS_ARGS=--storm: API faults)
	@$(BIN)/python tests/integration/faults/campaign.py --runs $(RUNS) --seed $(SEED) $(FAULTS_ARGS)

# Not counted: what needs sanitizers, and two tests that look into a library without counters.
coverage: native $(COVERAGE)/.built ## Branch coverage of the Python code and line coverage of native/vgpu
	$(BIN)/python -m pytest -q -n $(JOBS) tests/unit tests/conformance tests/fuzz tests/integration --cov=hami --cov-branch --cov-report=term
	@find $(COVERAGE) -name "*.gcda" -delete
	HAMI_NATIVE_BUILD=$(CURDIR)/$(COVERAGE) $(BIN)/python -m pytest -q tests/native \
		-k "vgpu and not sanitized and not asan and not tsan and not survived" \
		--deselect tests/native/test_vgpu_artifact.py::test_nothing_runs_when_the_library_is_loaded \
		--deselect tests/native/test_vgpu_artifact.py::test_the_library_never_ends_or_changes_its_process
	$(BIN)/python tools/native_coverage.py $(COVERAGE) --minimum 85

cluster: native ## Start a real single-node Kubernetes with our images (root, Go; the first time builds it, 15 minutes)
	@tools/cluster/hami-cluster up

cluster-down: ## Stop it and remove all it left
	@tools/cluster/hami-cluster down

e2e: native ## End-to-end tests on that cluster, started for them unless it runs (root, Go)
	@tools/cluster/hami-cluster test $(PYTEST_ARGS)

chart-test: .venv/.synced ## Render the Helm chart and check it (builds helm from its Go module once; HAMI_HELM names another)
	@HAMI_HELM=$$(tools/helm.sh) && HAMI_KUBE_BIN=$$(bash -c '. tools/cluster/env.sh; echo $$KUBE_BIN') && \
		export HAMI_HELM HAMI_KUBE_BIN && $(BIN)/python -m pytest $(PYTEST_ARGS) tests/chart

lint: .venv/.synced ## ruff, mypy --strict, import-linter, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@# Test folders are no packages (each may have a conftest.py), so each is checked on its own.
	@for folder in $$(find tests -name '*.py' -printf '%h\n' | sort -u); do \
		echo "mypy $$folder"; $(BIN)/mypy $$folder/*.py || exit 1; done
	$(BIN)/lint-imports
	@if [ -n "$(C_FILES)" ]; then $(BIN)/clang-format --dry-run --Werror $(C_FILES) && echo "clang-format: clean"; fi

format: .venv/.synced ## Rewrite sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

bench: native ## Print every figure of bench/ that needs no cluster, as JSON (BENCH_ARGS=--quick for a short run)
	@for script in $(filter-out bench/burst.py,$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python $$script --json $(BENCH_ARGS) || exit 1; done

bench-burst: native ## Pods at once on the cluster of `make cluster` (root; up to 10 minutes; BURST_ARGS="--part real --runs 1")
	@$(BIN)/python bench/burst.py --json $(BURST_ARGS)

conformance: .venv/.synced ## Run recorded HAMi cases: make conformance CASES=DIR
	@$(BIN)/python tests/conformance/run.py $(CASES)

clean: ## Remove everything that was built here
	rm -rf build dist .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
