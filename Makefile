# slime: the two commands of the README are `make quickstart` and `make test`.
# `make install` builds .venv with everything both need; it runs by itself.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Each test file runs in one of three processes. They often wait, for an engine, Ray or a deadline, so that three keep two
# cores busy.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(RERUNS)
# Twice quiet: errors only. Warnings, for example of a retried download, look like failures of an install that succeeds.
PIP := $(BIN)/pip install --quiet --quiet --disable-pip-version-check $(PIP_FLAGS)
# cpu or cuda: which packages. What .venv holds already; else cuda where there is an NVIDIA driver. (A variable of the
# environment with this name is somebody else's.)
DEVICE := $(or $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*)),$(if $(shell command -v nvidia-smi),cuda,cpu))
ENGINES := requirements/$(if $(filter cuda,$(DEVICE)),gpu,cpu).txt
TOOLS := requirements/dev.txt requirements/docs.txt

# Tests start hundreds of processes; without Python's cache each of them compiles slime and Megatron-core anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install lock-gpu quickstart quick test nightly faults chaos kill-points soak docs lint types check mutants gpu-bundle gpu-proof clean

install: $(VENV)/.installed-$(DEVICE)

$(VENV)/.installed-$(DEVICE): $(ENGINES) $(TOOLS) pyproject.toml
	@if [ -n "$(filter-out $@,$(wildcard $(VENV)/.installed-*))" ]; then echo "$(VENV) holds the packages for another device: make clean, then make install DEVICE=$(DEVICE)" >&2; exit 1; fi
	@[ -d $(VENV)/lib ] || $(PYTHON) -m scripts.install_checks $(DEVICE)
	@echo "installing into $(VENV): $(if $(filter cuda,$(DEVICE)),about 12 GB with CUDA and its kernels,about 2 GB in one to six minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-deps -r $(ENGINES)
	@$(PIP) --no-deps $(addprefix -r ,$(TOOLS))
	@[ $(DEVICE) = cuda ] || $(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo "torch came as a CUDA build without its libraries: installing those too (several gigabytes; a CPU build in a pip index avoids it)"; \
	  $(PIP) "$$(grep '^torch==' requirements/cpu.txt)"; }
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "installed: source $(VENV)/bin/activate puts the command slime on the path"

# Resolves requirements/gpu.txt anew, with uv. Versions are those that the tests run with, except of the packages that
# SGLang's metadata pins otherwise.
lock-gpu:
	grep -hvE '^(torch|numpy|python-dateutil)==' requirements/cpu.txt requirements/dev.txt > $(VENV)/constraints.txt
	uv pip compile --quiet --universal --python-version 3.11 --extra gpu --generate-hashes --no-annotate --custom-compile-command "make lock-gpu" \
	  --constraint $(VENV)/constraints.txt --output-file requirements/gpu.txt pyproject.toml

quickstart: install
	$(BIN)/python examples/quickstart/run.py

# What to run before every commit: style, types and the tests that take no second and start no engine (three minutes).
quick: lint types
	$(PYTEST) -m "not slow and not nightly and not engine" tests plugins

# The tests that take seconds at most, with real engines (within ten minutes). `make test SLOW=1` is what CI runs: all of
# them. The last files are short, so that no process ends long after the others.
test: install
	$(PYTEST) -m "not nightly$(if $(SLOW),, and not slow)" tests plugins

# What is too long for every push: examples, tutorials, installs, fuzzing, browsers, and the proofs below, one after the
# other; when each part last passed is written to proofs/last_passed.toml. NIGHTLY="tests soak" chooses parts.
nightly: install
	$(BIN)/python -m proofs.nightly $(NIGHTLY)

# Kills, stops and breaks every part of small real runs on a loaded machine; writes the table of docs/reliability.md (three quarters of an hour).
faults: install
	$(BIN)/python -m proofs.faults --loaded --write

# Kills all processes of 20 small real runs at random moments and continues them; writes the table of docs/reproducibility.md (half an hour).
kill-points: install
	$(BIN)/python -m proofs.kill_points --write

# 5,000 steps of a tiny run: does anything in it grow after its warm-up? (A quarter of an hour.)
soak: install
	$(BIN)/python -m proofs.soak

# A hundred faults in one run, which must end as the run without them; writes the other table of docs/reliability.md (a quarter of an hour).
# CHAOS="--seed 2 --count 200" chooses others.
chaos: install
	$(BIN)/python -m proofs.chaos --write $(CHAOS)

# The documentation as a site, into site/: open site/index.html. Links and anchors that lead nowhere are errors (a quarter of a minute).
docs: install
	$(BIN)/python -m scripts.docs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

check: lint types
	$(MAKE) test SLOW=1

# Which single-line changes does no test notice? MUTANTS="--area losses --count 30 --seed 2" chooses; see CONTRIBUTING.md.
mutants: install
	nice $(BIN)/python -m proofs.mutants $(MUTANTS)

# What only a GPU can show, at most ten minutes, without a network: the table of outputs/gpu_proof.md and a card of each part. It installs nothing
# here. Packages are those of .venv, or else of $(PYTHON), and before them the wheels in the folder WHEELS, or in the pieces in the folder BUNDLE,
# which make gpu-bundle wrote. GPU_PROOF="--only training --peak-tflops 989" passes options on.
gpu-proof:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_proof $(if $(WHEELS),--wheels "$(WHEELS)") \
	  $(if $(BUNDLE),--bundle "$(BUNDLE)") $(GPU_PROOF)

# For a GPU machine without a network: wheels and source in pieces of at most 60 MB, in the folder BUNDLE.
# GPU_BUNDLE="--python 3.12 --glibc 2.35 --has packages.json" says what that machine has.
gpu-bundle: install
	$(BIN)/python -m benchmarks.gpu_proof.bundle "$(or $(BUNDLE),outputs/gpu_bundle)" $(GPU_BUNDLE)

clean:
	rm -rf $(VENV) outputs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
