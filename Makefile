# make demo   trains the embedded model for a few minutes on a CPU and shows what changed
# make test   the tests that need no GPU
# make clean  removes the environment that both made
#
# Variables:  PYTHON=python3.12   TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

SHELL  := bash
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test clean

demo: $(VENV)/.installed
	$(BIN)/g2rpo train

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n auto --dist loadfile

# torch goes first and alone: asked for together with the rest, pip may choose a build with gigabytes of CUDA.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "g2rpo needs Python 3.11 to 3.13, $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV); this takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
