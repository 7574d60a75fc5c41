# crater-slurm: `make demo` shows it at work on a real local Slurm, `make test` proves it.

# The system's Python where it is new enough: a lab's users can't enter another user's home.
PYTHON := $(shell /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo /usr/bin/python3 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
MATRIX := 22.05 24.11 26.05
TORCH  := torch==2.13.0+cpu
FRAMEWORKS := safetensors lightning transformers accelerate

.PHONY: help demo test test-unit test-slurm test-databases test-matrix test-vm lint format bench \
	bench-placement bench-gpu-memory bench-checkpoint wheel setup setup-test clean

help:            ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: setup      ## A real Slurm takes, places, prepares, runs and explains a job
	packaging/demo.sh

test: lint test-unit test-slurm test-databases  ## Everything but the version matrix and the guest

test-unit: setup-test        ## Unit tests, no Slurm needed
	$(BIN)/pytest -n auto --dist worksteal tests/unit

test-slurm: setup-test       ## On the machine's own Slurm
	$(BIN)/pytest -n 2 --dist loadfile tests/slurm

test-databases: setup-test   ## The store on SQLite, PostgreSQL and MariaDB
	CRATER_TEST_DATABASES=required $(BIN)/pytest tests/databases

test-matrix: setup-test      ## tests/slurm on Slurm 22.05, 24.11 and 26.05
	for version in $(MATRIX); do \
		CRATER_TEST_SLURM=$$version $(BIN)/pytest tests/slurm || exit 1; done

test-vm: setup-test          ## Real NUMA nodes and cgroup v2 in a QEMU guest, on 24.11 and 26.05
	packaging/install-packages.sh vm
	CRATER_VM_REQUIRE=1 $(BIN)/pytest tests/vm

lint: setup-test             ## ruff, mypy --strict, luacheck, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	luacheck --quiet job_submit etc/filter.lua
	shellcheck prolog/*.sh packaging/*.sh .ci/run

format: setup-test           ## Format the Python code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup-test            ## Figures side by side; copy them into bench/RESULTS.md
	$(BIN)/python -m bench

bench-placement: setup-test  ## Published policies and crater's on published traces, 15 minutes
	$(BIN)/python -m bench placement

bench-gpu-memory: setup-test ## Predicted against measured peaks (ROWS=file.csv), models left out: 5 minutes
	$(BIN)/python bench/gpu_memory.py $(ROWS) --cross-validate

bench-checkpoint: setup-test ## Stall and drain of checkpoints beside memcpy, fio, torch.save and DCP
	$(BIN)/python bench/checkpoint.py

wheel: setup-test            ## Build dist/*.whl
	$(BIN)/python -m build --wheel

setup: $(BIN)/.installed
	packaging/install-packages.sh demo

setup-test: $(BIN)/.installed-dev
	packaging/install-packages.sh demo test

$(BIN)/.installed: pyproject.toml packaging/install-packages.sh
	packaging/install-packages.sh python
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(BIN)/.installed-dev: $(BIN)/.installed
	$(BIN)/pip install --quiet --editable '.[dev,postgres,mysql]'
	@# "+cpu" names that build alone, so never gigabytes of CUDA; without it those tests are skipped.
	$(BIN)/pip install --quiet --only-binary :all: '$(TORCH)' 2>/dev/null \
		|| echo "pip finds no $(TORCH) here: tests with torch will be skipped"
	$(BIN)/python -c 'import torch' 2>/dev/null && $(BIN)/pip install --quiet --only-binary :all: \
		'$(TORCH)' $(FRAMEWORKS) 2>/dev/null || echo "tests of torch's frameworks will be skipped"
	touch $@

clean:           ## Remove what was built here; caches of labs and guests: crater lab clean
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
