# What the course runs on: .venv, set up once with what the requirements*.txt say. It works offline
# after that. PY=python3 make TARGET uses an interpreter that you already have, installs nothing.

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

# torch comes first and alone: --index-url holds for it only, and pip's own settings for the rest.
# Where that index cannot be reached, few retries cost seconds, and pip looks in those settings.
.venv/ready: requirements.txt
	@if $(IS_OF_UV); then echo "make: .venv is uv's: uv sync"; uv sync --inexact && touch $@; \
		exit; fi; \
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
.venv/ready-%: requirements-%.txt .venv/ready
	@if $(IS_OF_UV); then uv sync --inexact --extra $*; else $(PIP) -r $<; fi
	@touch $@
