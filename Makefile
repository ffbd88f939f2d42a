# One command each: `make up` runs the product (PORT=, WORKERS=, RUNNER=, MODEL= are passed on), `make test` runs every
# test, `make chaos` ten minutes of faults (MINUTES=), `make check` is format, lint and types.
PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
TORCH   := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements.lock)
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet

MINUTES ?= 10
JOBS    ?= 2

.PHONY: up test test-unit test-compose chaos check format lock clean

up: $(VENV)/.installed
	$(BIN)/prefixcache up $(if $(PORT),--port $(PORT)) $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(RUNNER),--runner $(RUNNER)) $(if $(MODEL),--model $(MODEL))

# A file at a time in each of JOBS processes; then, alone, the tests that measure time or take every core.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests -m "not alone" -n $(JOBS) --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest tests -m alone

test-unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/unit

# docker-compose.yml for real: every part dies under load, a table, .bench/compose.json. Skipped where no engine answers.
test-compose: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -rs tests/compose

# Proxies, simulated workers and a Valkey under random faults and clients: every response is accounted for.
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos --minutes $(MINUTES)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-%: $(VENV)/.installed-dev
	$(BIN)/python -m tests.bench.$*

# torch comes first and apart: PIP_TORCH_ARGS can name another source for it, for example that of the CPU-only builds.
$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make up PYTHON=python3.11" % v[:2])'
	@echo "setting up $(VENV) (once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_TORCH_ARGS) $(TORCH)
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	$(PIP) -r requirements-dev.lock
	@touch $@

# Pins what pip resolves today for pyproject.toml: read the difference before you commit it.
lock:
	$(PYTHON) tests/support/make_locks.py --torch $(or $(TORCH),torch)

clean:
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
