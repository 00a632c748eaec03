# The companion's commands; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# No lock on the folder: outputs are written whole and runs have locks of their own, and a stale one would block reruns.
SNAKEMAKE := $(BIN)/snakemake --cores all --nolock --rerun-incomplete --rerun-triggers params input mtime --quiet rules progress
export PYTHONWARNINGS := ignore
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv from requirements.lock

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python %d.%d is too old: use PYTHON=python3.11 or newer" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on --requirement requirements.lock
	$(BIN)/python -m pip install --no-deps --editable .
	@touch $(READY)

reproduce: $(READY)  ## run every notebook (quick preset), write figures and ledger, show the ledger
	$(SNAKEMAKE) --config preset=quick
	@$(BIN)/python -m lib.companion.workflow publish

smoke: $(READY)  ## run every line of every notebook in minutes; says nothing about science
	$(SNAKEMAKE) --config preset=smoke

test: $(READY)  ## all tests: unit, property, and every notebook in the smoke preset
	$(BIN)/python -m pytest

test-fast: $(READY)  ## the tests that neither train nor run notebooks
	$(BIN)/python -m pytest -m "not slow"

check: $(READY)  ## say which committed notebook, figure or ledger entry is missing or stale
	@$(BIN)/python -m lib.companion.workflow check

benchmark: $(READY)  ## measure speeds again; wants a quiet machine
	@for name in $(basename $(notdir $(wildcard benchmarks/*.py))); do $(BIN)/python -m lib.companion.workflow benchmark $$name || exit 1; done

lab: $(READY)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

app: $(READY)  ## serve the explorers to a class: notebook 07 without its code, through Voilà
	JUPYTER_PATH=$(CURDIR)/app $(BIN)/voila notebooks/07_playground.ipynb --template=offline --VoilaConfiguration.progressive_rendering=True

site: $(READY)  ## build the static site of the executed notebooks in build/site
	@$(BIN)/python -m lib.companion.site

.PHONY: help setup reproduce smoke test test-fast check benchmark lab app site
