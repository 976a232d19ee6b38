# `make demo` and `make test` need Python 3.11+ and the network for pip, nothing else.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two processes, each with half of the tests in their order, so that few share a file and
# make its fixtures twice; the one that is done first takes over tests of the other.
TWO := -n 2 --dist worksteal

.PHONY: install demo test quick reliability conformance test-real bench lint docs format wheels clean

install: $(STAMP)

$(STAMP): constraints.txt pyproject.toml core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ./core $(addprefix -e ,$(patsubst %/pyproject.toml,./%,$(wildcard plugins/*/pyproject.toml)))
	$(BIN)/python -m pip install -q -c constraints.txt $$($(BIN)/python -c "import tomllib; print(*[p.split('>')[0] for g in tomllib.load(open('pyproject.toml','rb'))['dependency-groups'].values() for p in g])")
	touch $@

demo: install
	$(BIN)/python demo/run.py

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO)

quick: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO) -m "not slow"

reliability: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO) tests/reliability --all-trials

# What the ordinary suite leaves out: variants whose mechanisms another one has, documented
# commands at full length, pages and benchmarks that take seconds.
conformance: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO) --all-variants \
		$(wildcard $(addprefix plugins/*/tests/test_,conformance.py lora_files.py model_ids.py reference_commands.py)) \
		plugins/tools/tests/test_importing.py \
		tests/integration/test_benchmarks.py tests/integration/test_gpu_benchmarks.py \
		tests/integration/test_memory_estimates.py tests/integration/test_published_commands.py \
		tests/integration/test_recipes.py tests/integration/test_two_processes.py \
		tests/integration/test_docs.py::test_every_command_and_snippet_runs_and_prints_what_is_shown \
		tests/integration/test_compile.py tests/integration/test_packaging.py \
		tests/integration/test_public_surface.py tests/integration/test_two_nodes.py \
		tests/integration/test_platforms.py tests/integration/test_stranger.py \
		plugins/qwen_image/tests/test_training.py::test_two_processes_train_as_one_at_the_same_global_batch \
		tests/integration/test_one_command.py::test_every_family_gets_it \
		tests/unit/pipeline/test_loading.py::test_a_gib_in_nf4_is_loaded_with_half_a_gib_of_memory

test-real: install
	$(BIN)/python tests/gpu/assets.py .assets
	$(BIN)/python -m pytest -s tests/gpu

bench: install
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/empty_step.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/batches.py
	$(BIN)/python benchmarks/stage_1.py
	$(BIN)/python benchmarks/cache_reads.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/cache_rows.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32
	$(BIN)/mypy --platform darwin
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/measure_house.py
	$(MAKE) docs

# The docs site in site/; a link or an anchor that leads nowhere fails. To look at it, with its
# search: python -m http.server -d site
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: install
	for package in core plugins/*; do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package; done

clean:
	rm -rf .venv dist demo_output site
