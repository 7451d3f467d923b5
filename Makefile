.PHONY: setup test test-gpu lint types unit demo bench docs docs-serve package lock clean
PYTHON ?= python3
BIN := .venv/bin
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1577836800)

# Files are checked against the hashes in locks/.  torch is its CPU build where pip finds one, else
# PyPI's, whose GPU libraries come with the last line.
INSTALL := $(BIN)/python -m pip install --quiet
.venv/.ready: pyproject.toml constraints.txt locks/develop.txt
	$(PYTHON) -c 'import sys; sys.exit("gdeq needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --require-hashes --no-deps -r locks/torch-cpu.txt 2>/dev/null \
		|| $(INSTALL) --require-hashes --no-deps -r locks/torch.txt
	$(INSTALL) --require-hashes --no-deps -r locks/develop.txt
	$(INSTALL) -c constraints.txt --no-build-isolation -e '.[train,test,bench,dev]'
	touch $@

.venv/.publish: .venv/.ready locks/publish.txt
	$(INSTALL) --require-hashes --no-deps -r locks/publish.txt
	touch $@

setup: .venv/.ready

test: lint types unit

lint: setup
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The tests that run on a GPU, on a machine that has one: each kernel, engine and capture path.  The
# processors compile kernels most of the time, so there is a process for each.
test-gpu: setup
	$(BIN)/python -m pytest -m gpu -n auto --maxprocesses 15 --dist worksteal

# The small MDEQ on digits with all four gradients: a table and a page.  Its batches are too small
# for several threads, which on a busy machine would wait for each other.
demo: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/gdeq compare digits --no-pretraining --out runs/demo

# The figures of record: tables on screen, CSV and PNG under results/.
bench: setup
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python benchmarks/complexity.py
	$(BIN)/python benchmarks/engine.py

# The site: tutorials are executed, and a broken link or a name that is gone fails.
docs: .venv/.publish
	$(BIN)/python docs/build.py
	$(BIN)/zensical build --clean --strict

docs-serve: docs
	$(BIN)/python -m http.server --directory build/site 8000

# sdist and wheel, built twice and compared, checked, and tried in an environment of their own.
package: .venv/.publish
	$(BIN)/python docs/package.py

# Versions and hashes of what is installed above; needs uv, and a CPU build of torch at hand.
LOCK := uv pip compile --quiet --generate-hashes --no-header --no-annotate -c constraints.txt \
	--no-emit-package torch pyproject.toml
lock:
	$(LOCK) --extra train --extra test --extra bench --extra dev --group build -o locks/develop.txt
	$(LOCK) -c locks/develop.txt --extra docs --extra release -o locks/publish.txt

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
