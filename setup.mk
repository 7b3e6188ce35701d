# What the course runs on: .venv. A target fetches what it needs when it first runs: ready is what
# chapters need, ready-kernels Triton, ready-test what the tests need. What is there works offline.
# PY=python3 make TARGET uses an interpreter that you already have, and installs nothing.

PY ?=
PYTHON := $(if $(PY),"$(PY)",.venv/bin/python)
READY := $(if $(PY),given-python,.venv/ready)
KERNELS := $(if $(PY),given-python,.venv/ready-kernels)
TESTED := $(if $(PY),given-python,.venv/ready-test)

# Which torch Linux gets: cpu, or cuda with CUDA's libraries. Unless said: what the machine can use.
TORCH ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu
ifeq ($(findstring :$(TORCH):,::cpu:cuda:),)
    $(error TORCH=$(TORCH) is no build of torch; TORCH=cpu is, and TORCH=cuda)
endif
ifneq ($(TORCH),)
ifneq ($(TORCH),$(shell cat .venv/ready 2>/dev/null))
.PHONY: .venv/ready
endif
endif

.PHONY: given-python
given-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'make: PY=$(PY) does not start a Python 3.11 or newer; PY=python3 may' >&2; exit 1; }
	@$(PYTHON) -c 'import torch' 2>/dev/null || \
		{ echo 'make: PY=$(PY) has no torch; make without PY installs it into .venv' >&2; exit 1; }

PIP := .venv/bin/python -m pip install --disable-pip-version-check
IS_OF_UV := grep -qs '^uv =' .venv/pyvenv.cfg

# Each command of uv sets UV_NO_SOURCES's torch again, so that TORCH could not last. With pip, torch
# comes first and alone: --index-url holds for it only, and pip's own settings for the rest.
# Where that index cannot be reached, few retries cost seconds, and pip looks in those settings.
.venv/ready: requirements.txt
	@if $(IS_OF_UV); then build=$(if $(UV_NO_SOURCES),cuda,cpu); \
		[ "$(or $(TORCH),$$build)" = $$build ] || { echo "make: .venv is uv's: instead of TORCH," \
			"export UV_NO_SOURCES=1 (cuda), or unset it (cpu)" >&2; exit 1; }; \
		echo "make: .venv is uv's: uv sync"; uv sync --inexact && touch $@; exit; fi; \
	for python in python3 python3.13 python3.12 python3.11 none; do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	done; \
	[ $$python != none ] || { echo "make: there is no Python 3.11 or newer here" >&2; exit 1; }; \
	build=$(or $(TORCH),$(shell cat .venv/ready 2>/dev/null)); options=; \
	[ "$$build" ] || if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; \
		then build=cuda; else build=cpu; fi; \
	case "$$(uname -s) $$build" in \
		"Linux cpu") options="--retries 2 --timeout 15 --index-url $(CPU_INDEX)"; \
			what="torch without CUDA: about 240 MB (TORCH=cuda: 2.8 GB)";; \
		"Linux cuda") what="torch with CUDA: about 2.8 GB (TORCH=cpu: 240 MB)";; \
		*) what="torch: about 160 MB";; \
	esac; \
	[ ! -e .venv/bin/torchrun ] || [ "$(TORCH)" ] || what="what is new"; \
	echo "setting up .venv with $$($$python --version), once; pip fetches $$what"; \
	$$python -m venv $(if $(TORCH),--clear) .venv || exit 1; \
	$(PIP) --no-deps $$options "$$(grep '^torch[<>=]' requirements.txt)" || { \
		echo "make: pip got no torch ($$build); TORCH=cpu and TORCH=cuda lie in two indexes" >&2; \
		exit 1; }; \
	$(PIP) -r requirements.txt && echo $$build > $@

# Triton, which runs kernels on a CPU (CUDA's torch brings it): 290 MB. And what the tests need.
# A plain `uv sync` takes them away again: uv is asked each time.
.venv/ready-%: requirements-%.txt .venv/ready
	@if $(IS_OF_UV); then uv sync --inexact --extra $*; else $(PIP) -r $< && touch $@; fi
