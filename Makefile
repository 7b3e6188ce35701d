# Fivefold. Every target sets itself up in .venv, once, and works offline after that.
# PY=python3 make TARGET uses an interpreter that you already have, and installs nothing.

PY ?=
PYTHON := $(if $(PY),"$(PY)",.venv/bin/python)
READY := $(if $(PY),given-python,.venv/ready)
CHAPTERS_HERE := $(filter-out 10_planner.py,$(sort $(wildcard [0-9][0-9]_*.py)))  # it runs nothing
LINT := check --quiet --output-format concise

.DEFAULT_GOAL := help
.PHONY: help setup given-python tour test test-all lint bench faults figures exercises grade hunt \
	museum page test-page

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo "  PY=python3 make ... uses that interpreter instead of .venv and installs nothing"

setup: $(READY)  ## make .venv and install requirements.txt into it

given-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'make: PY=$(PY) does not start a Python 3.11 or newer; PY=python3 may' >&2; exit 1; }
	@$(PYTHON) -c 'import torch' 2>/dev/null || \
		{ echo 'make: PY=$(PY) has no torch; make without PY installs it into .venv' >&2; exit 1; }

.venv/ready: requirements.txt
	@for python in python3 python3.13 python3.12 python3.11 none; do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	done; \
	[ $$python != none ] || { echo "make: there is no Python 3.11 or newer here" >&2; exit 1; }; \
	echo "setting up .venv with $$($$python --version) and requirements.txt (once; torch is large)"; \
	$$python -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

# Run every chapter with its default variant, and a few steps of the variants that figures compare, on
# 8 CPU ranks (01 on one; 07 has a layer for each), with flags $(1) and the JSON in $(2); stop at the
# first that fails. What the figure of 08 compares is how a small model's experts are balanced, for
# which two ranks are enough; that of 09 has three axes on two machines of 4 ranks, and a mixture on
# four axes.
COMPARED := 02_data_parallel:naive 02_data_parallel:overlap 03_zero:zero1 03_zero:zero2 \
	06_context_parallel:ring 08_expert_parallel:none 08_expert_parallel:loss 08_expert_parallel:bias \
	09_5d:experts
SMALL_MIXTURE := --layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=32 --steps=200 --no-verify
RUNS := $(sort $(CHAPTERS_HERE:.py=) $(COMPARED))
written = $(patsubst %,$(1)/%.json,$(subst :,-,$(RUNS)))
ON_RANKS := env OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone
ON_8_RANKS := $(ON_RANKS) --nproc_per_node=8
define run_chapters
	@mkdir -p $(2)
	@for run in $(RUNS); do \
		chapter=$${run%%:*}; variant=$${run#$$chapter}; variant=$${variant#:}; \
		case $$run in \
			01_*) set -- $(PYTHON) ;; \
			08_*:*) set -- $(ON_RANKS) --nproc_per_node=2 ;; \
			*) set -- $(ON_8_RANKS) ;; \
		esac; \
		case $$run in 00_*) flags= ;; *) flags="$(1)" ;; esac; \
		set -- "$$@" $$chapter.py --device=cpu $$flags; \
		case $$run in \
			07_*) set -- "$$@" --layers=8 ;; \
			08_*:*) set -- "$$@" $(SMALL_MIXTURE) --balance=$$variant ;; \
			09_*:*) set -- "$$@" --pp=2 --cp=2 --ep=2 --experts=8 --steps=5 ;; \
			09_*) set -- "$$@" --dp=2 --pp=2 --tp=2 --node-size=4 ;; \
			*:*) set -- "$$@" --variant=$$variant --steps=5 ;; \
		esac; \
		echo; echo "$$ $$*"; \
		"$$@" --json=$(2)/$$chapter$${variant:+-$$variant}.json \
			|| { echo "make $@: $$chapter.py failed" >&2; exit 1; }; \
	done
endef

# How fast the collectives of chapter 00 are on 8 ranks, with flags $(1) and the JSON in $(2).
define how_fast
	@echo; echo "$$ $(ON_8_RANKS) -m lab.speed --device=cpu $(1)"
	@$(ON_8_RANKS) -m lab.speed --device=cpu $(1) --json=$(2)/00_speed.json
endef

# The schedule of chapter 07 on 8 ranks that sleep instead of computing, so that cores are enough.
SLEEP := -m lab.schedules 1f1b --micro-batches=8 --sleep=10
define sleep_through
	@echo; echo "$$ $(ON_8_RANKS) $(SLEEP)"
	@$(ON_8_RANKS) $(SLEEP) --json=$(1)/07_asleep.json
endef

# Save a checkpoint in one chapter, and go on from it in another.
define go_on_elsewhere
	@rm -rf runs/tour-saved
	@for run in "03_zero --steps=10 --save=runs/tour-saved" \
			"09_5d --pp=2 --tp=2 --dp=2 --steps=15 --resume=runs/tour-saved"; do \
		chapter=$${run%% *}; \
		set -- $(ON_8_RANKS) $$chapter.py --device=cpu $${run#* }; \
		echo; echo "$$ $$*"; \
		"$$@" --json=runs/$$chapter-again.json \
			|| { echo "make $@: $$chapter.py failed" >&2; exit 1; }; \
	done
endef

# What chapter 10 says of published layouts: Llama 3's three, and DeepSeek-V3's.
LLAMA_3 := --model 405b --software llama3 --tp 8 --pp 16 --v 8 --zero 1 --recompute none
PLANS := "$(LLAMA_3) --gpus 8192 --batch 2048 --cp 1" "$(LLAMA_3) --gpus 16384 --batch 2048 --cp 1" \
	"$(LLAMA_3) --gpus 16384 --batch 128 --seq 131072 --cp 16" \
	"--model deepseek-v3 --gpus 2048 --batch 15360 --seq 4096 --pp 16 --ep 64 --zero 1 --tp 1 \
	--schedule dualpipe-v --v 1 --cp 1 --recompute none"
define plan_published
	@for layout in $(PLANS); do \
		set -- $(PYTHON) 10_planner.py $$layout --micro-batch 1; echo; echo "$$ $$*"; "$$@" || exit 1; \
	done
endef

tour: $(READY)  ## run the course on this machine: every chapter, then one table of all and the figures
	$(call run_chapters,,runs)
	$(call how_fast,--largest=1048576 --repeats=2,runs)
	$(call sleep_through,runs)
	$(call go_on_elsewhere)
	$(call plan_published)
	@echo
	@$(PYTHON) -m lab.report $(call written,runs) runs/03_zero-again.json runs/09_5d-again.json
	@echo "pictures, from the JSON beside them:"
	@$(PYTHON) -m lab.pictures $(call written,runs) runs/00_speed.json runs/07_asleep.json

LEVEL_OF_BOTH = $(if $(LEVEL),--level="$(LEVEL)")

exercises: $(READY)  ## write exercises/, the chapters with holes (LEVEL=1: a level; FORCE=1: anew)
	@$(PYTHON) -m lab.exercises --write exercises $(LEVEL_OF_BOTH) $(if $(FORCE),--force)

FOLDER ?= exercises
HUNTS = $(if $(ONLY),,$(wildcard hunts/*.py))
grade: $(READY)  ## grade exercises/ (FOLDER=class: another; ONLY="04 05.2"; LEVEL=1), and hunts/
	@status=0; \
	if [ -z "$(HUNTS)" ] || [ -d "$(FOLDER)" ]; \
	then $(PYTHON) -m lab.grade "$(FOLDER)" $(ONLY) $(LEVEL_OF_BOTH) || status=$$?; fi; \
	for hunt in $(HUNTS); do $(PYTHON) -m lab.hunt --grade $$hunt || status=1; done; exit $$status

hunt: $(READY)  ## write hunts/, a chapter with one silent bug (CHAPTER=06 SEED=3; LEVEL=hard; FORCE=1)
	@$(PYTHON) -m lab.hunt "$(CHAPTER)" --seed "$(or $(SEED),0)" --level "$(or $(LEVEL),easy)" \
		$(if $(FORCE),--force)

# Ranks wait for each other half of the time, so two files are tested at once: by pytest-xdist, or
# where that is not, by two pytests, of which the second one's report comes when both are done.
define run_tests
	@if $(PYTHON) -c 'import xdist' 2>/dev/null; then \
		$(PYTHON) -m pytest -q -n 2 --dist loadfile tests; \
	else \
		report=$$(mktemp); \
		$(PYTHON) -m pytest -q --half=1 tests >"$$report" 2>&1 & \
		$(PYTHON) -m pytest -q --half=0 tests; first=$$?; \
		wait $$!; second=$$?; \
		cat "$$report"; rm "$$report"; exit $$((first | second)); \
	fi
endef

test: lint  ## lint, then the tests (CHAPTERS=folder tests the chapters in there)
	$(run_tests)

test-all: export FULL = 1
test-all: lint  ## lint, then all tests: every setting with every other one
	$(run_tests)

lint: $(READY)  ## check the style
	@if $(PYTHON) -m ruff --version >/dev/null 2>&1; then echo "ruff $(LINT)"; $(PYTHON) -m ruff $(LINT); \
	else echo "lint:" $(PYTHON) "has no ruff, so it is left out"; fi

museum: $(READY)  ## plant each of the museum's silent bugs, and see what finds it
	$(PYTHON) -m lab.museum --out figures/museum.png

bench: $(READY)  ## time the chapters against PyTorch's own, checkpoints, collectives, GPU kernels
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(PYTHON) benchmarks/kernels.py; else echo "no GPU: the kernels are not timed"; fi
	$(PYTHON) benchmarks/chapters.py
	$(PYTHON) benchmarks/checkpoints.py
	$(PYTHON) benchmarks/collectives.py

faults: $(READY)  ## kill ranks of a run at random, and see that it costs time and no bit
	$(PYTHON) -m lab.faults --json runs/faults.json
	$(PYTHON) -m lab.pictures runs/faults.json

figures: $(READY)  ## draw figures/ anew
	$(call run_chapters,--steps=5,runs/figures)
	$(call how_fast,,runs/figures)
	$(call sleep_through,runs/figures)
	$(PYTHON) -m lab.pictures $(call written,runs/figures) runs/figures/00_speed.json \
		runs/figures/07_asleep.json --out figures
	$(PYTHON) -m lab.plans --out figures/10_planner.png

PORT ?= 8000
page: $(READY)  ## the course in a browser, from this machine alone (PORT=8000)
	@$(PYTHON) -m lab.page --port "$(PORT)"

# Playwright drives the Chromium that is installed (Debian: apt install chromium), and brings none.
test-page: $(READY)  ## open every page in a headless Chromium; screenshots in runs/page/
	@$(PYTHON) -c 'import playwright' 2>/dev/null || [ -n "$(PY)" ] || \
		.venv/bin/python -m pip install --disable-pip-version-check --quiet playwright
	@$(PYTHON) -m pytest -q -rs tests/lab/page/page_in_browser.py
