# Everything a person does with this checkout. `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin
export VENV

# Nothing here needs the network once the environment is there.
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
# Setup compiles no bytecode, so the first import of each module must keep it: vLLM and torch take 12 s longer without.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test check unit integration adversarial conformance nightly compare docs fmt lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create or renew .venv (a second run takes a second)
	@scripts/setup.sh

demo: setup ## start everything, run several agent programs at once, show what happened, shut down
	@$(BIN)/python -m deployments.demo

serve: setup ## start everything and stay up; Ctrl-C stops it
	@$(BIN)/continuum serve

test: setup check ## check, then every test
	$(PYTEST)

check: setup ## style, types, import borders
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -q tests/architecture

unit: setup ## the tests that need no Ray, vLLM or Redis: seconds
	$(PYTEST) -q tests/unit

integration: setup ## the tests with real parts
	$(PYTEST) tests/contract tests/integration

adversarial: setup ## the tests that attack it
	$(PYTEST) tests/adversarial

conformance: setup ## vLLM's own scheduler tests on every preset (fetches vLLM's sources; a quarter of an hour)
	$(BIN)/python scripts/conformance.py --out build/conformance.json

SEEDS ?= 10000
nightly: setup ## random programs on the real scheduler, SEEDS of them (half an hour)
	PYTHONPATH=tests $(BIN)/python -m support.random_runs --seeds $(SEEDS)

# Every run is stored under all that it depends on: a second `make compare` goes on where the first one stopped.
JOBS ?= 2
compare: setup ## every preset over workloads, loads, GPUs and tiers in virtual time (hours); then docs/benchmarks.md
	$(BIN)/python -m benchmarks.compare --matrix full --jobs $(JOBS) --out benchmarks/results/matrix.json
	$(BIN)/python -m benchmarks.docs_page

docs: setup ## the documents as a site, below build/site; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fmt: setup ## format, and fix what can be fixed mechanically
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lock: ## resolve requirements/cpu.in into requirements/cpu.lock
	@scripts/lock.sh

clean: ## remove the environment and every cache of this checkout
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
