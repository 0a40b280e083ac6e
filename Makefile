# make demo       trains the embedded model for a few minutes on a CPU and shows what changed
# make test       the tests that need no GPU and no browser and are not marked `long`
# make test-long  all tests that need no GPU, those marked `long` included
# make test-browser  the pages in a headless Chromium: $CHROMIUM, or chromium or google-chrome on the PATH
# make test-repo  the checks of documents, benchmarks and committed results (tests/repo)
# make docs       the documentation site in site/; a broken link, anchor or name is an error
# make release    builds the distributions in dist/, checks them and tries the wheel in an empty environment
# make clean      removes the environment that these make
#
# Variables:  PYTHON=python3.12   TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

SHELL  := bash
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test test-long test-browser test-repo docs release clean

demo: $(VENV)/.installed
	$(BIN)/g2rpo train

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not gpu and not long and not browser"

test-long: $(VENV)/.installed-dev
	$(PYTEST) -m "not gpu and not browser"

test-browser: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m browser tests/browser

test-repo: $(VENV)/.installed-dev
	$(PYTEST) -m "not gpu" tests/repo

# Material prints a notice about a future MkDocs otherwise.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

release: $(VENV)/.installed-dev
	work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && .ci/try_wheel $(VENV) "$$work" && \
	  rm -rf dist && cp -r "$$work/dist" dist
	@echo "dist/ is checked; to publish it: $(BIN)/python -m twine upload dist/*"

# torch is installed before the rest, so that TORCH chooses its version and build; TORCH='torch --index-url
# https://download.pytorch.org/whl/cpu' gives one without CUDA's libraries, which take gigabytes.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "g2rpo needs Python 3.11 to 3.13, $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV); this takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
