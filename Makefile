# Two commands on a fresh machine:   make picture PROMPT="a red apple"      make test

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= a red apple
OUT ?=

# Windows' own Python keeps the programs of an environment in Scripts.
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
# What pip does goes beside what the commands print; its lines show that a first install lives.
PIP := >&2 $(BIN)/python -m pip --disable-pip-version-check

# Taken as typed: a dollar sign or a quote in them reaches the program unchanged.
TYPED := PROMPT OUT MODEL VRAM SIZE SEED STEPS
$(foreach name,$(TYPED),$(eval override $(name) := $$(value $(name))))
export $(TYPED)
# Where it is set, each process of the tests compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

OPTIONS = $(if $(VRAM),--vram "$$VRAM") $(if $(MODEL),$(if $(SIZE),--width "$$SIZE" --height "$$SIZE")) \
	$(if $(SEED),--seed "$$SEED") $(if $(STEPS),--steps "$$STEPS") \
	$(if $(MODEL),--model "$$MODEL") $(if $(OUT),--output "$$OUT")

.PHONY: help picture install test test-rooms test-all test-hosts test-others test-simulated-gpu test-oldest fuzz faults tables planted lint format docs dist gpu gpu-pack clean
.DELETE_ON_ERROR:

help:
	@echo 'make picture PROMPT="a red apple"   install into $(VENV) if need be, and make a picture'
	@echo '             [VRAM=4GB] [SEED=1] [STEPS=30] [OUT=file.png] [MODEL=path [SIZE=512]]'
	@echo 'make test                           lint, types and tests of the core'
	@echo 'make test-all                       those of measurements, smaller UNets and batches too, and rare ones that take long'
	@echo 'make test-instruction-sets          what depends on kernels of processors, with those of other ones'
	@echo 'make plans [PLANS=write]            compare the plans of full-size models with those of before, or store them'
	@echo 'make wording                        store the sentences of errors, help and reports, after one has changed'
	@echo 'make test-hosts                     in a real ComfyUI (COMFYUI_DIR=) and WebUI (WEBUI_DIR=)'
	@echo 'make test-others                    diffusers own tests with our hooks attached (DIFFUSERS_DIR=)'
	@echo 'make test-simulated-gpu             what runs on a CUDA card, on a simulated one: into the cache folder if need be, 5 GB'
	@echo 'make test-oldest                    a small suite on the oldest versions: into $(OLDEST_VENV) if need be, 5 GB'
	@echo 'make fuzz                           ten thousand hostile inputs, as many GGUF headers and caches; the worst memory'
	@echo 'make faults                         runs that are disturbed everywhere, in every way: benchmarks/faults.md'
	@echo 'make tables [TABLE="cards plans"]   make the computed tables of benchmarks/ anew, within an hour; resumes'
	@echo 'make planted [FAULTS="cache nodes"] small faults in our code, one at a time: each is seen by its tests'
	@echo 'make lint | make format             ruff, mypy and import-linter | let ruff rewrite the files'
	@echo 'make docs                           the book of docs/, into build/book; no broken link'
	@echo 'make dist                           wheel and sdist, into dist/'
	@echo 'make gpu [PART=peaks]               tests and measurements on an NVIDIA GPU, into $(GPU_OUT)'
	@echo '             [GPU_OUT=folder] [GPU_PYTHON=python3] with an environment that is there already, as docs/gpu.md says'
	@echo 'make gpu-pack [GPU_VERSION=3.12]    the tree and what that one needs beside torch, as one file: $(GPU_PACK).tar.gz'
	@echo '             [GPU_HAS="transformers"] what it has already'
	@echo 'make clean                          remove the environment and everything built'
	@echo 'PYTHON=python3.12 chooses the Python (3.10 or newer)'

picture: $(VENV)/.standalone
	@$(BIN)/python -m sd_lowvram generate "$$PROMPT" $(OPTIONS)
	@$(if $(SIZE),$(if $(MODEL),:,echo 'the demo model draws 128x128, the size that it knows: SIZE counts with MODEL' >&2))
	@echo 'more: $(BIN)/sd-lowvram generate --help' >&2

install: $(VENV)/.standalone

# In two processes, which is what most of the tests, Python's own work, can use. Rare and slow ones are left to test-all.
WHICH = -m "not rare"
PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(WHICH)
ROOMS := $(wildcard tests/benchmarks tests/unets tests/batches tests/approximate)
test: lint test-core

.PHONY: test-core
test-core: $(VENV)/.gradio
	$(PYTEST) $(ROOMS:%=--ignore=%)

# Of measurements, smaller UNets, batches and approximate settings, which the package runs without.
test-rooms: $(VENV)/.gradio
	$(PYTEST) $(ROOMS)

test-all: WHICH =
test-all: lint test-core test-rooms

# What depends on the kernel that oneDNN or torch picks, with those of other processors: of each instruction set that this one has.
BY_KERNEL = tests/tracing/test_convolutions.py \
	tests/models/test_causal_autoencoders.py::test_in_bfloat16_the_bits_are_the_plain_ones \
	tests/models/test_causal_autoencoders.py::test_maps_that_onednn_takes_whole_have_the_plain_bits_by_strips \
	tests/models/test_todays.py::test_a_lora_acts_whether_it_is_loaded_before_or_after_the_plan
.PHONY: test-instruction-sets
test-instruction-sets: $(VENV)/.test
	worst=0; for least in "ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default" "ONEDNN_MAX_CPU_ISA=AVX2" \
		"ATEN_CPU_CAPABILITY=avx2" "ONEDNN_MAX_CPU_ISA=AVX512_CORE"; do \
		echo "$$least"; env $$least $(PYTEST) $(BY_KERNEL) || worst=1; done; exit $$worst

# Full-size plans against tests/planning/baseline.json, some minutes on one core; PLANS=write stores those of now.
.PHONY: plans wording
plans: $(VENV)/.test
	$(BIN)/python tests/support/plan_baseline.py $(PLANS)

# Write each sentence of the code into tests/data/wording.json.
wording: $(VENV)/.test
	$(BIN)/python tests/support/wording.py

# In real hosts: COMFYUI_DIR=... and WEBUI_DIR=..., with COMFYUI_PYTHON=... and WEBUI_PYTHON=... for theirs.
test-hosts: $(VENV)/.test
	$(BIN)/python -m pytest tests/hosts $(wildcard tests/unets/hosts)

# diffusers' own tests of its pipelines with our hooks attached: DIFFUSERS_DIR=... names a checkout.
test-others: $(VENV)/.test
	@test -z "$(DIFFUSERS_DIR)" || $(PIP) install --quiet requests-mock pytest-timeout parameterized
	DIFFUSERS_DIR="$(DIFFUSERS_DIR)" $(BIN)/python -m pytest -s tests/others

# What a card does, on one that is simulated under torch's CUDA build. Its environment (5 GB) is stored in the user's cache
# folder, under a digest of what is installed there, and serves all clones. SIMULATED_GPU=required: fail without gcc and g++.
# WHICH= runs rare tests too.
GPU_VENVS = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sd-lowvram/simulated-gpu
GPU_VENV ?= $(GPU_VENVS)/$(shell { "$(PYTHON)" --version; cat constraints.txt; sed -n '/^test = /,/^]/p' pyproject.toml; } | cksum | tr ' ' -)
SIMULATED_GPU ?= asked
test-simulated-gpu:
	@if command -v gcc >/dev/null && command -v g++ >/dev/null; then \
		$(MAKE) --no-print-directory VENV="$(GPU_VENV)" simulated-gpu; \
	else echo 'no simulated card: it is compiled by gcc and g++, which are not both here' >&2; \
		test "$(SIMULATED_GPU)" != required; fi

.PHONY: simulated-gpu
simulated-gpu: $(VENV)/.cuda
	PYTHONPATH="$(CURDIR)" SIMULATED_GPU=$(SIMULATED_GPU) $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(WHICH) tests/simulated_gpu \
		$(wildcard tests/benchmarks/simulated_gpu tests/unets/simulated_gpu)

# The oldest versions that are served, in an environment of their own. Three '=' pick torch as it is published.
OLDEST_VENV ?= .venv-oldest
OLDEST_PYTHON ?= python3.10
OLDEST = 'torch===2.1.2' 'diffusers==0.31.*' 'transformers==4.46.*' 'numpy<2'
test-oldest:
	@$(MAKE) --no-print-directory VENV="$(OLDEST_VENV)" PYTHON="$(OLDEST_PYTHON)" oldest

.PHONY: oldest
oldest: $(VENV)/.oldest
	$(BIN)/python -m pytest tests/test_session.py tests/test_settings.py tests/commands/test_demo.py

$(VENV)/.oldest: $(VENV)/.python pyproject.toml
	@echo 'first install of the oldest versions: 5 GB, which takes some minutes' >&2
	$(PIP) install --quiet $(OLDEST) -e '.[standalone]' 'pytest>=8' 'hypothesis>=6.100' 'einops>=0.6' 'peft<0.18'
	@touch $@

# Ten times the hostile inputs of a test run; at the end the most memory that each target took.
fuzz: $(VENV)/.test
	SD_LOWVRAM_FUZZ=10000 $(BIN)/python -m pytest tests/fuzz $(wildcard tests/batches/test_hostile_jobs.py)

# What becomes of a run that is disturbed, everywhere and in every way; a short form of it is among the tests.
faults: $(VENV)/.test
	$(BIN)/python tests/faults/fault_table.py

# Once, at the end of a piece of work, on what is committed: each table names the commit that it was computed by.
tables: $(VENV)/.test
	$(BIN)/python -m benchmarks tables $(TABLE)

# Each fault in a copy of the tree, where its own tests alone run; red where one is seen by nobody.
planted: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/planted.py --jobs 2 $(FAULTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(wildcard benchmarks/*.py),$(BIN)/mypy -p benchmarks)
	mkdir -p build/types && ln -sfn ../.. build/types/checkout  # the nodes lie in a package that is called as its folder is
	cd build/types && MYPYPATH=. $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --explicit-package-bases \
		$(addprefix checkout/,nodes $(wildcard sd_lowvram/unets/nodes))
	$(BIN)/mypy --explicit-package-bases webui_ext scripts install.py
	MYPYPATH=tools/demo $(BIN)/mypy --explicit-package-bases tools/demo/*.py tools/tiles_crop.py tools/gpu_pack.py tools/book.py tools/readme_picture.py
	$(BIN)/lint-imports --no-logo

# Tests, then measurements; PART="workspaces peaks" names some of it. With GPU_PYTHON in an environment that is there, to
# which a pack adds a folder of its own: nothing is installed into it. AGAIN=1 measures anew what has been measured.
GPU_OUT ?= benchmarks/results
GPU_PACK ?= gpu-pack
GPU_SITE := $(GPU_PACK)/site
GPU_PACKED = $(if $(GPU_PYTHON),$(wildcard $(GPU_PACK)/*.whl))
GPU_RUN = $(if $(GPU_PACKED),PYTHONPATH="$(CURDIR)/$(GPU_SITE)") $(or $(GPU_PYTHON),$(BIN)/python)
gpu: $(if $(GPU_PYTHON),$(if $(GPU_PACKED),$(GPU_SITE)/.whole),$(VENV)/.test)
	$(GPU_RUN) -m benchmarks gpu $(addprefix --part ,$(PART)) --out "$(GPU_OUT)" \
		$(if $(GPU_SECONDS),--seconds $(GPU_SECONDS)) $(if $(AGAIN),--again)

$(GPU_SITE)/.whole: $(GPU_PACKED)
	rm -rf "$(GPU_SITE)"
	$(GPU_PYTHON) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile \
		--target "$(GPU_SITE)" $(GPU_PACKED)
	@touch $@

# The tree without the demo model, and wheels in the versions of constraints.txt, for Linux on x86_64. GPU_HAS="numpy
# pillow" names what need not be carried.
gpu-pack: $(VENV)/.test
	$(BIN)/python tools/gpu_pack.py "$(GPU_PACK)" $(if $(GPU_VERSION),--python $(GPU_VERSION)) \
		$(if $(GPU_HAS),--there $(GPU_HAS)) $(if $(GPU_MOST),--most $(GPU_MOST))

# Links are checked; blocks of Python are run by tests/test_readme.py.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Wheel and sdist of a release, checked as the registry would.
dist: $(VENV)/.python
	$(PIP) install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.python:
	@command -v "$(PYTHON)" >/dev/null || { echo 'No "$(PYTHON)" here: install Python 3.10 or newer, or name yours: make PYTHON=/path/to/python3' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit(f"$(PYTHON) is Python {v[0]}.{v[1]}: 3.10 or newer is needed; name it with make PYTHON=/path/to/python3")'
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)' >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv "$(VENV)"
	@touch $@

# An environment that has all of it, as README's install makes one, is used as it is. In another one torch comes first
# and by itself, so that an environment with a build of its own choice keeps it.
NEEDED = accelerate diffusers matplotlib PIL psutil pynvml rich safetensors torch transformers typer
$(VENV)/.standalone: $(VENV)/.python pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import importlib as i, importlib.metadata, importlib.util, sys; i.metadata.version("sd-lowvram"); \
			sys.exit(not all(map(i.util.find_spec, sys.argv[1:])))' $(NEEDED) 2>/dev/null; then \
		echo 'first install, 1 of 2: torch, which takes some minutes' >&2 && \
		$(PIP) install -c constraints.txt torch && \
		echo 'first install, 2 of 2: what reads models and draws pictures' >&2 && \
		$(PIP) install -c constraints.txt -e '.[standalone]'; fi
	@touch $@

$(VENV)/.test: $(VENV)/.standalone
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	$(PIP) install --quiet -c constraints.txt --no-deps stable-diffusion-sdkit
	$(PIP) install --quiet -c constraints.txt -e '.[train]'
	@$(PIP) install --quiet -c constraints.txt -e '.[ray]' || echo 'no Ray for batches: the test of a cluster is skipped' >&2
	@touch $@

$(VENV)/.docs: $(VENV)/.standalone
	$(PIP) install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# Three '=' pick torch as it is published, which is the CUDA build, also where a build for the CPU is at hand.
TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)
$(VENV)/.cuda: $(VENV)/.python
	@echo 'first install for the simulated card: torch for CUDA, 5 GB, which takes some minutes' >&2
	$(PIP) install --quiet 'torch===$(TORCH)'
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	$(PIP) uninstall --quiet --yes sd-lowvram  # each clone brings its own
	@touch $@

# The gradio of AUTOMATIC1111, apart from all else; without it, or where it takes long, one test is skipped.
GRADIO = gradio==3.41.2 pydantic==1.10.27 fastapi==0.94.0 httpx==0.24.1 'huggingface_hub<0.26' 'numpy<2' 'setuptools<70'
$(VENV)/.gradio: $(VENV)/.test
	@{ "$(PYTHON)" -m venv "$(VENV)/gradio" && timeout 60 "$(VENV)/gradio/bin/python" -m pip install --quiet \
		--no-compile $(GRADIO); } || { rm -rf "$(VENV)/gradio"; echo 'no gradio for the panel: its test is skipped'; }
	@touch $@

clean:
	rm -rf "$(VENV)" "$(GPU_VENV)" "$(OLDEST_VENV)" "$(GPU_PACK)" "$(GPU_PACK).tar.gz" build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
