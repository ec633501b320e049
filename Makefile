SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3.11
PYTEST_ARGS ?=
IMAGE_BUILDER ?= docker
CONTROL_IMAGE ?= npufleet/control-plane:dev
ENGINE_IMAGE ?= npufleet/engine:dev

UV_VERSION := 0.13.9
BIN := .venv/bin
UV := $(BIN)/uv
STAMP := .venv/.installed
COMPILE := $(UV) pip compile --quiet --no-header --no-emit-index-url --no-annotate --python-version 3.11

# The packages, not their folders: mypy finds the folders through mypy_path.
PACKAGES := npufleet_api npufleet_operator npufleet_gateway npufleet_fetch npufleet_pod npufleet_monitor npufleet_kernels ascendenv devcluster $(notdir $(wildcard tools/demo))

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP) ## Make .venv with every tool and pinned dependency (only when a pin changed)

$(STAMP): pyproject.toml requirements/dev.txt requirements/demo.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH: install Python 3.11, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "no virtual environment: on Debian, apt-get install python3.11-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(UV) pip install --quiet --python $(BIN)/python -r requirements/dev.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps -r requirements/demo.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

.PHONY: kernels
kernels: $(STAMP) ## Compile the CPU kernels beside their sources, where pods of the development cluster find them (needs g++)
	@$(BIN)/python -m npufleet_kernels.build >/dev/null

.PHONY: requirements
requirements: $(STAMP) ## Compile the pins in requirements/ again, from pyproject.toml
	$(COMPILE) --upgrade pyproject.toml --extra control --extra pod --extra tracing --extra dev -o requirements/dev.txt
	$(COMPILE) --constraint requirements/dev.txt pyproject.toml --extra control -o requirements/control.txt
	$(COMPILE) --constraint requirements/dev.txt pyproject.toml --extra pod --extra tracing -o requirements/pod.txt

.PHONY: crds
crds: $(STAMP) ## Write the CRD YAML, and the chart's copy, from the models in crds/npufleet_api
	$(BIN)/python crds/generate.py

.PHONY: format
format: $(STAMP) ## Format, and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: lint
lint: $(STAMP) ## Style, import contracts, and whether the CRD YAML is up to date
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python crds/generate.py --check

.PHONY: types
types: $(STAMP) ## mypy --strict over every package and test
	$(BIN)/mypy $(addprefix --package ,$(PACKAGES))
	$(BIN)/mypy tests crds/generate.py $(wildcard tools/*.py)

.PHONY: check
check: lint types kernels ## The quick part, for every save: lint, types and the tests that need neither cluster nor minutes
	$(BIN)/pytest -m "not e2e and not slow" $(PYTEST_ARGS)

.PHONY: test
test: lint types kernels ## Everything: what check does, the slow tests, and the end-to-end tests on a real Kubernetes (root on Linux)
	$(BIN)/pytest --durations=25 $(PYTEST_ARGS)

.PHONY: demo
demo: $(STAMP) kernels ## A real Kubernetes on this machine, npufleet on it, and a chat completion through the gateway
	$(BIN)/python -m demo

.PHONY: demo-down
demo-down: $(STAMP) ## Take the demo's cluster away again
	$(BIN)/python -m demo down

.PHONY: images
images: ## Build both container images (IMAGE_BUILDER=docker or podman)
	$(IMAGE_BUILDER) build -f Dockerfile.operator -t $(CONTROL_IMAGE) .
	$(IMAGE_BUILDER) build -f Dockerfile.pod -t $(ENGINE_IMAGE) .

.PHONY: clean
clean: ## Remove caches and build outputs; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
