PY := .venv/bin/python
PYTHON ?= python3

.PHONY: help venv demo soak soak-gpu test test-compat test-releases test-kernels test-unit lint bench coverage clean
.DEFAULT_GOAL := help

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

venv: ## Make .venv, or bring it up to date; every other target does so first
	@scripts/venv >/dev/null

demo: venv ## Damage the KV cache of a small server, without and with the canary
	@$(PY) -m kvcanary_plugin.cli demo

# What needs no server runs on every core at once; a server wants them for itself. ARGS may choose tests of one part only,
# which to the others is no failure.
SIDE_BY_SIDE := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto
OR_NONE := $(if $(ARGS),|| [ $$? = 5 ])

test: venv ## Run all tests; ARGS="-k chain" and the like go to pytest
	$(MAKE) test-unit
	$(MAKE) test-kernels
	$(MAKE) test-live

# The newest SGLang and its dependencies warn about each other; that is not ours to fail on.
test-compat: ## Run the tests with real servers, of the seams and of the pools, against the newest SGLang
	OMP_NUM_THREADS=1 $$(scripts/venv cpu-0.5.23) -m pytest -n auto -W default \
	  tests/unit/test_activation.py tests/unit/test_allocators.py tests/unit/test_doctor*.py \
	  tests/unit/test_patch.py tests/unit/test_patches.py tests/unit/test_qsa.py tests/pools $(ARGS) $(OR_NONE)
	$$(scripts/venv cpu-0.5.23) -m pytest -W default tests/live $(ARGS) $(OR_NONE)

# Pages, because they take every way in which any release frees slots.
test-releases: ## Look for every injected fault in servers of every supported SGLang release; about 25 minutes
	scripts/releases tests/live/test_faults.py -k page16 $(ARGS)

# Triton decides between compiler and interpreter when it is imported, so these need a process of their own.
test-kernels: venv ## Run the Triton kernels in the interpreter against the references
	TRITON_INTERPRET=1 $(SIDE_BY_SIDE) tests/kernels $(ARGS) $(OR_NONE)

test-unit: venv ## Run the tests that need neither a server nor a GPU
	$(SIDE_BY_SIDE) -m "not live and not gpu" --ignore tests/kernels $(ARGS) $(OR_NONE)

test-live: venv ## Run the tests with real servers
	$(PY) -m pytest -m live $(ARGS) $(OR_NONE)

lint: venv ## Check style, format and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	scripts/typecheck $(PY)

bench: venv ## Measure what the canary costs a decoding server and the storage tier; ARGS go to the server's part
	$(PY) benchmarks/server/decode_overhead.py $(ARGS)
	$(PY) benchmarks/tiers/index.py
	$(PY) benchmarks/tiers/page_file.py

soak: venv ## Half an hour of clean traffic in several modes, in which nothing may be reported; ARGS="--minutes 5"
	$(PY) benchmarks/server/soak.py $(ARGS)

soak-gpu: ## Clean minutes and drills of many modes side by side on a GPU; ARGS="--modes all --minutes 5"
	$(PYTHON) benchmarks/server/gpu_soak.py $(ARGS)

coverage: venv ## Write docs/coverage.md from the adapters
	@scripts/coverage $(PY)

clean: ## Remove what was built here; the shared environment in the user's cache stays
	rm -rf .venv .venv-* build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
