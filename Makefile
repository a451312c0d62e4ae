# `make` alone prints the targets. Tools come from $(VENV) where it exists, else from the active environment.
VENV ?= .venv
BIN := $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/)
PYTHON := $(BIN)python3
# a worker a core, up to eight; a file's tests stay together, since they share what is slow to make
WORKERS := -n auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help fix check lint test test-all gpu bench

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

fix:  ## Format, and mend what ruff can mend
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check: lint test  ## Format, lint, types, tests

lint:  ## Format, lint, types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:  ## Run the tests, in minutes; those that need a GPU are skipped where there is none
	$(PYTHON) -m pytest $(WORKERS)

test-all:  ## Run all tests: every combination of parameters, every kernel compiled for every architecture
	$(PYTHON) -m pytest $(WORKERS) -m ""

gpu:  ## On a CUDA machine: kernel tests, kernel benchmark and a generation; JSON in benchmarks/results
	PYTHON=$(PYTHON) benchmarks/gpu.sh

bench:  ## Time decoding at a long context, beside transformers
	$(PYTHON) -m sfi_cli bench --random-weights qwen3-0.6b --context 4K,16K --time-limit 20
