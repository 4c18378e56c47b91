# One command each on a fresh machine that has Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint setup clean

demo: setup  ## verify the fused kernel against the oracle, then explain the 2.07x
	$(BIN)/hyscale doctor
	$(BIN)/hyscale verify --profile quick
	$(BIN)/hyscale explain --report report.html

test: lint  ## every check: lint, types, tests
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
