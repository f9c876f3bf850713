# Everything runs from .venv, which this file makes from pyproject.toml and constraints.txt.
SHELL = /bin/bash
PYTHON ?= python3
BIN = .venv/bin
STAMP = .venv/.installed

.PHONY: setup demo test test-slow test-gpu test-lowest fuzz check bench docs axe clean

setup: $(STAMP)

# torch comes first and pinned, so that a local CPU build of that version is taken where there is one.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Setting up .venv (a few minutes the first time) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	@$(BIN)/bochner demo --out demo

# A process for each core, on one thread: small matrices do not gain from more. Bytecode is kept: the tests start many processes.
test: setup
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-slow: setup
	@$(BIN)/python -m pytest -m slow

# What only CUDA shows; without a GPU every test is skipped with its reason.
test-gpu: setup
	@$(BIN)/python -m pytest -m gpu -rs

# The oldest libraries that pyproject.toml allows, beside the torch that is pinned here.
test-lowest: setup
	@$(BIN)/python tests/lowest.py

# Hostile files, tables, calls and command lines from generators, a share of the time for each; prints the seed that repeats them.
FUZZ_SECONDS ?= 300
FUZZ_SEED ?= $(shell date +%s)
fuzz: setup
	@$(BIN)/python tests/fuzz.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: setup
	@$(BIN)/python benchmarks/layer.py

# Runs the code of all pages and examples, to show what they print; DOCS_RUN=0 leaves that out.
docs: setup
	@OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

# axe-core, with which tests look for what keeps people out of the pages; without it they are skipped.
axe:
	@mkdir -p .axe && cd .axe && npm install --silent --no-save --no-audit --no-fund axe-core@4

clean:
	rm -rf .venv .axe build demo dist site .pytest_cache .ruff_cache
