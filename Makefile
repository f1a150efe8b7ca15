# Recipes for people who work on the project. Each uses the environment of tests/run.sh, and makes it if need be.
VENV ?= .venv
PYTHON = $(VENV)/bin/python
# Each is a folder of scripts that import what lies beside them.
SCRIPT_FOLDERS = benchmarks/data benchmarks/data/index benchmarks/step benchmarks/checkpointing

.PHONY: help setup check format generate test test-long test-gpu docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup:  ## make or update the environment
	@bash requirements/install.sh $(VENV) dev

check: setup  ## lint, format, types and import contracts
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	for folder in $(SCRIPT_FOLDERS); do MYPYPATH=$$folder:benchmarks/step $(PYTHON) -m mypy $$folder/*.py || exit 1; done
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(PYTHON) -m pytest -q --durations=0 tests/unit/repository

format: setup  ## rewrite the code in the project's style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

generate: setup  ## bring generated pages and the frozen lists of the tests up to date
	$(PYTHON) -m tests.unit.config.mistakes
	$(PYTHON) docs/scripts/draw_parallelism.py
	$(PYTHON) docs/scripts/draw_planner.py
	$(PYTHON) -m tests.unit.config.freeze

test:  ## run the default tests
	bash tests/run.sh

test-long:  ## run the tests that take minutes
	bash tests/run.sh -m long

test-gpu:  ## run the tests that need a CUDA device
	bash tests/run.sh -m gpu

docs:  ## build the site of the documentation strictly, into build/site, in an environment of its own
	test -x .venv-docs/bin/python || python3 -m venv .venv-docs
	.venv-docs/bin/python -m pip install -qq -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

clean:  ## remove what checkers and builds leave behind
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis megatron_gpt.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
