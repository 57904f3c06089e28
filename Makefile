PYTHON ?= python3
BIN := .venv/bin
# For the tested set, with hashes: make setup REQUIREMENTS="--require-hashes -r requirements.lock"
REQUIREMENTS ?= -r requirements.txt

.PHONY: train same test test-all lint bench setup
.DELETE_ON_ERROR:

train: setup
	@test -f tokens/python/dataset.json || $(BIN)/python prepare_data.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node=$${NPROC:-$$($(BIN)/python -m lockstep.hardware.device)} train.py
	$(BIN)/python sample.py runs/laptop --prompt="def __init__(self" --max_new_tokens=200

# Does a run have the same bits on this machine as on every other? About a minute.
same: setup
	$(BIN)/python bench/same.py

test: .venv/dev
	$(BIN)/python -E -m pytest -m "not slow"

# Including the tests that take minutes: many strategies and ranks, small benchmarks.
test-all: .venv/dev
	$(BIN)/python -E -m pytest

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Five benchmarks behind the README's promises. More than an hour on two idle cores.
bench: setup
	@test -f tokens/python/dataset.json || $(BIN)/python prepare_data.py
	for script in same_run.py "drill.py resume" "drill.py kills" "grad_sync.py cost" "grad_sync.py overlap"; do \
		$(BIN)/python bench/$$script || exit 1; done

setup: .venv/ready

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed; try make PYTHON=python3.11")'
	$(PYTHON) -c 'import importlib.util, sys; importlib.util.find_spec("ensurepip") or sys.exit("error: this Python cannot create environments; on Debian, Ubuntu and Colab, run: apt install python3-venv")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(REQUIREMENTS)
	@touch $@

EXTRAS := $(wildcard extras/requirements.txt)

.venv/dev: .venv/ready requirements-dev.txt $(EXTRAS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt $(EXTRAS:%=-r %)
	@touch $@
