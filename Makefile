# Every target installs what it needs into .venv first; nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= xla,dev
# The build of torch: auto takes the one for CPUs, or the one with CUDA where an NVIDIA GPU works; any is what the index has.
TORCH ?= auto
INSTALL = $(PYTHON) -m scripts.install --torch $(TORCH) $(VENV)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
CORE_STAMP := $(VENV)/.installed-core
DOCS_STAMP := $(VENV)/.installed-docs
# Work is stolen in runs of neighbouring tests, so that what a module or the session shares is seldom made twice.
PYTEST := $(BIN)/python -m pytest --numprocesses $(or $(JOBS),4) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install install-core install-docs demo test test-all test-fast test-core coverage docs lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "How to change something, and how to test it: .github/CONTRIBUTING.md"

install: $(STAMP) ## install everything into .venv (TORCH=cpu, cuda or any: another build of torch)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) ## warm up, verify, read and train on real data, and report how idle the device was
	$(BIN)/python -m scripts.demo

test: $(STAMP) ## run the tests, four at once (JOBS=8: eight; TESTS=tests/store: those)
	$(PYTEST) -m 'not thorough' $(TESTS)

test-all: $(STAMP) ## run the thorough tests, too: every case, every moment of a kill, every page
	$(PYTEST) $(TESTS)

test-fast: $(STAMP) ## run the tests that take a moment: all but those of whole runs, of kills and of XLA
	$(PYTEST) -m 'not slow and not xla and not thorough' $(TESTS)

# Their results may change with numpy, torch and Python; those of processes, kills and whole runs do not.
install-core: $(if $(wildcard $(STAMP)),$(STAMP),$(CORE_STAMP))

test-core: install-core ## run the fast tests of building, reading and training on another Python (PYTHON=python3.13 VENV=.venv-3.13)
	$(PYTEST) -m 'not slow and not xla and not thorough' tests/store tests/loading tests/ondevice tests/warmup/records tests/training

coverage: $(STAMP) ## run the tests and print how many of the package's lines they reach (JOBS, TESTS as above)
	$(INSTALL) $(EXTRAS),coverage
	$(PYTEST) $(TESTS) --cov

install-docs: $(DOCS_STAMP)

docs: $(DOCS_STAMP) ## the documentation as a site in build/docs, with a page for each public name; fails on a warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --config-file .mkdocs.yml

lint: $(STAMP) ## linters, formatting, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what the other targets made
	rm -rf $(VENV) .venv-* .cache build dist demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml
	$(INSTALL) $(EXTRAS)
	@touch $@

$(DEMO_STAMP): pyproject.toml
	$(INSTALL) demo
	@touch $@

$(CORE_STAMP): pyproject.toml
	$(INSTALL) train,fast,zstd,lz4,remote,tensorboard,safetensors,test
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) docs
	@touch $@
