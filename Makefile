# `make serve` and `make test` need Python 3.11 or later and a package index, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS_VENV := .venv-clients
AOT_VENV := .venv-aot
STAMP := $(VENV)/.installed
# Bytecode is kept, whatever the environment says: every process that tests start needs it.
KEEP := PYTHONDONTWRITEBYTECODE=
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet
ARGS ?=
HOST_TESTS := $(addprefix tests/,scheduler memory bench report results server cli)

.DELETE_ON_ERROR:
.PHONY: help serve test test-slow test-clients test-aot coverage mutation lint type format bench-host bench-exactness bench-throughput bench-multi-slo demo-pair dist docs site clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP).serve: pyproject.toml | $(BIN)/python
	@echo "installing (a minute or two the first time)"
	@$(PIP) --editable '.[server,plot]'
	@touch $@

$(STAMP).docs: pyproject.toml | $(BIN)/python
	@echo "installing with what builds the documentation"
	@$(PIP) --editable '.[server,plot,docs]'
	@touch $@ $(STAMP).serve

$(STAMP).test: pyproject.toml | $(BIN)/python
	@echo "installing with test tools (some minutes the first time: torch is large)"
	@$(PIP) --editable '.[server,star,cluster,dev,docs,torch]'
	@touch $@ $(STAMP).serve

$(CLIENTS_VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing clients of the server into $(CLIENTS_VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(CLIENTS_VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(CLIENTS_VENV)/bin/pip install --quiet 'pip>=25.1'
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(CLIENTS_VENV)/bin/pip install --quiet --group clients
	@touch $@

# A place of their own: with CUDA's plug-in beside it, jax would look for a driver at every start.
$(AOT_VENV)/.installed: pyproject.toml
	@echo "installing compilers for GPUs and TPUs into $(AOT_VENV) (a minute or two the first time)"
	@$(PYTHON) -m venv $(AOT_VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(AOT_VENV)/bin/pip install --quiet --editable '.[server,cuda-aot,tpu-aot]' 'pytest>=9,<10' 'pytest-timeout>=2.3,<3' 'hypothesis>=6.130,<7'
	@touch $@

serve: $(STAMP).serve ## start the server on the embedded pair: http://127.0.0.1:8000 (ARGS="--port 9000" adds options)
	@$(BIN)/adaserve serve $(ARGS)

test: $(STAMP).test ## run the suite (some minutes)
	@$(KEEP) $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP).test ## run everything, the slow tests too
	@$(KEEP) JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m "not clients and not short" $(ARGS)

test-clients: $(STAMP).test $(CLIENTS_VENV)/.installed ## run real clients and fuzzing against the embedded pair (some minutes)
	@$(KEEP) CLIENTS_VENV=$(CLIENTS_VENV) $(BIN)/python -m pytest -m clients tests/clients $(ARGS)

test-aot: $(AOT_VENV)/.installed ## compile small engines for a GPU and a TPU that are not here (some minutes; ARGS="-m aot": more shapes)
	@$(KEEP) JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest -m "aot and not slow" tests/runtime/test_absent_engine.py $(ARGS)

coverage: $(STAMP).test ## branches that the tests of the host packages take; fails under 95 % of any package
	@$(BIN)/coverage erase
	@$(KEEP) $(BIN)/coverage run -m pytest --numprocesses 2 --dist loadfile $(HOST_TESTS) $(ARGS)
	@$(BIN)/python scripts/coverage_check.py

mutation: $(STAMP).test ## break the code in ways that tests must notice (some minutes): ARGS="bandit" for one part
	@$(BIN)/python scripts/mutation_check.py $(ARGS)

lint: $(STAMP).test ## formatting, lint rules, direction of imports
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --no-cache

type: $(STAMP).test ## static types of the package
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP).test ## format the code and fix what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench-host: $(STAMP).serve ## host time of one step, with an executor that costs nothing (about a minute)
	@$(BIN)/python -m benchmarks.engine.host_step $(ARGS)

bench-exactness: $(STAMP).serve ## same seed, same text: every policy, draft source and load, both modes (about 25 minutes)
	@$(BIN)/python -m benchmarks.engine.exactness $(ARGS)

bench-throughput: $(STAMP).test ## tokens per second of every policy, beside transformers (half an hour): ARGS="--out throughput.json"
	@$(BIN)/python -m benchmarks.engine.throughput $(ARGS)

bench-multi-slo: $(STAMP).test ## highest rates that keep every class's targets: this package, llama.cpp, vLLM (an hour and a half)
	@$(BIN)/python -m benchmarks.multi_slo.compare --out multi-slo $(ARGS)

dist: $(STAMP).test ## build wheel and source distribution, install each elsewhere and use it (some minutes)
	@rm -rf dist
	@$(PIP) 'build>=1.2,<2'
	@$(BIN)/python -m build --outdir dist .
	@for package in dist/*.whl dist/*.tar.gz; do $(BIN)/python scripts/check_dist.py $$package || exit 1; done

demo-pair: $(STAMP).test ## train the embedded pair again (an hour or more): ARGS="--gsm8k train.jsonl.gz --work folder"
	@$(BIN)/python scripts/demo_pair/train.py $(ARGS)

docs: $(STAMP).test ## write what documents have from the code and from benchmarks/results
	@$(BIN)/python -m scripts.readme_table
	@$(BIN)/python -m scripts.results_table
	@for file in bench-110m-cpu-page.html bench-110m-cpu.md; do \
		$(BIN)/adaserve report benchmarks/results/bench-110m-cpu -o docs/results/$$file \
		--title "Policies on a grown 110M target, on a CPU" || exit 1; done
	@$(BIN)/adaserve report benchmarks/results/multi-slo/*.json -o docs/results/multi-slo.md --title "Multi-SLO benchmark"
	@$(BIN)/python -m scripts.reference_docs
	@$(BIN)/python -m scripts.checks_table
	@$(BIN)/python -m scripts.policies_table
	@$(BIN)/python scripts/grafana_dashboard.py

site: $(STAMP).docs ## build the documentation as pages that open from a disk: site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)

clean: ## remove what was installed, built and cached here
	rm -rf $(VENV) $(CLIENTS_VENV) $(AOT_VENV) build dist site .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
