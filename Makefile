# `make test` on a fresh machine does everything: environment, wheel, tests against the installed wheel.
# `make` alone prints every target that has a `##` comment.

.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# All tests in a file run in one process: they share ranks, which take seconds to start.
PYTEST_ARGS ?= -q -rs -n $(JOBS) --maxprocesses 8 --dist loadfile
FUZZ_CASES ?= 100000

VENV := .venv
FRAMEWORKS := .venv-integrations
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

PACKAGE_FILES := $(shell find zcomm -name __pycache__ -prune -o -type f -not -name '*.so' -print)
NATIVE_FILES := $(shell find csrc -path csrc/tests -prune -o -type f -print)
# Directories too: their times change when a file is deleted.
SOURCE_DIRS := $(shell find zcomm csrc -path csrc/tests -prune -o -type d -not -name __pycache__ -print)
CLANG_FORMAT_FILES := $(shell find csrc emulator \( -name "*.cpp" -o -name "*.h" -o -name "*.cu" \) -not -name lm_tables.h)

# What `make lint` and the hooks of .pre-commit-config.yaml run.
LINTS := lint-python lint-types lint-imports lint-native lint-tables lint-docs

.PHONY: help test test-fast test-faults test-torch test-integrations gpu-proof cuda-proof cuda-proof-steps triton-proof triton-proof-steps gpu-report demo wheel bench bench-hosts bench-convergence lint $(LINTS) docs tables format sanitize ring-model gpu-sanitize avx512-proof clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z][a-z0-9 -]*:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# First builds emulator modules from the PTX of the CUDA kernels: nvcc's if it is installed, NVRTC's, and Triton's.
test: $(VENV)/installed ## build and install the wheel, run all tests against it
	$(BIN)/python emulator/emulated.py ptx80 nvrtc80:default
	$(BIN)/python emulator/emulated_triton.py --short ptx90
	OMP_NUM_THREADS=1 ZCOMM_WHEEL=$$(ls dist/*.whl) $(BIN)/pytest $(PYTEST_ARGS)

# For the edit loop: runs the source tree, not the wheel, on at most two ranks. Leaves out GPU kernels, the commands and
# packaging. Compiles only when a native file has changed. 75 seconds on two idle cores.
FAST_TESTS := tests/base tests/codecs tests/contract tests/report \
    tests/kernels/test_isa.py tests/kernels/test_kernel_choice.py \
    $(addprefix tests/ddp/test_,dtypes.py graphs.py handle.py modes.py loss_scale.py settings.py) \
    $(addprefix tests/zero/test_,arguments.py gradients.py misuse.py modes.py parameters.py) \
    tests/fsdp/test_arguments.py \
    tests/fsdp/test_modes.py::test_codec_none_is_plain_fsdp2_to_the_bit tests/monitor \
    tests/project/test_architecture.py tests/project/test_guide.py tests/project/test_habits.py

test-fast: build/in-place ## tests for the edit loop, against the source tree: under two minutes
	OMP_NUM_THREADS=1 ZCOMM_EMULATED= PYTHONPATH=$(CURDIR) $(BIN)/pytest $(PYTEST_ARGS) $(FAST_TESTS)

build/in-place: setup.py $(NATIVE_FILES) | $(VENV)/tools
	ZCOMM_CUDA=0 MAX_JOBS=$(JOBS) $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# Lightning, Hugging Face's Trainer and Accelerate, in their own environment. The tests download nothing.
test-integrations: $(FRAMEWORKS)/installed ## train with Lightning, transformers and Accelerate
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(FRAMEWORKS)/bin/pytest -q -rs tests/integrations

# Kills, stops and cut links between two network namespaces, which need root, and among ranks that share memory.
# `make test` runs the shorter ones.
test-faults: $(VENV)/installed ## every fault between two hosts (root) and in shared memory: kills, stops, cut links
	OMP_NUM_THREADS=1 ZCOMM_FAULTS=all $(BIN)/pytest -q -rs -s tests/transport/test_faults.py \
	    $(addprefix tests/transport/test_shared_memory_,faults.py stops.py garbage.py leaks.py)

# With another torch, in its own environment: a CUDA build takes about 6 GB. `rm -rf build/torch-*` removes them all.
TORCH_ENV := build/torch-$(TORCH)
TORCH_PIP := $(TORCH_ENV)/bin/python -m pip --disable-pip-version-check --quiet
TORCH_TOOLS := $(shell grep -E '^(numpy|pytest|hypothesis|tensorboard)' requirements-dev.txt)

test-torch: $(TORCH_ENV)/tools dist/built ## test with another torch, and keep the results: TORCH=2.15.0
	$(TORCH_PIP) install --no-deps --force-reinstall dist/*.whl
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks $(TORCH_ENV)/bin/python tools/test_torch.py $(PYTEST_ARGS)

$(TORCH_ENV)/tools: requirements-dev.txt
	@test -n "$(TORCH)" || { echo "expected a version: make test-torch TORCH=2.15.0"; exit 1; }
	test -x $(TORCH_ENV)/bin/python || $(PYTHON) -m venv $(TORCH_ENV)
	$(TORCH_PIP) install torch==$(TORCH) $(TORCH_TOOLS)
	touch $@

# Everything that can be checked about GPU kernels without a GPU, in two parts. Their last outputs are checked in. See docs/gpu.md.
GPU_TESTS := tests/contract
GPU_KINDS := ptx80 ptx90 ptx100 source nvrtc80 nvrtc90
TRITON_KINDS := ptx80 ptx90 ptx100 ptx120
# The oldest release that gives the same bits. zcomm.kernels.triton and pyproject.toml name it too.
OLDEST_TRITON := $(VENV)/triton-3.6.0
comma := ,
space := $(subst ,, )

gpu-proof: cuda-proof triton-proof ## check the GPU kernels on the emulator (45 minutes)

cuda-proof triton-proof: %-proof: $(VENV)/installed
	mkdir -p build && $(MAKE) --no-print-directory $*-proof-steps > build/$*_proof.txt 2>&1; \
	    status=$$?; cat build/$*_proof.txt; exit $$status
	sed -E -e 's/ in [0-9.]+s.*$$//' -e '/^(make|g\+\+|bringing up|\.+ *(\[|$$))/d' build/$*_proof.txt | cat -s > benchmarks/results/$*_proof.txt

triton-proof: $(OLDEST_TRITON)

# The CUDA kernels, as compiled by nvcc and by NVRTC, and their source.
cuda-proof-steps:
	$(BIN)/python emulator/emulated.py $(GPU_KINDS)
	OMP_NUM_THREADS=1 ZCOMM_EMULATED=$(subst $(space),$(comma),$(GPU_KINDS)) $(BIN)/pytest $(PYTEST_ARGS) --dist load $(GPU_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_ARGS) emulator/tests --ignore emulator/tests/test_triton_ptx.py \
	    $(addprefix tests/kernels/test_,gpu_gates.py gpu_mutations.py cuda_driver.py cupy_contract.py image_cache.py) \
	    $(addprefix tests/engine/test_,device_engine.py device_failures.py streams.py)
	OMP_NUM_THREADS=1 ZCOMM_NVRTC_ARCHS=80,90,100 $(BIN)/pytest $(PYTEST_ARGS) --dist load tests/kernels/test_nvrtc.py
	$(MAKE) --no-print-directory gpu-sanitize
	$(BIN)/python tools/gpu_report.py

# The Triton kernels, as compiled by this release and by the oldest one, and interpreted.
triton-proof-steps:
	$(BIN)/python emulator/emulated_triton.py $(TRITON_KINDS)
	OMP_NUM_THREADS=1 ZCOMM_TRITON=$(subst $(space),$(comma),$(TRITON_KINDS)) $(BIN)/pytest $(PYTEST_ARGS) --dist load $(GPU_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_ARGS) emulator/tests/test_triton_ptx.py tests/kernels/test_triton_compiled.py \
	    tests/kernels/test_triton_mutations.py
	PYTHONPATH=$$PWD/$(OLDEST_TRITON) $(BIN)/python emulator/emulated_triton.py ptx90
	OMP_NUM_THREADS=1 PYTHONPATH=$$PWD/$(OLDEST_TRITON) ZCOMM_TRITON=ptx90 $(BIN)/pytest $(PYTEST_ARGS) --dist load $(GPU_TESTS)
	OMP_NUM_THREADS=1 ZCOMM_TRITON=interpreted $(BIN)/pytest $(PYTEST_ARGS) --dist load --timeout 3600 $(GPU_TESTS) tests/kernels/interpreted_triton
	$(BIN)/python tools/gpu_report.py --triton

$(OLDEST_TRITON): | $(VENV)/tools
	$(PIP) install --no-deps --target $@ triton==$(notdir $(subst triton-,,$@))

gpu-report: $(VENV)/installed ## machine code of the GPU kernels, bytes moved, predicted speed
	$(BIN)/python tools/gpu_report.py
	$(BIN)/python tools/gpu_report.py --triton

demo: $(VENV)/installed ## train a small GPT four ways and write a report
	$(BIN)/zcomm demo $(DEMO_ARGS)

wheel: dist/built ## build the wheel in dist/

bench: $(VENV)/installed ## benchmarks on this machine, checked against their bars
	$(BIN)/python benchmarks/codec_quality.py
	$(BIN)/python benchmarks/codec_speed.py --check --json build/codec_speed.json
	$(BIN)/python benchmarks/collectives.py --check --json build/collectives.json
	$(BIN)/python benchmarks/training_step.py --check --json build/training_step.json
	$(BIN)/python benchmarks/training_step.py --ranks 4 --check --json build/training_step_4.json
	$(BIN)/python benchmarks/training_step.py --memory --check
	$(BIN)/python benchmarks/zero.py --check --json build/zero.json
	$(BIN)/python benchmarks/zero.py --ranks 4 --check --json build/zero_4.json
	$(BIN)/python benchmarks/fsdp.py --check --json build/fsdp.json
	$(BIN)/python benchmarks/fsdp.py --ranks 4 --check --json build/fsdp_4.json
	$(BIN)/python benchmarks/monitor_cost.py --check

bench-hosts: $(VENV)/installed ## benchmarks over shaped links between network namespaces (root)
	$(BIN)/python benchmarks/collectives.py --hosts 2 4 --rate 1gbit --check --json build/collectives_hosts.json
	$(BIN)/python benchmarks/training_step.py --hosts 2 --rate 1gbit --check --json build/training_step_hosts.json
	$(BIN)/python benchmarks/zero.py --hosts 2 --rate 1gbit --check --json build/zero_hosts.json
	$(BIN)/python benchmarks/fsdp.py --hosts 2 --rate 1gbit --check --json build/fsdp_hosts.json
	$(BIN)/python benchmarks/cost_model.py --check --json build/cost_model.json
	$(BIN)/python benchmarks/auto.py --rates 10gbit 1gbit --check --json build/auto.json
	$(BIN)/python benchmarks/auto.py --choosing --rates 1gbit --check

bench-convergence: $(VENV)/installed ## train every codec to the end (half an hour)
	$(BIN)/python benchmarks/convergence.py --resume --check --json benchmarks/results/convergence.json \
	    --svg benchmarks/results/convergence.svg
	$(BIN)/python benchmarks/fsdp.py --convergence --check --json benchmarks/results/fsdp_convergence.json

tables: $(VENV)/tools ## write the results tables in the docs from benchmarks/results
	$(BIN)/python tools/make_result_tables.py

lint: $(LINTS) ## formatting, types, imports, generated tables, docs

$(LINTS): $(VENV)/tools

lint-python:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types:
	$(BIN)/mypy

lint-imports:
	$(BIN)/lint-imports

lint-native:
	$(BIN)/clang-format --dry-run -Werror $(CLANG_FORMAT_FILES)

lint-tables:
	$(BIN)/python tools/make_tables.py --check
	$(BIN)/python tools/make_result_tables.py --check

lint-docs: docs

# A broken link or an unknown name is an error.
docs: $(VENV)/tools ## build the site from docs/ in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/tools ## format all files with ruff and clang-format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMAT_FILES)

clean: ## remove everything that make built
	rm -rf build dist $(VENV) $(FRAMEWORKS) *.egg-info zcomm/*.so .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find zcomm tests emulator benchmarks tools -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/tools: requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements-dev.txt
	touch $@

# setuptools compiles only when a native file is newer than the module in build/. It keeps files that were
# deleted from the source, so find removes them. auditwheel adds nothing to the wheel: it finds the oldest manylinux
# tag whose C and C++ libraries have every symbol that the module uses.
dist/built: setup.py pyproject.toml MANIFEST.in README.md LICENSE $(PACKAGE_FILES) $(NATIVE_FILES) $(SOURCE_DIRS) | $(VENV)/tools
	rm -rf dist
	if test -d build; then find build -path 'build/lib.*' -type f -not -name '*.so' -delete; fi
	rm -rf build/wheel
	MAX_JOBS=$(JOBS) $(PIP) wheel --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	touch $@

# No dependencies: torch is installed already and must stay at its pinned version.
$(VENV)/installed: $(VENV)/tools dist/built
	$(PIP) install --no-deps --force-reinstall dist/*.whl
	touch $@

$(FRAMEWORKS)/tools: requirements-integrations.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements-integrations.txt
	touch $@

$(FRAMEWORKS)/installed: $(FRAMEWORKS)/tools dist/built
	$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --force-reinstall dist/*.whl
	touch $@

# GCC's own AVX-512 header triggers hundreds of false -Wmaybe-uninitialized warnings.
NATIVE_TEST_FLAGS := -std=c++17 -ffp-contract=off -Wall -Wextra -Wno-maybe-uninitialized -pthread -Icsrc

# The native tests and the wire fuzzer under the address and undefined-behavior sanitizers.
SANITIZE_FLAGS := $(NATIVE_TEST_FLAGS) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZED := $(patsubst csrc/%.cpp,build/sanitize/%.o,$(wildcard csrc/cpu/*.cpp))
SANITIZED_RING := $(patsubst csrc/%.cpp,build/sanitize/%.o,$(wildcard csrc/shm/*.cpp))

# The ring once more under ThreadSanitizer, with the kernels. ThreadSanitizer cannot start where the kernel
# moves mappings about more than it knows of, so they stay in place if setarch may ask for that.
IN_PLACE = $(shell setarch $$(uname -m) -R true 2> /dev/null && echo setarch $$(uname -m) -R)
THREAD_FLAGS := $(NATIVE_TEST_FLAGS) -O1 -g -fsanitize=thread
THREAD_CHECKED := $(patsubst csrc/%.cpp,build/sanitize-threads/%.o,$(wildcard csrc/shm/*.cpp csrc/cpu/*.cpp))

sanitize: ## native tests and wire fuzzing under sanitizers, the model of the ring
	$(MAKE) --no-print-directory -j$(JOBS) $(addprefix build/sanitize/,native_test fuzz ring_test ring_coded ring_hostile) \
	    $(addprefix build/sanitize-threads/,ring_test ring_coded)
	build/sanitize/ring_test
	build/sanitize/ring_coded hostile
	build/sanitize/ring_hostile
	$(IN_PLACE) build/sanitize-threads/ring_test
	$(IN_PLACE) build/sanitize-threads/ring_coded
	build/sanitize/native_test
	build/sanitize/fuzz $(FUZZ_CASES)
	$(MAKE) --no-print-directory ring-model

build/sanitize/native_test build/sanitize/fuzz: build/sanitize/%: build/sanitize/tests/%.o $(SANITIZED)
	$(CXX) $(SANITIZE_FLAGS) $^ -o $@

$(addprefix build/sanitize/,ring_test ring_coded ring_hostile): build/sanitize/%: build/sanitize/tests/%.o \
    $(SANITIZED) $(SANITIZED_RING)
	$(CXX) $(SANITIZE_FLAGS) $^ -o $@

$(addprefix build/sanitize-threads/,ring_test ring_coded): build/sanitize-threads/%: \
    build/sanitize-threads/tests/%.o $(THREAD_CHECKED)
	$(CXX) $(THREAD_FLAGS) $^ -o $@

build/sanitize/%.o: csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE_FLAGS) -MMD -c $< -o $@

build/sanitize-threads/%.o: csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(THREAD_FLAGS) -MMD -c $< -o $@

# Every order in which ranks can take their steps. Root installs spin, the model checker, if it is missing.
INSTALL_SPIN := apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends spin

ring-model: ## every order of steps in the model of the ring
	@command -v spin > /dev/null || \
	    { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && $(INSTALL_SPIN) > /dev/null; } || \
	    { echo "expected the model checker spin on PATH, got none: install Debian's package spin"; exit 1; }
	$(PYTHON) tools/check_ring_model.py

# The CUDA source on the emulator, under the same sanitizers, compared with the CPU kernels.
# No strict aliasing: kernels read wires through different types than they were written with.
GPU_CASES ?= 3500
GPU_SANITIZE_FLAGS := $(SANITIZE_FLAGS) -Iemulator -fno-strict-aliasing -DZC_EMULATED
GPU_SOURCES := $(wildcard csrc/cuda/*.cu emulator/simt/*.cpp) csrc/cuda/plan.cpp csrc/cuda/launch.cpp
GPU_SANITIZED := $(patsubst %,build/gpu-sanitize/%.o,$(basename $(GPU_SOURCES:csrc/%=%)))

gpu-sanitize: ## CUDA source on the emulator under sanitizers
	$(MAKE) --no-print-directory -j$(JOBS) build/gpu-sanitize/cuda_test
	build/gpu-sanitize/cuda_test $(GPU_CASES)

build/gpu-sanitize/cuda_test: build/gpu-sanitize/tests/cuda_test.o $(GPU_SANITIZED) $(SANITIZED)
	$(CXX) $(GPU_SANITIZE_FLAGS) $^ -o $@

build/gpu-sanitize/emulator/%.o: emulator/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(GPU_SANITIZE_FLAGS) -MMD -c $< -o $@

build/gpu-sanitize/%.o: csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(GPU_SANITIZE_FLAGS) -MMD -c $< -o $@

build/gpu-sanitize/%.o: csrc/%.cu
	@mkdir -p $(@D)
	$(CXX) $(GPU_SANITIZE_FLAGS) -MMD -x c++ -c $< -o $@

-include $(wildcard build/gpu-sanitize/*/*.d)

# The AVX-512 kernel set on any processor with AVX2: the same source, with its intrinsics replaced by the
# functions in csrc/tests/avx512_emulation.h. Needs only the compiler.
EMULATE_FLAGS := $(NATIVE_TEST_FLAGS) -O2 -Wno-psabi -DZCOMM_EMULATED_AVX512
EMULATED := $(patsubst csrc/%.cpp,build/emulate/%.o,$(wildcard csrc/cpu/*.cpp))

avx512-proof: ## AVX-512 kernels with emulated intrinsics against scalar ones
	$(MAKE) --no-print-directory -j$(JOBS) build/emulate/native_test build/emulate/fuzz
	build/emulate/native_test
	build/emulate/fuzz $(FUZZ_CASES)

build/emulate/native_test build/emulate/fuzz: build/emulate/%: build/emulate/tests/%.o $(EMULATED)
	$(CXX) $(EMULATE_FLAGS) $^ -o $@

build/emulate/cpu/avx512.o: csrc/cpu/avx512.cpp csrc/tests/avx512_emulation.h
	@mkdir -p $(@D)
	sed 's/avx512[a-z]*,//g; s/,prefer-vector-width=512//' $< > build/emulate/avx512.cpp
	$(CXX) $(EMULATE_FLAGS) -mavx2 -mfma -mf16c -mbmi -mbmi2 -include csrc/tests/avx512_emulation.h \
	    -MMD -c build/emulate/avx512.cpp -o $@

build/emulate/%.o: csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(EMULATE_FLAGS) -MMD -c $< -o $@

.SECONDARY:
-include $(wildcard build/sanitize/*/*.d build/sanitize-threads/*/*.d build/emulate/*/*.d)
