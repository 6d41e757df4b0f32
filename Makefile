# `make help` lists the targets. Everything is installed into .venv, once: without a change in
# requirements/ a second run does not touch the network.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Written last, so that an interrupted installation is started again.
STAMP := $(VENV)/.installed

DEV := requirements/dev.txt
ENGINE := requirements/engine-0.32.0.txt requirements/vllm-0.32.0.txt

# Another release's engine has an environment of its own.
RELEASE ?= 0.25.1
OTHER_VENV := .cache/engine-$(RELEASE)
OTHER_STAMP := $(OTHER_VENV)/.installed
OTHER := requirements/engine-$(RELEASE).txt requirements/vllm-$(RELEASE).txt

# $(1): the environment, $(2): the vLLM release in it
define install
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install -r requirements/engine-$(2).txt -r $(DEV)
$(1)/bin/python -m pip install --no-deps -r requirements/vllm-$(2).txt
@touch $(1)/.installed
endef

# The targets decide themselves which engine gets the product.
unexport PYTHONPATH

.PHONY: help demo test lint releases engine new-release clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

demo: $(STAMP)  ## Measure native against compact on a real engine (two minutes, CPU only)
	@$(BIN)/python examples/demo.py

test: $(STAMP)  ## Run all tests
	$(BIN)/python -m pytest tests

releases: $(STAMP)  ## Run the planner of every supported vLLM release, write docs/releases.md
	TEST_RELEASES=all $(BIN)/python -m pytest tests/releases

engine: $(OTHER_STAMP)  ## Run the engine tests on another vLLM release: RELEASE=0.25.1
	$(OTHER_VENV)/bin/python -m pytest tests/engine

new-release: $(STAMP)  ## Judge a vLLM release that nobody has seen: VERSION=0.34.0
	@$(BIN)/python tests/releases/new_release.py $(VERSION)

lint: $(STAMP)  ## Check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict altay_kvfix

clean:  ## Remove the virtual environment, the demo's files and all caches
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(ENGINE) $(DEV)
	$(call install,$(VENV),0.32.0)

$(OTHER_STAMP): $(OTHER) $(DEV)
	$(call install,$(OTHER_VENV),$(RELEASE))
