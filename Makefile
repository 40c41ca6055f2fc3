# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# the pinned torch has a CPU build on the index that pip is set up with; nothing else pulls another torch
export PIP_CONSTRAINT := constraints.txt
# tests start many processes: each reads the bytecode that the first one wrote
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-triton test-transformers test-ray test-aarch64 test-amx test-gpu wheel mutants fuzz fuzz-readers faults sanitize lint types format bench bench-peers bench-fidelity bench-recall bench-verdicts bench-long bench-gpu results clean install

help:  ## what can be made
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP)  ## the environment in .venv

$(STAMP): pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV) (once; about a minute) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	@touch $@

demo: $(STAMP)  ## compare five operators on two tasks with embedded data, 4 to 9 minutes on 2 cores, by processor
	@$(BIN)/zonal demo

test: $(STAMP)  ## the fast tier of the tests, 5 to 12 minutes on 2 cores, by processor: what every change must pass
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not full and not wheel"

test-all: $(STAMP)  ## all tests: every product of operators, inputs, types and paths
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

test-triton: $(STAMP)  ## all tests of the Triton kernels: in the interpreter, and compiled ahead of time
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q tests/kernels/test_triton*.py

wheel: $(STAMP)  ## a wheel with the compiled CPU kernels in dist, and the slow tests of what is in it
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@if ls dist/*-any.whl >/dev/null 2>&1; then echo "dist holds a wheel without compiled kernels: python -m pip wheel -v --no-deps . says why"; fi
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m wheel tests/kernels/test_wheel.py

test-gpu: $(STAMP)  ## what runs on a CUDA device: kernels, attention, models, calibration (compiling takes some minutes of all cores)
	@$(BIN)/python -c "import torch, sys; torch.cuda.is_available() or sys.exit('make test-gpu needs a CUDA device and a CUDA build of torch; this is torch ' + torch.__version__)"
	@$(BIN)/python -m pytest tests/kernels tests/execution tests/models tests/test_benchmarks.py -m gpu -q

test-transformers: $(STAMP)  ## the generic tests of transformers on the models of zonal.hf; FOLDER=a checkout of its installed version
	@$(BIN)/python -c "import parameterized" || { echo "make test-transformers: pip install parameterized first"; exit 1; }
	@PYTHONPATH="$(FOLDER):$(CURDIR)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rfs --rootdir "$(FOLDER)" -c "$(FOLDER)/pyproject.toml" tools/transformers_mixins.py

mutants: $(STAMP)  ## seeded faults, one at a time, each of which the tests must see (about half an hour of one core)
	@$(BIN)/python tests/mutants/run.py --out results/mutants.json

fuzz: $(STAMP)  ## random hostile input to calls, memories, texts and readers: more than 100,000 cases (half an hour of one core or more)
	@PYTHONPATH=tests $(BIN)/python -m fuzz.run --out results/fuzz.json

fuzz-readers: $(STAMP)  ## texts and files that atheris makes, guided by the lines they reach (a minute or two a reader); installs atheris first
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[fuzz]" -c constraints.txt
	@PYTHONPATH=tests $(BIN)/python -m fuzz.guided

faults: $(STAMP)  ## kills, full disks, damaged files, dead workers, little memory, lost ranks (about 20 minutes of one core)
	@PYTHONPATH=tests:. $(BIN)/python -m faults.run --out results/faults/faults.json

sanitize: $(STAMP)  ## the compiled CPU kernels under the address and undefined-behaviour sanitizers of g++
	@$(BIN)/python tests/kernels/sanitize.py

test-ray: $(STAMP)  ## work on two nodes of a Ray cluster on this machine, one of which is lost; installs Ray first
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[ray]" -c constraints.txt
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/training/test_ray.py

test-aarch64: $(STAMP)  ## the compiled CPU kernels for another kind of processor, under qemu (some minutes of one core)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/kernels/emulated.py

test-amx: $(STAMP)  ## the tile kernel of AMX under an emulator of such a processor; EMULATOR="sde64 -spr --" or another
	@OMP_NUM_THREADS=1 $(BIN)/python tests/kernels/emulated.py --isa amx --cxx g++ --emulator '$(EMULATOR)'

lint: $(STAMP)  ## ruff and pyright
	@$(BIN)/ruff check zonal tests benchmarks examples
	@$(BIN)/pyright

format: $(STAMP)  ## ruff mends and formats
	@$(BIN)/ruff check --fix zonal tests benchmarks examples
	@$(BIN)/ruff format zonal tests benchmarks examples

bench: $(STAMP)  ## benchmarks on this machine, JSON in its folder of results/benchmarks (about 25 minutes, run alone)
	@$(BIN)/python -m benchmarks.recurrence
	@$(BIN)/python -m benchmarks.tiled
	@$(BIN)/python -m benchmarks.rewa
	@$(BIN)/python -m benchmarks.linear
	@$(BIN)/python -m benchmarks.koopman
	@$(BIN)/python -m benchmarks.relatives --threads 1
	@$(BIN)/python -m benchmarks.sparse --threads 2
	@$(BIN)/python -m benchmarks.transport --threads 1
	@$(BIN)/python -m benchmarks.local_global --threads 1
	@$(BIN)/python -m benchmarks.training_step
	@$(BIN)/python -m benchmarks.decoding --threads 1
	@$(BIN)/python -m benchmarks.planner
	@$(BIN)/python -m benchmarks.machines results/benchmarks

bench-peers: $(STAMP)  ## linear attention and Mamba-2 of other libraries, installed first (about 8 minutes, run alone)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[bench]" -c constraints.txt
	@$(BIN)/python -m benchmarks.linear_peers
	@$(BIN)/python -m benchmarks.backbones

bench-fidelity: $(STAMP)  ## how near feature maps come to their kernel, and the picture of docs/slay_maps.md (about 15 minutes of one core; goes on where it stopped)
	@$(BIN)/python -m benchmarks.fidelity --threads 1 --resume --out results/benchmarks/fidelity.json --picture docs/fidelity.svg

bench-recall: $(STAMP)  ## what SKA remembers by K and r, for how long and at what cost (about 8 minutes)
	@$(BIN)/python -m benchmarks.recall --threads 1 --out results/benchmarks/recall.json

bench-verdicts: $(STAMP)  ## what memories know of what they do not know (about 2 minutes)
	@$(BIN)/python -m benchmarks.verdicts --threads 1 --out results/benchmarks/verdicts.json

bench-long: $(STAMP)  ## two small models trained on 512 tokens and read on 32k: a window, local + global, hashed keys (about 30 minutes)
	@for operator in softmax rewa; do $(BIN)/zonal train --task text --operator $$operator --length 512 --layers 2 --dim 128 --heads 4 --conv 4 --batch-size 16 --steps 500 --out runs/long-$$operator || exit 1; done
	@$(BIN)/python -m benchmarks.long_context --threads 1 --model runs/long-softmax --model runs/long-rewa --out results/benchmarks/long_context.json

bench-gpu: $(STAMP)  ## the Triton kernels against FlashAttention on a CUDA device (about 10 minutes)
	@$(BIN)/python -m benchmarks.gpu

results: $(STAMP)  ## the HTML pages of results/, from the records kept there
	@$(BIN)/zonal report $(patsubst %/,%,$(dir $(wildcard results/*/runs.tar.xz)))
	@$(BIN)/python -m benchmarks.pages results/benchmarks
	@$(BIN)/python -m benchmarks.machines results/benchmarks

clean:  ## remove the environment and what was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
