# Fivefold. Every target sets itself up in .venv, once, and works offline after that.
# PY=python3 make TARGET uses an interpreter that you already have, and installs nothing.

PY ?=
PYTHON := $(if $(PY),$(PY),.venv/bin/python)
READY := $(if $(PY),,.venv/ready)
CHAPTERS_HERE := $(sort $(wildcard [0-9][0-9]_*.py))
LINT := check --quiet --output-format concise --select E,F,W,I,B --ignore B905,E731 --line-length 100

.DEFAULT_GOAL := help
.PHONY: help setup tour test lint bench figures

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "  PY=python3 make ... uses that interpreter instead of .venv and installs nothing"

setup: $(READY)  ## make .venv and install requirements.txt into it

.venv/ready: requirements.txt
	@for python in python3 python3.13 python3.12 python3.11 none; do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	done; \
	[ $$python != none ] || { echo "make: there is no Python 3.11 or newer here" >&2; exit 1; }; \
	echo "setting up .venv with $$($$python --version) and requirements.txt (once; torch is large)"; \
	$$python -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

# Run every chapter, on 8 CPU ranks (01 on one), with --plot in $(1), flags $(2) and --json in $(3);
# stop at the first that fails.
define run_chapters
	@for chapter in $(CHAPTERS_HERE:.py=); do \
		case $$chapter in \
			01_*) launch="$(PYTHON)" ;; \
			*) launch="env OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node=8" ;; \
		esac; \
		command="$$launch $$chapter.py --device=cpu --plot=$(1)/$$chapter.png $(2)"; \
		echo; echo "$$ $$command"; \
		$$command --json=$(3)/$$chapter.json || { echo "make $@: $$chapter.py failed" >&2; exit 1; }; \
	done
endef

tour: $(READY)  ## run the course on this machine: every chapter, then one table
	$(call run_chapters,runs,,runs)
	@echo
	@$(PYTHON) common.py $(CHAPTERS_HERE:%.py=runs/%.json)
	@echo "pictures and JSON: runs/"

test: lint  ## lint, then all tests (CHAPTERS=folder tests the chapters in there)
	$(PYTHON) -m pytest -q tests

lint: $(READY)  ## check the style
	@if $(PYTHON) -m ruff --version >/dev/null 2>&1; then echo "ruff $(LINT)"; $(PYTHON) -m ruff $(LINT); \
	else echo "lint: $(PYTHON) has no ruff, so it is left out"; fi

bench: $(READY)  ## time the chapters against PyTorch's own, and on a GPU the kernels
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(PYTHON) benchmarks/kernels.py; else echo "no GPU: the kernels are not timed"; fi
	$(PYTHON) benchmarks/chapters.py

figures: $(READY)  ## draw figures/ anew
	$(call run_chapters,figures,--steps=5,runs/figures)
