# `make demo` and `make test` need Python 3.11+ and the network for pip, nothing else.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test quick reliability conformance test-real bench lint format wheels clean

install: $(STAMP)

$(STAMP): constraints.txt pyproject.toml core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ./core $(addprefix -e ,$(patsubst %/pyproject.toml,./%,$(wildcard plugins/*/pyproject.toml)))
	$(BIN)/python -m pip install -q -c constraints.txt $$($(BIN)/python -c "import tomllib; print(*[p.split('>')[0] for g in tomllib.load(open('pyproject.toml','rb'))['dependency-groups'].values() for p in g])")
	touch $@

demo: install
	$(BIN)/python demo/run.py

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

quick: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

reliability: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/reliability --all-trials

# Every variant's conformance kit; the ordinary suite takes one variant per mechanism.
conformance: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --all-variants $(wildcard plugins/*/tests/test_conformance.py plugins/*/tests/test_lora_files.py)

test-real: install
	$(BIN)/python tests/gpu/assets.py .assets
	$(BIN)/python -m pytest -s tests/gpu

bench: install
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/empty_step.py
	$(BIN)/python benchmarks/train_step.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/measure_house.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: install
	for package in core plugins/*; do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package; done

clean:
	rm -rf .venv dist demo_output
