# make train   the main job: three runs on Fashion-MNIST and one table
# make test    the quick test suite         make test-all  with the slow cases
# make bench   the benchmarks, and the figures of README and docs from them
# make lint    ruff and pyright             make docs      the documentation site
#
# PYTHON chooses the interpreter (each has a virtual environment of its own),
# ARGS is handed to the trainer or to pytest: make train ARGS="--epochs 2"

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
ARGS ?=
# One process a core, a file of tests each: what a file compiles is shared in it.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: train test test-all bench transfer-figure lint docs clean setup

train: setup
	$(BIN)/python examples/trainers/image_classifier.py $(ARGS)

test: setup
	$(PYTEST) $(ARGS)

test-all: setup
	$(PYTEST) -m "" $(ARGS)

bench: setup
	for script in host_to_device loader_cost transforms_cost device_augment \
	  input_pipeline step_overhead precision aggregation; do \
	  $(BIN)/python benchmarks/$$script.py --record || exit 1; done
	$(BIN)/python benchmarks/report.py

transfer-figure: setup
	$(BIN)/python benchmarks/transfer_figure.py $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-* build dist site *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.dev

# The stamp is newer than pyproject.toml once everything in it is installed.
# Debian's python3 may lack ensurepip: then pip of the interpreter installs pip.
$(VENV)/.dev: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@
