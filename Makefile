# `make demo` and `make test` need Python 3.11+ and the network for pip, nothing else.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two processes, each with half of the tests in their order, so that few share a file and
# make its fixtures twice; the one that is done first takes over tests of the other.
TWO := -n 2 --dist worksteal

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO)
SECONDS := 800

.PHONY: help install demo test test-core quick everything golden test-real bench lint lint-quick docs format wheels clean

install: $(STAMP) ## make .venv with everything, which the others begin with

help: ## list these
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

$(STAMP): constraints.txt pyproject.toml core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ./core $(addprefix -e ,$(patsubst %/pyproject.toml,./%,$(wildcard plugins/*/pyproject.toml)))
	$(BIN)/python -m pip install -q -c constraints.txt $$($(BIN)/python -c "import tomllib; print(*[p.split('>')[0] for g in tomllib.load(open('pyproject.toml','rb'))['dependency-groups'].values() for p in g])")
	touch $@

demo: install ## train a small model in two stages, then a LoRA
	$(BIN)/python demo/run.py

test: install ## what a merge needs: everyday tests, and as many others as fit into SECONDS of CPU time
	$(PYTEST) --seconds $(SECONDS) < /dev/null

quick: install ## everyday tests
	$(PYTEST) < /dev/null

test-core: install ## the tests of core, where no plugin is installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.core_alone

everything: install ## every trial, variant, page and planted bug that has not passed on this commit
	$(BIN)/python tools/everything.py

golden: install ## name what this tree computes or writes otherwise than BASE=REV
	$(BIN)/python -m tools.golden $(BASE) $(CASES)

test-real: install ## real tokenizers, images and a video, downloaded
	$(BIN)/python tests/gpu/assets.py .assets
	$(BIN)/python -m pytest -s tests/gpu

bench: install ## print the tables of performance.md
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/empty_step.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/batches.py
	$(BIN)/python benchmarks/stage_1.py
	$(BIN)/python benchmarks/cache_reads.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/cache_rows.py

lint-quick: install ## ruff, mypy and the budget of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/measure_house.py --budget
	$(BIN)/python tools/not_installed.py --check

lint: lint-quick ## lint-quick, other platforms, imports and the docs
	$(BIN)/mypy --platform win32
	$(BIN)/mypy --platform darwin
	$(BIN)/lint-imports --no-cache
	$(MAKE) docs

# The docs site in site/; a link or an anchor that leads nowhere fails. To look at it, with its
# search: python -m http.server -d site
docs: install ## build the docs site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: install ## let ruff mend and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: install ## build the wheels of core and plugins in dist/
	for package in core plugins/*; do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package; done

clean: ## remove .venv and all that is made here
	rm -rf .venv dist demo_output site .results .golden .dstrain-tests-*
