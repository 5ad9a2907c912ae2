# Everything a newcomer types. Needs python3 (3.11 or newer) and make; the rest is installed into .venv.

VENV := .venv
ROOMS := common gateway scheduler prefill decode attention services
SOURCES := $(ROOMS) deploy tests bench

export HF_HUB_OFFLINE := 1
# Packages come without bytecode, which the first run keeps: a shell that forbids it pays at every start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup serve test test-compose lint format docs clean

help:
	@echo "make serve    set up and run the mesh until Ctrl-C (UP='--prefill 2 --decode 2' adds options)"
	@echo "make test     set up and pass the tests (TESTS=tests/common picks some)"
	@echo "make test-compose   build the image, bring the stack up with this machine's container engine, test it"
	@echo "make lint     style, types and import floors"
	@echo "make format   apply the style"
	@echo "make docs     write docs/configuration.md anew"
	@echo "make setup    create or update .venv only"
	@echo "make clean    remove .venv and caches"

setup:
	@deploy/setup.sh $(VENV)

serve: setup
	exec $(VENV)/bin/lamella up $(UP)

# Of two workers one takes the tests whose meshes need the machine (tests/two_workers.py).
test: setup
	$(VENV)/bin/python -m pytest --numprocesses 2 --no-loadscope-reorder $(TESTS)

test-compose: setup
	LAMELLA_COMPOSE=1 $(VENV)/bin/python -m pytest tests/compose

lint: setup
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy $(SOURCES)
	$(VENV)/bin/lint-imports

format: setup
	$(VENV)/bin/ruff check --fix $(SOURCES)
	$(VENV)/bin/ruff format $(SOURCES)

docs: setup
	$(VENV)/bin/lamella settings >docs/configuration.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
