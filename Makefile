# The two commands for everybody: `make quickstart` and `make test`. Both make .venv first, once.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help env quickstart test lint format test-long gpu-check clean

# The first Python on the path that is new enough; `make PYTHON=/path/to/python` takes another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --constraint constraints.txt
STAMP := .venv/.complete

# Two test workers with one thread each suit two cores; `make test WORKERS=8` on a larger machine, WORKERS=0 for none.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## make .venv with the pinned dependencies (the other commands do it by themselves)

# The stamp is written last, so an interrupted run is completed by the next one.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found: install it, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "[1/3] virtual environment .venv"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv \
		|| { echo "error: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "[2/3] torch, the largest download"
	@$(PIP) torch
	@echo "[3/3] the project and its other dependencies"
	@$(PIP) --editable '.[dev]'
	@touch $(STAMP)
	@echo "environment ready: .venv"

quickstart: env ## train, measure and report on a real model, on this machine
	@$(BIN)/python -m infer.quickstart

test: env lint ## lint, types and the tests that need no GPU
	@echo "== tests"
	@$(PYTEST) -m "not long and not gpu and not multi_gpu" -q -n $(WORKERS) --dist loadfile --durations 5

lint: env ## ruff and pyright only
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "error: these files are not formatted; run make format" >&2; $(BIN)/ruff format --check . ; exit 1; }
	@echo "== pyright"
	@$(BIN)/pyright

format: env ## sort imports and format every file, as lint wants them
	@$(BIN)/ruff check --select I --fix --quiet .
	@$(BIN)/ruff format .

test-long: env ## soaks and tests on the real model, one at a time
	@echo "== long tests"
	@$(PYTEST) -m "long and not gpu and not multi_gpu" -v --timeout 1500 --durations 10

gpu-check: env ## the tests that need CUDA devices, and what this machine has of them
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__, "sees", torch.cuda.device_count(), "CUDA device(s)")'
	@$(BIN)/python -m pytest -m "gpu or multi_gpu" -v

clean: ## remove .venv, caches and build leftovers; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
