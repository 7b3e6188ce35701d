# What the course runs on: .venv. A target installs what it needs when it first runs: .venv/ready is
# what chapters need; ready-kernels, ready-site, ready-test and ready-browser add lab/requirements/.
# From then on it works offline. PY=python3 make TARGET uses an interpreter that you already have,
# and installs nothing. TORCH=cpu and TORCH=cuda choose which torch Linux gets.

PY ?=
TORCH ?=
PYTHON := $(if $(PY),"$(PY)",.venv/bin/python)
READY := $(if $(PY),given-python,.venv/ready)
KERNELS := $(if $(PY),given-python,.venv/ready-kernels)
SITE := $(if $(PY),given-site,.venv/ready-site)
TESTED := $(if $(PY),given-python,.venv/ready-test)
BROWSER := $(if $(PY),given-python,.venv/ready-browser)

ifneq ($(TORCH),)
.PHONY: .venv/ready
endif

.venv/ready: requirements.txt
	@sh lab/setup.sh $(TORCH)

# A plain `uv sync` removes these packages again, so uv is asked each time.
.venv/ready-%: lab/requirements/%.txt .venv/ready
	@if grep -qs '^uv =' .venv/pyvenv.cfg; then uv sync --inexact --extra $*; \
	else .venv/bin/python -m pip install --disable-pip-version-check -r $< && touch $@; fi

.PHONY: given-python given-site
given-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'make: PY=$(PY) does not start a Python 3.11 or newer; PY=python3 may' >&2; exit 1; }
	@$(PYTHON) -c 'import torch' 2>/dev/null || \
		{ echo 'make: PY=$(PY) has no torch; make without PY installs it into .venv' >&2; exit 1; }

given-site: given-python
	@$(PYTHON) -c 'import jinja2, markdown_it, pygments' 2>/dev/null || \
		{ echo 'make: PY=$(PY) lacks what lab/requirements/site.txt lists' >&2; exit 1; }
