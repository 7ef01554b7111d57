# One virtual environment, .venv, holds everything; `make install` fills it, other targets do it when needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-ollama check bench native

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml native/pread_batch.c native/CMakeLists.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

install: $(VENV)/.installed  ## make .venv with slotpy, its native reader and the development tools

demo: install  ## watch a model several times its cache answer
	$(BIN)/slotpy run demo "What is a lighthouse?" --slots 64

serve: install  ## serve the demo to Ollama's and other clients at http://127.0.0.1:11434
	$(BIN)/slotpy serve demo

test: install  ## run the tests
	$(BIN)/python -m pytest

test-ollama: install build/clients-python/.installed build/clients-js/.installed  ## test the server with real clients
	$(BIN)/python tools/ollama_cli.py build/ollama-cli || test $$? -eq 2
	$(BIN)/python -m pytest -rs tests/ollama

# The clients have environments of their own: nothing of theirs may reach the tests' one.
build/clients-python/.installed: tests/ollama/clients/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

build/clients-js/.installed: tests/ollama/clients/package.json
	mkdir -p $(@D) && cp $< $(@D)
	if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix $(@D); \
	else echo "no npm: the JavaScript clients are skipped"; fi
	touch $@

check: install  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## run the benchmarks: prints ceilings first, appends to bench/results
	$(BIN)/python bench/slot_replay.py
	$(BIN)/python bench/store_read.py

native: install  ## rebuild the native reader
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps --editable .
