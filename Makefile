# make demo: from text to a released, scored and served model, and the page that shows it.
# make test: everything that has to hold. Both make the environment (.venv) when it is missing.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
RUN = $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test env chromium lint format clean
.DEFAULT_GOAL := help
help:
	@sed -n '1,2s/^# //p' Makefile; echo "make env, lint, format, clean: parts of these."

demo: env
	@$(RUN)/zaya release training/recipes/demo.yaml

test: env chromium lint
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: env
	@echo "lint: ruff, mypy"
	@$(RUN)/ruff check . && $(RUN)/ruff format --check . && $(RUN)/mypy

format: env
	@$(RUN)/ruff check --fix . && $(RUN)/ruff format .

env: $(VENV)/.ready

$(VENV)/.ready: requirements/cpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 with venv is missing; on Debian: apt-get install python3.11 python3.11-venv" >&2; exit 2; }
	@free=$$(df -Pk . | awk 'NR == 2 {print $$4}'); test $$free -gt 6000000 || { echo "error: 6 GB of disk are needed here and $$((free / 1000000)) are free" >&2; exit 2; }
	@echo "env: making $(VENV) from requirements/cpu.txt (3 GB, about 3 minutes)"
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	@$(RUN)/python -m pip install --no-deps -r requirements/cpu.txt || { echo "error: the install failed; if it is torch that is not found, give pip PyTorch's index of CPU wheels in PIP_EXTRA_INDEX_URL (docs/environment.md)" >&2; exit 2; }
	@$(RUN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@$(RUN)/python -c "import torch; assert torch.version.cuda is None, 'error: pip took a CUDA build of torch; see docs/environment.md'"
	@touch $@

chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& echo "chromium: installing it for the page's browser test" && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
		|| echo "note: the page's browser test needs Chromium and will fail: sudo apt-get install -y chromium"

clean:
	@rm -rf runs .cache .pytest_cache .mypy_cache .ruff_cache
