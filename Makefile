# Everything a person types. The virtual environment is made on first use and again when its inputs change.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEED ?= 0
PROFILE ?= full
# Two workers: the suite is sized for two cores, and every worker loads jax.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help demo podman test soak lint format types constraints clean

help:
	@echo "make demo     an agent learns to repair code in real sandboxes (SEED=n, PROFILE=full|smoke|blind)"
	@echo "make podman   sets up rootless Podman for you, or for ARGS='--user NAME' (through sudo; says what it changes)"
	@echo "make test     the tests, real sandboxes included"
	@echo "make soak     the same tests at ten times their counts"
	@echo "make lint     ruff and the layer contract;  make types  the type checker;  make format  rewrites"
	@echo "make clean    removes the virtual environment and everything that was built"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "palaestra needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 2; }
	@test -x $(BIN)/python && $(BIN)/python -c '' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV) (about a minute the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/learn_to_repair.py --seed $(SEED) --profile $(PROFILE)

podman:
	@if [ "$$(id -u)" = 0 ]; then exec scripts/setup-podman $(ARGS); fi; \
	command -v sudo >/dev/null || { echo "this needs root, and there is no sudo; as root run: scripts/setup-podman --user $$(id -un)" >&2; exit 2; }; \
	echo "This needs root; sudo may ask for your password. To see first what it would do: scripts/setup-podman --dry-run"; \
	exec sudo scripts/setup-podman --user "$$(id -un)" $(ARGS)

test: $(STAMP)
	@$(PYTEST) $(ARGS)

soak: $(STAMP)
	@$(PYTEST) --soak --timeout 3600 $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

types: $(STAMP)
	@$(BIN)/mypy
	@$(BIN)/mypy examples benchmarks

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Resolves for every supported Python at once; needs uv (pip install uv).
constraints:
	@uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links pyproject.toml -o constraints.txt

clean:
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
