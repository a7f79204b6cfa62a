# make demo    the environment, then the demo: about ten minutes on two cores
# make test    the environment, then the tests
# make check   lint, types and import floors
# make help    the rest
# On Linux the CPU build of torch may need an index of its own (PyTorch's install page names it):
#   make test TORCH_INDEX=https://...

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
OUT ?= demo
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check lint types floors bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo  ## train and compare two small translators on real text; report in demo/report.html
	$(BIN)/relpos reproduce demo --out $(OUT)

test: $(VENV)/.dev  ## every test that takes seconds
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.dev  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

check: lint types floors  ## lint, types and floors

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

floors: $(VENV)/.dev  ## import-linter
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## attention beside torch's, and training speed beside transformers' MarianMTModel
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/training.py

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch"
	@$(PIP) $(TORCH_INDEX:%=--index-url %) torch setuptools || { \
	  echo "No CPU build of the pinned torch was found. On Linux name an index that has it:" \
	       "make TORCH_INDEX=https://... (PyTorch's install page, 'CPU', shows the address)." >&2; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing relpos and what the demo needs"
	@$(PIP) --no-build-isolation -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing relpos and what development needs"
	@$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@ $(VENV)/.demo

clean:  ## remove the environment, caches and the demo's runs
	rm -rf $(VENV) demo build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
