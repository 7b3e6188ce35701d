# Fivefold. Each target first sets up what it needs, once (lab/setup.mk).

include lab/setup.mk

.DEFAULT_GOAL := help
.PHONY: help setup tour quick test test-all lint bench gpu faults scaling figures \
	exercises bundle grade hunt museum page site browser test-page

help:  ## list the targets
	@echo "Times are those of two cores with nothing else to do. The first target sets up .venv, once:"
	@echo "240 MB, with CUDA 2.8 GB. Tests, kernels' exercises and bundles need 350 MB more."
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo "  PY=python3 make ... uses that interpreter instead of .venv and installs nothing"

setup: $(READY)  ## make .venv, with torch for what this machine has (TORCH=cpu; TORCH=cuda)

tour: $(READY)  ## 3 minutes: the course here, a table of all and the figures (ONLY="02 06")
	@$(PYTHON) -m lab.tour $(ONLY)

quick: $(READY)  ## 10 seconds: chapter 02 alone, on 4 ranks, and its figure
	@$(PYTHON) -m lab.tour 02 --first

ONE_LEVEL = $(if $(LEVEL),--level="$(LEVEL)")

exercises: $(READY)  ## write exercises/, the chapters with holes (LEVEL=1: a level; FORCE=1: anew)
	@$(PYTHON) -m lab.exercises --write exercises $(ONE_LEVEL) $(if $(FORCE),--force)

bundle: $(KERNELS)  ## write bundle/, what students get: holes, and their grader, no solution (OUT=)
	@$(PYTHON) -m lab.bundle $(if $(OUT),--out "$(OUT)") $(if $(FORCE),--force)

FOLDER ?= exercises
HUNTS = $(if $(ONLY),,$(wildcard hunts/*.py))
# A number names a chapter's exercises. All others may be those of kernels.
GRADED = $(if $(ONLY),$(filter-out 0% 1%,$(ONLY)),all)
grade: $(if $(GRADED),$(KERNELS),$(READY))  ## grade exercises/ (FOLDER=class: another; ONLY="04 05.2"; LEVEL=1), and hunts/
	@status=0; \
	if [ -z "$(HUNTS)" ] || [ -d "$(FOLDER)" ]; \
	then $(PYTHON) -m lab.grade "$(FOLDER)" $(ONLY) $(ONE_LEVEL) || status=$$?; fi; \
	for hunt in $(HUNTS); do $(PYTHON) -m lab.hunt --grade $$hunt || status=1; done; exit $$status

hunt: $(READY)  ## write hunts/: a chapter with a silent bug (CHAPTER=06 SEED=3; FORCE=1)
	@$(PYTHON) -m lab.hunt "$(CHAPTER)" --seed "$(or $(SEED),0)" $(if $(FORCE),--force)

# If pytest-xdist is installed, two workers share the test files: on two cores, a third saves no time.
# In test-all one file takes as long as all the others together, so workers share its tests, too.
DIST = loadfile
define run_tests
	@if $(PYTHON) -c 'import xdist' 2>/dev/null; then workers="-n 2 --dist $(DIST)"; fi; \
	$(PYTHON) -m pytest -q $$workers --durations=25 tests
endef

test: lint  ## 6 minutes: lint, then the tests (CHAPTERS=folder: of the chapters in there)
	$(run_tests)

test-all: export FULL = 1
test-all: DIST = worksteal
test-all: lint browser  ## all tests: every setting, every fault, browsers, compilers, signals
	$(run_tests)

# Runs the linters of .pre-commit-config.yaml, and prints lines of code against their budgets.
lint: $(TESTED)  ## check the style
	@if git rev-parse >/dev/null 2>&1 && $(PYTHON) -c 'import pre_commit' 2>/dev/null; then \
		bin=$$($(PYTHON) -c 'import os, sys; print(os.path.dirname(sys.executable))'); \
		PATH="$$bin:$$PATH" $(PYTHON) -m pre_commit run --all-files; \
	elif $(PYTHON) -m ruff --version >/dev/null 2>&1; then $(PYTHON) -m ruff check --quiet; \
	else echo "lint:" $(PYTHON) "has neither pre-commit nor ruff, so nothing is checked"; fi
	@$(PYTHON) tests/support/budgets.py

museum: $(TESTED)  ## 11 minutes: plant each of the museum's silent bugs, and see what finds it
	@$(PYTHON) -m lab.museum --out figures/museum.png

bench: $(READY)  ## time the chapters and Muon against PyTorch's own, and on a GPU the kernels
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(PYTHON) benchmarks/time_kernels.py; else echo "no GPU: the kernels are not timed"; fi
	$(PYTHON) benchmarks/time_chapters.py
	$(PYTHON) benchmarks/time_muon.py

gpu: $(TESTED)  ## 10 minutes: what never ran on a GPU, on 1, 2, 4 or 8 (MINUTES=10; DEVICE=cpu)
	@$(PYTHON) benchmarks/gpu.py --minutes "$(or $(MINUTES),10)" --device "$(or $(DEVICE),cuda)"

faults: $(READY)  ## kill ranks of a run at random, and see that it costs time and nothing else
	$(PYTHON) -m lab.faults --json runs/faults.json
	$(PYTHON) -m lab.pictures runs/faults.json

scaling: $(READY)  ## 3 minutes: tokens/s over ranks, beside predictions
	@$(PYTHON) -m lab.scaling --json runs/scaling.json
	@$(PYTHON) -m lab.pictures runs/scaling.json --out figures

figures: $(READY)  ## 5 minutes: draw figures/ anew (ONLY="02 06")
	@$(PYTHON) -m lab.tour --figures $(ONLY)

# A Python that browsers run. npm checks what it fetches; without npm, the site stores answers alone.
PYODIDE := .venv/pyodide-0.29.5.tgz
$(PYODIDE):
	@mkdir -p .venv
	@npm pack --silent --pack-destination .venv pyodide@0.29.5 >/dev/null || \
		echo "make: npm has fetched no Pyodide" >&2

WRITE_SITE = $(PYTHON) -m lab.site --out "$(or $(OUT),site)"
site: $(SITE) $(PYODIDE)  ## write the course as a site, which computes in the browser (OUT=folder)
	@$(WRITE_SITE)

page: $(SITE) $(PYODIDE)  ## the same, and open it: served to this machine alone (PORT=8000)
	@$(WRITE_SITE) --port "$(or $(PORT),8000)"

# Playwright drives the Chromium that is installed (Debian: apt install chromium), and brings none.
browser: $(TESTED) $(BROWSER) $(PYODIDE)

test-page: export FULL = 1
test-page: browser  ## open every page in a headless Chromium; screenshots in runs/page/
	@$(PYTHON) -m pytest -q -rs tests/lab/site/in_browser
