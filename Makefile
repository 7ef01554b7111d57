# One virtual environment, .venv, holds everything; `make install` fills it, other targets do it when needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench native

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml native/pread_batch.c native/CMakeLists.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

install: $(VENV)/.installed  ## make .venv with slotpy, its native reader and the development tools

demo: install  ## watch a model several times its cache answer
	$(BIN)/slotpy run demo "What is a lighthouse?" --slots 64

test: install  ## run the tests
	$(BIN)/python -m pytest

check: install  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## run the benchmarks: prints ceilings first, appends to bench/results
	$(BIN)/python bench/slot_replay.py
	$(BIN)/python bench/store_read.py

native: install  ## rebuild the native reader
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps --editable .
