# `make demo` and `make test` set up a virtual environment in .venv by themselves; PYTHON chooses the interpreter, VENV another place.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := demo
GNMT := gnmt.v100-published.float32 --topology v100-pcie --schedule gpipe --global-batch 2048
SMALL := gpt2-small.cpu.float32 --topology v100-pcie
KERNELS := $(VENV)/kernels.log
# every worker of the suite would compile all of its files again, 9 s of each
unexport PYTHONDONTWRITEBYTECODE
# one worker more than there are cores: of some tests the processes wait
WORKERS ?= $(shell expr `nproc` + 1)
TRAINERS := .venv-exporters
TRAINERS_PIP := $(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-exporters.txt

.PHONY: demo test rehearse-gpu test-exporters docs kernels lint format clean

demo: kernels
	@mkdir -p $(DEMO)
	@echo '--- 1. measure the layers of a GPT on this machine'
	$(BIN)/partopt profile examples/gpt.py --microbatch 1,2 -o $(DEMO)/gpt.json --force
	@echo; echo '--- 2. plan a model that was measured on V100s for 16 of them'
	$(BIN)/partopt plan $(GNMT) -o $(DEMO)/plan.json --force
	@echo; echo '--- 3. all of it on one page: open $(DEMO)/report.html'
	$(BIN)/partopt report $(DEMO)/plan.json -o $(DEMO)/report.html --force
	@echo; echo 'Next: profile your own model ("Your model" in README.md), describe your own cluster ($(BIN)/partopt topology show v100-pcie --yaml).'

test: kernels
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What a GPU would do, played on processors: a device on paper, and NCCL's rules.
rehearse-gpu: kernels
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/gpu tests/cli/test_doctor.py

# Each trainer's own code reads what partopt exports for it, in an environment of their own.
test-exporters: $(TRAINERS)/.installed
	$(TRAINERS)/bin/python -m pytest -n 2 --dist loadfile -rs tests/trainers

# The site is in site/, and loads nothing from a network.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The cache of numba is not made for several writers: what the tests share is compiled before them.
kernels: $(INSTALLED)
	@$(BIN)/partopt compare $(SMALL) --memory 2.5GB > $(KERNELS) 2>&1 || cat $(KERNELS)
	@$(BIN)/partopt plan $(SMALL) --memory 2.5GB --recompute auto --schedule 1f1b --microbatches 8 > $(KERNELS) 2>&1 || cat $(KERNELS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned: an open range could bring a newer build with gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@touch $(INSTALLED)

$(VENV)/.installed-docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Of the last four only a few files are run; what they depend on is of another time, or for GPUs.
$(TRAINERS)/.installed: pyproject.toml constraints.txt constraints-exporters.txt
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS_PIP) torch==2.13.0
	DS_BUILD_OPS=0 $(TRAINERS_PIP) -e '.[dev,exporters]'
	$(TRAINERS_PIP) --no-deps colossalai megatron-bridge sglang vllm
	@touch $(TRAINERS)/.installed

clean:
	rm -rf $(VENV) $(TRAINERS) $(DEMO) site .hypothesis .mypy_cache .pytest_cache .ruff_cache
