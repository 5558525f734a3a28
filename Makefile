# Two commands: `make demo` and `make test`. Both set up .venv on first use and re-use it afterwards.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-seeds test lint types unit setup clean schemas

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/cast-engine run jobs/tiny.yaml

demo-seeds: setup
	for seed in 0 1 2; do $(BIN)/cast-engine run jobs/tiny.yaml --set seed=$$seed --out runs/tiny-seed$$seed || exit $$?; done
	$(BIN)/cast-engine compare runs/tiny-seed0 runs/tiny-seed1 runs/tiny-seed2

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

schemas: setup
	$(BIN)/python -m schemas.export

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
