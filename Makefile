# Every target works on a fresh machine with Python 3.11+, make and a C library: the environment is built on the way.
.DEFAULT_GOAL := help
.PHONY: help test test-all test-device azurite check lock matrix newest-torch lint types layers docs package demo compat-frameworks torture powercut soak bench bench-arena bench-digest \
  bench-fanout bench-fanout-simulation bench-gpu bench-hosts bench-load bench-load-ranks bench-load-s3 bench-near-storage bench-plan bench-replay bench-safetensors bench-save bench-serve bench-state clean

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST_ARGS ?=
# Most tests wait for processes and servers: three at a time use a machine of two cores.
PYTEST_WORKERS ?= 3

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

# The versions are those of requirements/, which `make lock` writes. An existing environment is updated in place.
# `make demo` alone needs two thirds of the packages.
LOCK := pyproject.toml $(addprefix requirements/,torch.toml demo.txt dev.txt)
DEMO := .venv/.installed-demo

$(STAMP): $(LOCK)
	$(PYTHON) tools/environments.py .venv demo dev
	@touch $@ $(DEMO)

$(DEMO): $(LOCK)
	$(PYTHON) tools/environments.py .venv demo
	@touch $@

.venv: $(STAMP) ## build the virtual environment

lock: ## write requirements/*.txt after a change of pyproject.toml; LOCK_ARGS=--upgrade for the newest of everything
	$(PYTHON) tools/lock.py $(LOCK_ARGS)

matrix: ## the tests that touch torch, with each torch and each Python (1 hour, 25 GB); JOBS="3.11/2.15.0" for some
	$(PYTHON) tools/matrix.py $(JOBS)

newest-torch: ## the same with the newest torch of the lock, and a look for a newer one (6 minutes)
	$(PYTHON) tools/matrix.py --newest-torch

# Azurite comes along where npm is there; where it is not, or has no network, its tests are skipped with the reason.
azurite:
	@test -n "$$TIERCKPT_TEST_AZURITE$$TIERCKPT_TEST_AZURE_ENDPOINT" || test -x .services/node_modules/.bin/azurite-blob \
	  || ! command -v npm >/dev/null || { mkdir -p .services && npm install --prefix .services --no-audit --no-fund \
	  --loglevel=error azurite; } || echo "Azurite could not be installed; its tests will be skipped"

PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

# A short pass of each harness of tests/fault. What each number is in test-all: docs/internals/testing.md.
QUICK := SWEEP=quick BIT_FLIPS=120 CACHE_FLIPS=1 CRASH_STATES=300 FUZZ_SECONDS=1 STORE_FAULT_SECONDS=1 \
  STORE_OUTAGE_SECONDS=2 TWO_NODES=6 LEAK_OPERATIONS=4 LOG_KILLS=1 TRAINING_LOOPS=6 NEAR_STORAGE_KILLS=1 HISTORIES=2

# Its tests use less of a processor: four at a time took 5:24 where three took 5:50.
test: PYTEST_WORKERS = 4
test: $(STAMP) azurite ## the quick suite: what a contributor needs, in five minutes
	env $(addprefix TIERCKPT_TEST_,$(QUICK)) $(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP) azurite ## every test (servers that are not there are skipped, with the reason)
	$(PYTEST) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# Of the quick suite what touches tensors of a device. There tests/conftest.py makes tensors on it, unless they say where.
DEVICE_TESTS := state_table exact_state state_strict step_log redo_log multi_step_save save_restore resume default_device
test-device: $(STAMP) ## the state, the codec and the logs on a GPU (2 minutes)
	env TIERCKPT_TEST_DEVICE=cuda $(PYTEST) -m "not slow" $(DEVICE_TESTS:%=tests/integration/test_%.py) tests/unit/replay/test_apply.py \
	  tests/unit/replay/test_redo.py $(PYTEST_ARGS)

check: lint types layers test-all ## what CI runs: lint, types, layers, every test

docs: $(STAMP) ## build the documentation site into site/
	@$(BIN)/python -c 'import mkdocs, material, mkdocstrings' 2>/dev/null || $(PYTHON) tools/environments.py .venv demo dev docs
	$(BIN)/python -m mkdocs build --strict --quiet

package: $(STAMP) ## build the wheel and try it with each extra, each in a bare environment; EXTRAS="cli torch" for some
	$(BIN)/python tools/check_package.py $(EXTRAS)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO)) ## train, kill, lose the node, resume from S3, export, prefetch, generate
	$(BIN)/python examples/demo/run.py

# In an environment of their own: frameworks need other versions than those of the lock. torch is the same.
FRAMEWORKS := transformers optuna accelerate lightning deepspeed 'ray[train]' torchtitan
WHEELS := torchtitan verl vllm sglang
compat-frameworks: ## install every framework that has an adapter, in .venv-frameworks, and run its tests; none may be skipped
	$(PYTHON) tools/environments.py .venv-frameworks demo dev
	version=$$(.venv-frameworks/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))') && \
	  .venv-frameworks/bin/python -m pip install --quiet "torch==$$version" -e '.[dev]' $(FRAMEWORKS)
	TIERCKPT_TEST_REQUIRE_FRAMEWORKS=1 .venv-frameworks/bin/python -m pytest \
	  tests/compat/test_adapters.py tests/compat/test_model_layouts.py $(WHEELS:%=tests/integration/test_%.py) $(PYTEST_ARGS)

# Each harness of tests/fault, as long as it is worth; what it is in CI is in docs/internals/testing.md. TORTURE takes a part.
TORTURE ?= sweeps crash bits fuzz stores deaths preemption agent load safetensors readers fsspec order simulated fanout replicas evil nodes histories strange leaks forks interrupts log loops near-storage redo cases properties
TORTURE_sweeps := TIERCKPT_TEST_SWEEP=long test_sweeps.py
TORTURE_crash := TIERCKPT_TEST_CRASH_STATES=600000 test_crash_states.py
TORTURE_bits := TIERCKPT_TEST_BIT_FLIPS=every test_bit_faults.py
TORTURE_fuzz := TIERCKPT_TEST_FUZZ_SECONDS=900 test_fuzz.py tests/fault/test_attacks.py
TORTURE_stores := TIERCKPT_TEST_STORE_FAULT_SECONDS=600 test_store_faults.py
TORTURE_deaths := TIERCKPT_TEST_RANK_DEATHS=10 test_rank_deaths.py
TORTURE_preemption := TIERCKPT_TEST_PREEMPTIONS=5 test_preemption.py
TORTURE_agent := TIERCKPT_TEST_CASES=all test_agent.py tests/fault/test_epochs.py
TORTURE_load := TIERCKPT_TEST_SAVERS=64 test_load.py
TORTURE_safetensors := TIERCKPT_TEST_FUZZ_SECONDS=1800 test_safetensors_fuzz.py
TORTURE_readers := TIERCKPT_TEST_CACHE_READERS=300 test_cache_readers.py
TORTURE_fsspec := TIERCKPT_TEST_FSSPEC=all ../contract/test_fsspec.py
TORTURE_fanout := TIERCKPT_TEST_SWEEP=full test_fanout.py
TORTURE_replicas := TIERCKPT_TEST_REPLICA_KILLS=100 test_replica_faults.py
TORTURE_evil := TIERCKPT_TEST_PEER_FLOOD=10000 test_evil_peer.py
TORTURE_leaks := TIERCKPT_TEST_LEAK_OPERATIONS=120 test_leaks.py
TORTURE_forks := TIERCKPT_TEST_FORKS=every test_forks.py
TORTURE_interrupts := TIERCKPT_TEST_INTERRUPTS=50 test_interrupts.py
TORTURE_log := TIERCKPT_TEST_LOG_KILLS=60 test_gradient_log.py tests/fault/test_step_log_kills.py
TORTURE_loops := TIERCKPT_TEST_TRAINING_LOOPS=400 test_training_loops.py
TORTURE_near-storage := TIERCKPT_TEST_NEAR_STORAGE_KILLS=300 test_near_storage_kills.py
TORTURE_redo := TIERCKPT_TEST_CASES=all test_redo_log_kills.py tests/fault/test_multi_step_kills.py
TORTURE_cases := TIERCKPT_TEST_CASES=all ../unit/near_storage/test_optimizer.py tests/fault/test_near_storage_kills.py tests/fault/test_flush_faults.py tests/fault/test_step_log_kills.py
TORTURE_order := TIERCKPT_TEST_SWEEP=full ../integration/test_data_order.py
TORTURE_strange := TIERCKPT_TEST_STRANGE_FILES=all test_strange_files.py
TORTURE_nodes := TIERCKPT_TEST_TWO_NODES=120 test_two_nodes.py
TORTURE_histories := TIERCKPT_TEST_HISTORIES=300 test_histories.py
TORTURE_simulated := TIERCKPT_TEST_SWEEP=full ../integration/test_simulated_run.py

torture: $(STAMP) ## every fault harness, ten times as long as in CI or more (hours); TORTURE="sweeps crash" for a part
	@for part in $(TORTURE); do echo "== $$part"; $(MAKE) --no-print-directory torture-$$part || exit 1; done

PROPERTY_ROUNDS ?= 10

torture-properties: $(STAMP) ## every property of the tests with other examples, again and again
	@for round in $$(seq $(PROPERTY_ROUNDS)); do \
	  $(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=drawn tests/unit tests/fault/test_fuzz.py || exit 1; done

torture-%: $(STAMP)
	env $(firstword $(TORTURE_$*)) $(BIN)/python -m pytest -o timeout=0 -o tmp_path_retention_policy=failed -rA tests/fault/$(wordlist 2,9,$(TORTURE_$*)) | tail -n 40

powercut: $(STAMP) ## cut the power of virtual machines that save, 100 times (needs root, qemu-system-x86, xfsprogs)
	$(BIN)/python -m tests.fault.powercut --cuts 100 --bug all

soak: $(STAMP) ## an hour of saves under random faults and kills
	$(BIN)/python -m tests.fault.soak --seconds 3600

bench: $(STAMP) ## print the tables of bench/README.md, but for that which needs a GPU
	@for table in $(filter-out bench/gpu.py,$(wildcard bench/*.py)); do echo "== $$table"; $(BIN)/python $$table || exit 1; done

bench-arena: $(STAMP) ## O_DIRECT from each kind of staging memory
	$(BIN)/python bench/arena.py

bench-digest: $(STAMP) ## measure the digest candidates
	$(BIN)/python bench/digest.py

bench-plan: $(STAMP) ## planning: 256 ranks x 2,000 tensors, and 50,000 tensors
	$(BIN)/python bench/plan.py

bench-safetensors: $(STAMP) ## model files: the disk, safetensors, its faster peers, tierckpt (root)
	$(BIN)/python bench/load_safetensors.py $(BENCH_ARGS)

bench-load: $(STAMP) ## load: the disk, stock PyTorch, safetensors, tierckpt (20 minutes, root)
	$(BIN)/python bench/load.py $(BENCH_ARGS)

bench-load-ranks: $(STAMP) ## four ranks save and two load, two save and four load (10 minutes, root)
	$(BIN)/python bench/load_ranks.py $(BENCH_ARGS)

bench-load-s3: $(STAMP) ## reads from S3: a bare socket, obstore, boto3, s5cmd, tierckpt (nginx, or an endpoint)
	$(BIN)/python bench/load_s3.py $(BENCH_ARGS)

bench-save: $(STAMP) ## save: the disk's limit, stock PyTorch, tierckpt (25 minutes)
	$(BIN)/python bench/save.py $(BENCH_ARGS)

bench-state: $(STAMP) ## 50,000 small tensors: torch.save and torch.load, stock DCP, Checkpointer (5 minutes)
	$(BIN)/python bench/state.py $(BENCH_ARGS)

bench-replay: $(STAMP) ## a save that moves over several steps, on a throttled link (3 minutes)
	$(BIN)/python bench/replay.py

bench-near-storage: $(STAMP) ## an optimizer whose state lies on the SSD, beside one in the trainer (2 minutes)
	$(BIN)/python bench/near_storage.py $(BENCH_ARGS)

bench-gpu: $(STAMP) ## a GPT that trains while it is saved, beside PyTorch's pinned stager (a CUDA device)
	$(BIN)/python bench/gpu.py $(BENCH_ARGS)

bench-hosts: $(STAMP) ## Trainer, Lightning, Accelerate, from_pretrained and hf download, beside their own ways (6 minutes)
	$(BIN)/python bench/hosts.py $(BENCH_ARGS)

bench-serve: $(STAMP) ## one agent on one core serving chunks, beside nginx and a bare sendfile
	$(BIN)/python bench/serve.py $(BENCH_ARGS)

bench-fanout: $(STAMP) ## one model to N nodes in network namespaces (40 minutes, root)
	$(BIN)/python bench/fanout.py $(BENCH_ARGS)

bench-fanout-simulation: $(STAMP) ## the same placement and schedule under a virtual clock, up to 4,096 nodes
	$(BIN)/python bench/fanout_simulation.py $(BENCH_ARGS)

clean: ## remove what builds and tests leave, the environment included
	rm -rf .venv .venv-frameworks .venv-matrix .services .demo build dist site bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
