# Every target installs what it needs into .venv first; nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= xla,dev
# Which build of torch goes with torch_xla: cpu is the one without CUDA's 4 GB, where pip's index has it. TORCH=any takes
# what the index gives.
TORCH ?= cpu
CPU_TORCH := torch==2.9.0+cpu
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# Work is stolen in runs of neighbouring tests, so that what a module or the session shares is seldom made twice.
PYTEST := $(BIN)/python -m pytest --numprocesses $(or $(JOBS),4) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install install-docs demo test test-fast coverage docs lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## install everything into .venv

demo: $(STAMP) ## warm up, verify, read and train on real data, and report how idle the device was
	$(BIN)/python -m scripts.demo

test: $(STAMP) ## run the tests, four at once (JOBS=8: eight; TESTS=tests/store: those)
	$(PYTEST) $(TESTS)

test-fast: $(STAMP) ## run the tests that take a moment: all but those of whole runs, of kills and of XLA
	$(PYTEST) -m 'not slow and not xla' $(TESTS)

coverage: $(STAMP) ## run the tests, measured, and print how many of the package's lines they reach (JOBS, TESTS as above)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS),coverage]'
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
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tpucache needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@if [ '$(TORCH)$(findstring xla,$(EXTRAS))' = cpuxla ]; then \
	  if $(BIN)/python -m pip install --quiet '$(CPU_TORCH)' 2>/dev/null; \
	  then echo "$(CPU_TORCH) is installed; for CUDA's: make clean install TORCH=any"; \
	  else echo "pip's index has no $(CPU_TORCH): torch comes with CUDA, where the index has that one"; fi; fi
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
