.PHONY: setup test test-gpu lint types unit demo bench clean
PYTHON ?= python3
BIN := .venv/bin

# torch first and alone: the other packages then find it and fetch no other build of it.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("gdeq needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[train,test,bench,dev]'
	touch $@

setup: .venv/.ready

test: lint types unit

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The tests that run on a GPU, on a machine that has one.
test-gpu: setup
	$(BIN)/python -m pytest -m gpu -n 8 --dist worksteal

# The small MDEQ on digits with all four gradients: a table and a page.
demo: setup
	$(BIN)/gdeq compare digits --no-pretraining --out runs/demo

# The figures of record: tables on screen, CSV and PNG under results/.
bench: setup
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python benchmarks/complexity.py
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
