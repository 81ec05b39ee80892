# make demo | test | test-long | fuzz | test-matrix | test-models | test-vllm | campaign | lint | check | docs | bench | gpu: each builds what it needs; only Python 3.11+, git and make must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
# Compiled modules are kept: the tests start many processes, each of which would compile all of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long fuzz test-matrix test-models test-vllm campaign lint check docs bench gpu clean

demo: $(VENV)/.run
	$(BIN)/python examples/demo.py demo

# Two files of tests at a time: many tests wait for processes. One thread each, or they would wait for each other. In the
# order of their names: by their number of tests, the files that take longest would come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

NO_LATER_TARGET := not matrix and not campaign and not vllm and not models

test: $(VENV)/.dev
	$(PYTEST) -m "not long and $(NO_LATER_TARGET)"

test-long: $(VENV)/.dev
	$(PYTEST) -m "long and $(NO_LATER_TARGET)"

# Random examples for ten minutes; a failure prints the seed, which SUREFOOT_FUZZ_SEED repeats.
fuzz: $(VENV)/.dev
	SUREFOOT_FUZZ_S=$${SUREFOOT_FUZZ_S:-600} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m fuzz tests/fuzz

test-matrix: $(VENV)/.dev
	$(PYTEST) -m matrix

# A tiny model of every architecture of transformers, and the page that lists them. `test` runs one per kind of layer.
test-models: $(VENV)/.dev
	rm -rf build/models && mkdir -p build/models
	SUREFOOT_MODEL_RESULTS=$(CURDIR)/build/models $(PYTEST) --dist load tests/models/test_architectures.py
	$(BIN)/python docs/list_models.py build/models
	$(PYTEST) -m models tests/models/test_adapter_architectures.py tests/distributed/test_architecture_ranks.py tests/planner/test_architecture_plans.py tests/benchmarks

# With a real vLLM server, which has a virtual environment of its own: it wants another transformers.
test-vllm: $(VENV)/.dev .venv-vllm/.done
	SUREFOOT_VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(BIN)/python -m pytest -m vllm

.venv-vllm/.done: tests/grpo/install-vllm
	PYTHON=$(PYTHON) tests/grpo/install-vllm .venv-vllm
	touch $@

campaign: $(VENV)/.dev
	$(BIN)/python -m pytest -m campaign tests/monitor

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(PYTEST) -m "not slow and not long and $(NO_LATER_TARGET)"

# The pages of docs/ as a site with search, in build/site. Generated pages first; a warning is an error.
docs: $(VENV)/.docs
	$(BIN)/python docs/list_modules.py
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/data_vs_trl.py
	$(BIN)/python benchmarks/sft_vs_trl.py
	$(BIN)/python benchmarks/pairs_vs_trl.py --method dpo
	$(BIN)/python benchmarks/pairs_vs_trl.py --method reward
	$(BIN)/python benchmarks/distill_vs_trl.py
	$(BIN)/python benchmarks/architectures_vs_trl.py
	$(BIN)/python benchmarks/grpo_vs_trl.py

# On a machine with a GPU: correctness, runs and speed in one table, in less than ten minutes.
gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu

$(VENV)/.run: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[report,stacks]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

$(VENV)/.bench: $(VENV)/.run
	$(BIN)/python -m pip install -q -e ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .ruff_cache .pytest_cache
