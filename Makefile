# Everything a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Trials and test workers run side by side, so each keeps to one thread.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-cpp test-slow lint format bench clean

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV); this takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/geonorm compare --preset demo --out runs/demo --resume

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2

# The same, with the C++ kernels built first and taken wherever they can be.
test-cpp: export GEONORM_TEST_CPP := 1
test-cpp: test

test-slow: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# glibc maps tensors above 32 MB anew at every allocation, and the page faults would hide what is measured.
bench: export MALLOC_MMAP_THRESHOLD_ := 8589934592
bench: export MALLOC_TRIM_THRESHOLD_ := 8589934592
bench: $(STAMP)
	@echo "benchmarks on one core, about eight minutes on an idle machine; on a GPU: python -m benchmarks.gpu"
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.step --seconds 120
	$(BIN)/python -m benchmarks.training_step --seconds 270
	$(BIN)/python -m benchmarks.peers --seconds 120

clean:
	rm -rf $(VENV) runs .pytest_cache .hypothesis .ruff_cache
