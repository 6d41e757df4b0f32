# `make help` lists the targets. Everything is installed into .venv, once: without a change in
# requirements/ a second run does not touch the network.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Written last, so that an interrupted installation is started again.
STAMP := $(VENV)/.installed

ENGINE := requirements/engine-0.32.0.txt
VLLM := requirements/vllm-0.32.0.txt
DEV := requirements/dev.txt

# The targets decide themselves which engine gets the product.
unexport PYTHONPATH

.PHONY: help demo test lint releases new-release clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

demo: $(STAMP)  ## Measure native against compact on a real engine (two minutes, CPU only)
	@$(BIN)/python examples/demo.py

test: $(STAMP)  ## Run all tests
	$(BIN)/python -m pytest tests

releases: $(STAMP)  ## Run the planner of every supported vLLM release, write docs/releases.md
	TEST_RELEASES=all $(BIN)/python -m pytest tests/releases

new-release: $(STAMP)  ## Judge a vLLM release that nobody has seen: VERSION=0.34.0
	@$(BIN)/python tests/releases/new_release.py $(VERSION)

lint: $(STAMP)  ## Check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict altay_kvfix

clean:  ## Remove the virtual environment, the demo's files and all caches
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(ENGINE) $(VLLM) $(DEV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r $(ENGINE) -r $(DEV)
	$(BIN)/python -m pip install --no-deps -r $(VLLM)
	@touch $@
