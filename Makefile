# Everything here works from a bare clone on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
PORT ?= 5005
N ?= 1
SECONDS ?= 60
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is kept: hundreds of processes of the tests import this package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $$(($$(nproc) + 2)) --dist loadgroup --max-worker-restart 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help serve demo demo-redis test test-integrations test-long test-all test-alone test-pythons faults walk lint docs release-check yardstick bench-check clean

help:
	@echo "make serve         serve the shipped model on port $(PORT), with a page to look at"
	@echo "make demo          start the Flask service with the shipped model on port $(PORT)"
	@echo "make demo-redis    the same with Redis between gunicorn's processes and the model's"
	@echo "make test          run the test suite, in four and a half minutes on two cores"
	@echo "make test-integrations  run the tests that need a foreign program or a cluster (Ray, uWSGI, chromium)"
	@echo "make test-all      run it with the long tests: chaos, fuzzing, training"
	@echo "make test-alone    run each test file in a process of its own"
	@echo "make test-pythons  run the tests of the core with Python 3.12 to 3.14, as far as they are here"
	@echo "make faults        run the fault suite alone, N=10 times in a row"
	@echo "make walk          look for lost calls by random walks, SECONDS=60 from a fresh SEED"
	@echo "make lint          check types and style"
	@echo "make docs          build the documentation site into site/, and check its links"
	@echo "make release-check build wheel and sdist into dist/, install them elsewhere, and try them"
	@echo "make yardstick     measure this beside the others of its field, in an hour (ARGS=--quick: minutes)"
	@echo "make bench-check   measure a little, and compare with what is stored"
	@echo "make clean         remove what the above made"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras, so that nothing is installed twice or without need.
$(VENV)/.installed-%: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what '$*' needs into $(VENV) ..."
	@$(PIP) -e '.[$*]'
	@touch $@

serve: $(VENV)/.installed-serve
	@$(BIN)/service-streamer serve --port $(PORT) $(ARGS)

demo: $(VENV)/.installed-example
	@$(BIN)/python example/flask_example.py --streamer --port $(PORT)

demo-redis: $(VENV)/.installed-example
	@$(BIN)/python scripts/demo_redis.py --port $(PORT)

# Two processes more than there are cores: tests wait a lot.
test: $(VENV)/.installed-test
	$(PYTEST) -m "not long" --ignore=tests/integrations $(ARGS)

test-integrations: $(VENV)/.installed-integrations
	$(PYTEST) -m "not long" tests/integrations $(ARGS)

test-long: $(VENV)/.installed-integrations
	$(PYTEST) -m long $(ARGS)

test-all: $(VENV)/.installed-integrations
	$(PYTEST) $(ARGS)

test-alone: $(VENV)/.installed-integrations
	@failed=; for file in $$(git ls-files 'tests/test_*.py' 'tests/**/test_*.py'); do \
		echo "$$file"; \
		$(BIN)/python -m pytest -q --no-header $(ARGS) "$$file" || failed="$$failed $$file"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

test-pythons:
	scripts/other_pythons.sh

faults: $(VENV)/.installed-test
	@for i in $$(seq $(N)); do \
		echo "fault suite, run $$i of $(N)"; \
		$(PYTEST) -q tests/faults $(ARGS) || exit 1; \
	done

walk: $(VENV)/.installed-test
	@PYTHONPATH=tests $(BIN)/python -m walk --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: $(VENV)/.installed-integrations $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.14 service_streamer

# Without --quiet, which hides warnings from --strict as well.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Into dist/, from which a release is uploaded.
release-check: $(VENV)/.installed-release
	$(BIN)/python scripts/release_check.py $(ARGS)

yardstick: $(VENV)/.installed-bench
	@PYTHONPATH=benchmarks $(BIN)/python -m yardstick $(ARGS)

bench-check: $(VENV)/.installed-bench
	@PYTHONPATH=benchmarks $(BIN)/python -m yardstick check $(ARGS)

clean:
	rm -rf site $(VENV) .venv-3.* .rivals .yardstick .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
