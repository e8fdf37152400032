# make demo | make lab                        from pictures to clips; JupyterLab
# make check | make test                      while you work | before you hand in, and in CI
# make lint | make notebooks | make browser | make chaos | make parallel-check      parts of it, the last four in full
# make docs | make bench | make bench-gpu
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
SOURCES := dfm_nb workbench tests scripts benchmarks examples
# a worker takes whole modules, those with long tests first (tests/conftest.py)
# make test WORKERS=3: a third has work while two wait
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=25

.PHONY: demo lab check test failed lint setup notebooks browser chaos parallel-check docs bench bench-gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "== set-up: about 2 to 4 minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,notebook,butterflies,text]'
	touch $(STAMP)

demo: setup
	$(BIN)/python scripts/demo.py

lab: setup
	$(BIN)/dfm lab

lint: setup
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q --noconftest tests/test_writers.py
	$(BIN)/python scripts/house_figures.py

check: setup lint
	$(PYTEST) -m "not slow"

test: setup lint
	$(PYTEST)

failed: setup lint
	$(BIN)/python -m pytest -rA --last-failed --last-failed-no-failures none

notebooks: export DFM_FULL := 1
notebooks: setup
	$(BIN)/python -m pytest -q --durations=25 tests/notebooks

browser: export DFM_FULL := 1
browser: setup
	$(BIN)/python -m pytest -q --durations=25 tests/browser

docs: setup
	$(BIN)/python scripts/api_reference.py
	$(BIN)/python scripts/executed_notebooks.py

parallel-check: setup
	$(BIN)/python benchmarks/parallel_check.py

chaos: setup
	$(BIN)/python benchmarks/chaos.py
	DFM_FUZZ=10000 $(BIN)/python -m pytest -q tests/attacks/test_parts_fuzz.py

bench: setup
	$(BIN)/python benchmarks/bench.py

bench-gpu:  # from a bare checkout: whatever python has the dependencies
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/bench_gpu.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
