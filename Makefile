# Everything goes through .venv, made on first use from requirements.lock. Needs python3 (3.11 or newer) and make.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
JOB ?= specs/jobs/quickstart.toml
ARGS ?=
WORKERS ?= 2
SEED ?= 1
N ?= 20
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --randomly-seed=$(SEED) --durations-json=build/durations-$@.json

.PHONY: help venv wheel train test test-rest test-all contract mutants check size format bench papers papers-lab clean

help:
	@echo "make venv     the environment, once"
	@echo "make wheel    dist/plait-VERSION-*.whl, to install anywhere"
	@echo "make train    train JOB=$(JOB); more options in ARGS"
	@echo "make test     unit tests, gloo ranks, a few whole runs: enough to trust an installation; pytest options in ARGS"
	@echo "make test-all everything: launchers, labs, Slurm, Kubernetes, faults and a browser too"
	@echo "make contract the cases of large products that the suite leaves out"
	@echo "make mutants  N=$(N) faults drawn with SEED=$(SEED), planted, and looked for by the suite"
	@echo "make check    lint, formatting, types, import rules, the budget of tools/budget.toml"
	@echo "make size     lines, files and what is written more than once"
	@echo "make format   rewrite files into the house format"
	@echo "make bench    the overlap benchmark"
	@echo "make papers   docs/papers: what the five papers publish beside what Plait computes; papers-lab: also emulated"
	@echo "make clean    caches and builds (keeps .venv and runs/)"

venv: $(STAMP)

$(STAMP): requirements.lock pyproject.toml hatch_build.py plait/core/record/_ring.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Plait needs Python 3.11 or newer; name one with PYTHON=... (this is %s)" % sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing requirements.lock (some minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

wheel:
	@rm -f dist/plait-*.whl
	@test -x build/venv/bin/python || $(PYTHON) -m venv build/venv
	@build/venv/bin/python -m pip install -qq --disable-pip-version-check -c requirements.lock hatchling setuptools
	@build/venv/bin/python -m hatchling build -t wheel

train: $(STAMP)
	@$(BIN)/plait train $(JOB) $(ARGS)

test: $(STAMP)
	@$(PYTEST) -m "(unit or ranks or smoke) and not contract" $(ARGS)

test-rest: $(STAMP)
	@$(PYTEST) -m "system and not smoke and not contract" $(ARGS)

test-all: $(STAMP)
	@$(PYTEST) $(ARGS)

contract: $(STAMP)
	@$(BIN)/python -m pytest -m contract $(ARGS)

mutants: $(STAMP)
	@$(BIN)/python -m tests.mutants $(N) $(SEED) $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/count.py --budget
	@$(BIN)/python -m pytest -q tests/test_imports.py

size:
	@$(PYTHON) tools/house.py

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP)
	@$(BIN)/python benchmarks/domino.py $(ARGS)

papers: $(STAMP)
	@$(BIN)/python -m benchmarks.papers $(ARGS)

papers-lab: $(STAMP)
	@$(BIN)/python -m benchmarks.papers --lab $(ARGS)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
