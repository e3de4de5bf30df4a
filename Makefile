# Everything here runs on a machine that has only python3 (>= 3.11), make and git: each target first makes .venv, once.

PYTHON ?=
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q
TEST_GROUPS := lint-and-unit distributed integration
BENCHMARKS := command_start step_overhead save_cost restart goodput_stopwatch data_tokenize data_memory python_stdlib

# Tests and the demo never reach for the network, and leave the cores to the ranks.
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
export PYTHON
# What tests start would compile the package again each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test quick lint format lint-and-unit unit unit-alone unit-quick security distributed integration cluster fuzz gpu bench soak messages clean

help:
	@echo "make setup        .venv with everything installed; every other target begins with it"
	@echo "make demo         train a small model on two ranks, kill one, resume, measure, export, report"
	@echo "make test         lint, then every group of tests: unit, distributed, integration; half an hour on two fast cores, an hour on slow ones"
	@echo "make unit         one group of them; so are make lint, make security, make distributed and make integration (as root)"
	@echo "make quick        lint and the quick unit tests: under three minutes, without root"
	@echo "make lint         ruff format --check, ruff check, mypy --strict, hadolint, shellcheck"
	@echo "make format       ruff format and ruff check --fix"
	@echo "make bench        the benchmarks under benchmarks/"
	@echo "make cluster      a Kubernetes cluster of two nodes on this machine, as root, until Ctrl-C"
	@echo "make soak         100 faults on two ranks, each run compared to the bit with an undisturbed one;"
	@echo "                  then faults of nodes, each to be found by drillyard accept (as root)"
	@echo "make fuzz         untrusted configs, logs, manifests, run directories and messages: 2,000 new ones each (EXAMPLES=)"
	@echo "make gpu          what only a GPU can show, for 9 minutes (MINUTES=); installs nothing; results in runs/gpu (OUT=)"
	@echo "make messages     tests/unit/messages.txt: every error, warning and help text, so that a diff shows their changes"
	@echo "make clean        remove caches and build output; keeps .venv and runs/"

setup:
	@sh .ci/setup

demo: setup
	@$(BIN)/python demo/run.py

# Each group is a make of its own, so that its time is printed and the first failing one stops the rest.
test: setup
	@for group in $(TEST_GROUPS); do \
	    started=$$(date +%s); \
	    echo "== $$group"; \
	    $(MAKE) --no-print-directory $$group || { echo "== $$group FAILED after $$(($$(date +%s) - started)) s"; exit 1; }; \
	    echo "== $$group: $$(($$(date +%s) - started)) s"; \
	done

quick: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit-quick

# Linting needs one core, so it runs next to the tests.
lint-and-unit: setup
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target lint security unit-alone

unit-quick:
	@$(PYTEST) tests/unit -m "not slow" -n 2

# Scripts of a chart and of Slurm are parts of longer ones, which set their variables (SC2034, SC2154). SC1007: `a= b=`.
SHELLCHECK := $(BIN)/shellcheck --severity=warning --exclude=SC1007,SC2034,SC2154
lint: setup
	@$(BIN)/ruff format --check --quiet . || { echo "ruff format: run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/hadolint docker/Dockerfile $(wildcard recipes/*/Dockerfile)
	@$(SHELLCHECK) .ci/run .ci/setup $(wildcard .ci/tools/*)
	@$(SHELLCHECK) --shell=sh $(wildcard charts/*/files/*.sh)
	@$(SHELLCHECK) --shell=bash $(wildcard src/drillyard/launch/slurm/*.sh recipes/*/*.sh)

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

unit: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target security unit-alone

# One process: two would each train the runs that these tests damage.
security: setup
	@$(PYTEST) tests/security

# A quarter of the time is waits, hence three at a time on two cores.
unit-alone: setup
	@$(PYTEST) tests/unit -n 3

# Two files at a time: while the ranks of one start, those of the other compute.
distributed: setup
	@$(PYTEST) tests/distributed -n 2 --dist loadfile --no-loadscope-reorder --durations=5

# Schedulers, hosts and clusters are waited for a third of the time, hence four files at a time on two cores. The longest
# come first (LONGEST_FIRST in tests/conftest.py), so that all workers end at about the same time.
integration: setup
	@sh .ci/tools/packages
	@sh .ci/tools/gcsfuse
	@sh .ci/tools/image
	@sh .ci/tools/kubernetes
	@sh .ci/tools/terraform
	@sh .ci/tools/transformers
	@$(PYTEST) tests/integration -n 4 --dist loadfile --no-loadscope-reorder --durations=10

# That of tests/integration/kubernetes: it prints how to reach it.
cluster: setup
	@sh .ci/tools/packages
	@sh .ci/tools/kubernetes
	@PYTHONPATH=. $(BIN)/python tests/integration/kubernetes/cluster.py runs/cluster

# The fuzzing tests of the unit group, with new inputs each time; what they find is printed as a failing test.
fuzz: setup
	@FUZZ_EXAMPLES=$(or $(EXAMPLES),2000) $(PYTEST) tests/security/test_fuzz.py --timeout=0 --durations=0

# On the machine's own python3, into which PyTorch is installed: nothing is set up. Call again to go on.
gpu:
	@$(or $(PYTHON),python3) benchmarks/gpu/run_all.py --minutes $(or $(MINUTES),9) --out $(or $(OUT),runs/gpu)

bench: setup
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

soak: setup
	@$(BIN)/python benchmarks/soak.py
	@$(BIN)/python benchmarks/acceptance_faults.py

messages: setup
	@$(BIN)/python tools/messages.py

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests tools benchmarks demo recipes -name __pycache__ -type d -prune -exec rm -rf {} +
