# Two commands for everybody: `make quickstart` and `make test`. Both do all the set-up (see setup.sh).
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup quickstart test test-all lint fast

setup:
	@VENV=$(VENV) ./setup.sh

quickstart: setup
	$(BIN)/python -m verl.trainer.main recipe=vla3_quickstart

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

fast: setup
	$(BIN)/python -m pytest -q -m "not slow"

# three at a time, for two cores: whole runs wait in between, for Ray and for deadlines
test: lint
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not long" --durations=40 --durations-min=15

test-all: lint
	$(BIN)/python -m pytest -q
