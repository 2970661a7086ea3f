# The two commands that do everything: `make demo` and `make test`.
# They need Python 3.11 or newer (python3, or PYTHON=...), pip, make and a C compiler; the rest goes into .venv.
# CUDA=12 takes the packages for a driver that knows CUDA 12 only; 13 is the default, also without a GPU.

PYTHON ?= python3
CUDA ?= 13
# The cuDNN packages for CUDA 12 and 13 overwrite each other's files: each gets an environment of its own.
VENV := .venv$(if $(filter 12,$(CUDA)),-cu12)
BIN := $(VENV)/bin
# Compile the 14,000 modules of the packages in all processes; pip would use one. Templates in packages do not compile.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# Store bytecode even if the shell forbids it, because each process of the tests would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
# Scripts that run without arguments, on any machine and in seconds; `make demo` runs the demo.
EXAMPLES := $(filter-out examples/demo.py examples/models.py,$(wildcard examples/*.py))

.PHONY: demo test test-all slow lint check fuzz examples training newest torch docs format dist clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# pyright keeps one core busy: the examples run on the other.
test: $(VENV)/.test
	$(MAKE) --no-print-directory --jobs 2 --output-sync=recurse lint examples docs
	$(MAKE) --no-print-directory check
	$(MAKE) --no-print-directory fuzz
	$(MAKE) --no-print-directory demo

# What CI runs: the same, then the tests that take longer, and those that depend on cuDNN's version with its newest.
test-all: test
	$(MAKE) --no-print-directory slow
	$(MAKE) --no-print-directory newest

# Tests that `make test` leaves out. onnx's own test suite is one of them: all of it, compiled and run in simulation.
slow: $(VENV)/.test
	OMP_NUM_THREADS=1 FUSEC_REQUIRE_CUDNN=1 $(BIN)/python -m pytest -n 2 -m "slow and not gpu"

# Every check that reads the code without running it.
lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

# If cuDNN is missing, tests that need it fail here; a bare `pytest` skips them. Each process computes on one core.
check: $(VENV)/.test
	OMP_NUM_THREADS=1 FUSEC_REQUIRE_CUDNN=1 $(BIN)/python -m pytest -n 2

# Check every property that needs no GPU on the same random graphs each time; failures are saved in fusec-findings. Of
# the planted faults (docs/mutants.md), 102 of 109 are found within 700 graphs; `.ci/run` has time for 2,000.
FUZZ_EXAMPLES ?= 700
FUZZ_TIME ?= 90s
fuzz: $(VENV)/.test
	$(BIN)/python -m fusec fuzz --examples $(FUZZ_EXAMPLES) --time $(FUZZ_TIME) --fresh

examples: $(VENV)/.test
	@set -e; for script in $(EXAMPLES); do echo "python $$script"; $(BIN)/python $$script; done

# The toy framework's whole training runs: a CNN to 98.5%, a vision transformer to 97%.
training: $(VENV)/.test
	$(BIN)/python -m examples.toy_framework.train_digits cnn
	$(BIN)/python -m examples.toy_framework.train_digits vit

# Run the tests that depend on cuDNN's version again with its newest release: engines, refusals, plans that are built,
# serialized and transferred to other sizes, and what fuses. Tests of how fusec uses these answers are left out.
NEWEST := tests/gpu/cudnn tests/gpu/models tests/gpu/shape_transfer tests/gpu/test_doctor.py tests/passes/partition \
  tests/diagnostics/explain tests/test_driver.py \
  $(addprefix tests/test_light_models.py::test_,what_fuses_in_resnet50 every_step_is_verified)
newest: .venv-newest/.test
	FUSEC_REQUIRE_CUDNN=1 .venv-newest/bin/python -m pytest -n 2 -m cudnn --ignore-glob '*_on_stand_in.py' $(NEWEST)

.venv-newest/.test: $(VENV)/.python pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-newest
	grep -v '^nvidia-cudnn-cu' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  --constraint .venv-newest/constraints.txt --upgrade --editable '.[cu$(CUDA),test]' nvidia-cudnn-cu$(CUDA)
	.venv-newest/bin/python -m compileall -qq -j 0 .venv-newest/lib || true
	@touch $@

# Test torch_backend in an environment of its own, because torch is a large download and brings its own cuDNN.
# TORCH_PIP: more arguments for pip, such as an index of wheels without CUDA.
torch: .venv-torch/.test
	.venv-torch/bin/python -m pytest tests/torch_backend

.venv-torch/.test: $(VENV)/.python pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch
	grep -v '^nvidia-' constraints.txt > .venv-torch/constraints.txt
	.venv-torch/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint .venv-torch/constraints.txt --editable '.[cu$(CUDA),test,torch]' $(TORCH_PIP)
	@touch $@

# The documentation as a site, in build/site/index.html. A link or reference that leads nowhere is an error.
docs: $(VENV)/.test
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky -c docs/site . build/site

# The wheel and the source archive of a release: checked, installed in an environment of their own, and run there.
dist: .venv-dist/.tools
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear .venv-dist/clean
	.venv-dist/clean/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt dist/*.whl
	cd .venv-dist && clean/bin/fusec --version && clean/bin/fusec targets
	cd .venv-dist && clean/bin/python -c "$$RUN_A_MODEL"

define RUN_A_MODEL
import fusec, numpy
from fusec.text import parse
model = fusec.compile(parse('graph "g" (%x: f32[2,3]) { %y = relu(%x) return %y }'), target="cpu")
assert (model(numpy.full((2, 3), -1, "f")) == 0).all()
endef
export RUN_A_MODEL

.venv-dist/.tools: $(VENV)/.python
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip --disable-pip-version-check install --quiet build twine
	@touch $@

format: $(VENV)/.test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fusec needs Python 3.11 or newer; choose one with: make PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# These files say that packages are installed. After a change of pyproject.toml or constraints.txt, make installs again.
$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cu$(CUDA),demo]'
	$(COMPILE)
	@touch $@

$(VENV)/.test: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cu$(CUDA),test]'
	$(COMPILE)
	@touch $@ $(VENV)/.demo

clean:
	rm -rf .venv .venv-cu12 .venv-dist .venv-newest .venv-torch build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find fusec tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
