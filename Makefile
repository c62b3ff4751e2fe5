# Two commands, each from nothing: `make train` runs the main job, `make test` all checks and tests.
# What they need is installed into .venv once, and again only when one of the files below changes.

PYTHON ?= python3
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint tools/constraints-cpu.txt)
INPUTS := pyproject.toml setup.py tools/constraints-cpu.txt
READY := .venv/ready-$(firstword $(shell (echo "$(CURDIR) $(CONSTRAINTS)"; cat $(INPUTS)) | cksum))

.PHONY: train test

train: $(READY)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python tools/main_job.py

test: $(READY)
	@.venv/bin/python tools/check

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@echo "installing into .venv, once; this takes some minutes"
	@$(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip --disable-pip-version-check install --quiet $(CONSTRAINTS) --editable '.[dev,hf]'
	@touch $@
