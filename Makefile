# make demo    the environment, then the demo: about ten minutes on two cores
# make test    the environment, then the tests
# make check   lint, types and import floors
# make help    the rest
# With a C++ compiler the CPU kernel is built, and must build; RELPOS_BUILD_KERNEL=0 leaves it out.
# On Linux the CPU build of torch may need an index of its own (PyTorch's install page names it):
#   make test TORCH_INDEX=https://...

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
OUT ?= demo
COMPILER := $(firstword $(foreach name,c++ g++ clang++,$(shell command -v $(name))))
export RELPOS_BUILD_KERNEL ?= $(if $(COMPILER),1)
KERNEL := setup.py $(wildcard src/relpos/csrc/*)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-triton test-slow test-peers sanitize check lint types floors bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo  ## train and compare two small translators on real text; report in demo/report.html
	$(BIN)/relpos reproduce demo --out $(OUT)

# a process for each core, up to four; one that has run out of tests takes over some of another
PARALLEL := -n logical --maxprocesses 4 --dist worksteal

# threads that wait spin for a short while only, as in the commands; what is set already stays
ifeq ($(OMP_WAIT_POLICY),)
test test-triton test-slow test-peers sanitize: export GOMP_SPINCOUNT ?= 10000
endif

test: $(VENV)/.dev  ## every test that takes seconds, but for the Triton kernels
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not interpreted"

test-triton: $(VENV)/.dev  ## the Triton kernels, on Triton's interpreter
	$(BIN)/python -m pytest $(PARALLEL) -m "interpreted and not slow"

test-slow: $(VENV)/.dev  ## the tests that take minutes
	$(BIN)/python -m pytest $(PARALLEL) -m slow

# TRANSFORMERS and TORCH: checkouts of the libraries' repositories, for the tests that no package has
TRANSFORMERS ?=
TORCH ?=

test-peers: $(VENV)/.dev  ## transformers' and torch's own tests, on relpos and on their own classes
	$(BIN)/python tests/peers/run.py $(TRANSFORMERS:%=--transformers %) $(TORCH:%=--torch %)

# The kernel built for it, in a folder of its own, under every test of the kernel. Python itself is not built for
# it, so its runtime comes first in the process, and the C++ library whose exceptions it watches; Python's own
# memory looks leaked.
SANITIZED := build/sanitize
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g
KERNEL_TESTS := tests/conformance tests/backends/test_dropout.py $(wildcard tests/backends/test_cpu*.py)

sanitize: $(VENV)/.dev  ## the kernel's tests under AddressSanitizer and UndefinedBehaviorSanitizer (Linux, g++)
	RELPOS_BUILD_KERNEL=1 CXX=g++ CXXFLAGS="$(SANITIZERS)" $(BIN)/python setup.py -q build_ext \
	  --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	for instructions in avx512 avx2 baseline; do \
	  echo "with RELPOS_CPU=$$instructions"; \
	  RELPOS_CPU=$$instructions RELPOS_CPU_KERNEL=$(CURDIR)/$(SANITIZED)/relpos/_cpu_kernel.so \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/python -m pytest -q --capture=sys -m "not slow" -k cpu $(KERNEL_TESTS) || exit 1; \
	done

check: lint types floors  ## lint, types and floors

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

floors: $(VENV)/.dev  ## import-linter
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## attention beside torch's, and training speed beside transformers' MarianMTModel
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/training.py

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch"
	@$(PIP) $(TORCH_INDEX:%=--index-url %) torch setuptools || { \
	  echo "No CPU build of the pinned torch was found. On Linux name an index that has it:" \
	       "make TORCH_INDEX=https://... (PyTorch's install page, 'CPU', shows the address)." >&2; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml $(KERNEL)
	@echo "installing relpos and what the demo needs"
	@$(if $(COMPILER),,echo "no C++ compiler was found: without its kernel attention on the CPU is slower")
	@$(PIP) --no-build-isolation -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml $(KERNEL)
	@echo "installing relpos and what development needs"
	@$(if $(COMPILER),,echo "no C++ compiler was found: without its kernel attention on the CPU is slower")
	@$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@ $(VENV)/.demo

# only what make made: an environment with its stamp, the demo's folder with the mark of relpos
clean:  ## remove the environment, the kernel, caches and the demo's runs
	[ ! -f $(VENV)/.torch ] || rm -rf $(VENV)
	[ ! -f demo/relpos.json ] || rm -rf demo
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info \
	  src/relpos/_cpu_kernel.so
