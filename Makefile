# Every target sets up what it needs: `make demo` on a bare machine with Python, g++ and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
STAMP := $(VENV)/.foredraft-installed
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*.cpp native/*.h native/CMakeLists.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench identity sanitize clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Create .venv with torch's CPU build, the compiled kernels and the developer tools

# torch first and pinned: a bare `torch` requirement would pull gigabytes of CUDA libraries.
$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

test: setup  ## Run the test suite (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest

check: setup  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## Remove the virtual environment and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
