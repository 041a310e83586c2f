# make demo   set up and run the built-in demonstration
# make test   set up, then scripts/check and scripts/test
#
# A torch that is there already (2.11 or newer) is used and not replaced:
#   make demo VENV_FLAGS=--system-site-packages
#   make demo PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
EXTRAS ?= transformers

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
HAS_TORCH = import torch; raise SystemExit(torch.torch_version.TorchVersion(torch.__version__) < "2.11")

.PHONY: demo test clean

demo: $(VENV)/.stamp-demo
	$(VENV)/bin/legroom demo

test: $(VENV)/.stamp-test
	VENV=$(VENV) scripts/check
	VENV=$(VENV) scripts/test

clean:
	rm -rf build dist legroom.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

$(VENV)/.stamp-torch: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -c '$(HAS_TORCH)' 2>/dev/null || $(PIP) install $(TORCH)
	touch $@

$(VENV)/.stamp-demo: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) install -e '.[$(EXTRAS)]'
	touch $@

$(VENV)/.stamp-test: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) install -e '.[test]'
	touch $@
