# Everything a person or a machine does with this repository. Needs Python 3.11, make and,
# for the compiled codec, a C compiler. One .venv serves all targets; only the demo, tests and lint
# install Spark (and a Java for it, where there is none).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What an installation depends on: these files, and the compiled codec's source.
PACKAGING := pyproject.toml setup.py constraints.txt $(wildcard protocol/_hot.pyx)

.PHONY: help run demo test test-all soak lint bench clean

help:
	@echo "make run       start a broker on 127.0.0.1:5672 (FLAGS='--port 5673' for others)"
	@echo "make demo      a broker under a lively load, and a report on it in your browser"
	@echo "make test      lint, types and the fast tests"
	@echo "make test-all  the same with the slow tests"
	@echo "make soak      kill and power-cut a broker under load for hours (FLAGS='--hours 0.5')"
	@echo "make lint      ruff and mypy"
	@echo "make bench     load beside RabbitMQ (FLAGS='--only confirmed-acked-100B --alone')"
	@echo "make clean     remove what was built, and .venv"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Leveret needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(PACKAGING) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.spark: $(PACKAGING) | $(BIN)/python
	$(INSTALL) -e '.[spark]'
	@touch $@ $(VENV)/.core

$(VENV)/.dev: $(PACKAGING) | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.core $(VENV)/.spark

run: $(VENV)/.core
	exec $(BIN)/leveret serve $(FLAGS)

demo: $(VENV)/.spark
	$(BIN)/leveret analytics demo $(FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p leveret
	$(BIN)/mypy tests

# -rs names every skipped test and why; the last line counts them. The tests of the analytics run by
# themselves: they share one Spark session, which two workers would start twice.
PYTEST := $(BIN)/python -m pytest --durations=10 -rs
BROKER_TESTS := -n 2 --dist worksteal --ignore=tests/spark
# Status 5 is "nothing was selected", as when FLAGS names a test elsewhere.
SPARK_TESTS := tests/spark $(FLAGS) || [ $$? -eq 5 ]

test: lint
	$(PYTEST) -m "not slow" $(BROKER_TESTS) $(FLAGS)
	$(PYTEST) -m "not slow" $(SPARK_TESTS)

test-all: lint
	$(PYTEST) $(BROKER_TESTS) $(FLAGS)
	$(PYTEST) $(SPARK_TESTS)

soak: $(VENV)/.dev
	$(BIN)/python -m tests.durability.soak $(FLAGS)

bench: $(VENV)/.core
	$(BIN)/python benchmarks/versus.py --start "$(BIN)/leveret serve --port {port} --data {data}" $(FLAGS)

clean:
	rm -rf $(VENV) build dist leveret.egg-info protocol/_hot.c protocol/_hot*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
