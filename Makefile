# make demo: set up .venv and generate text from the demo checkpoint.   make test: set up and run the tests.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell ./find-python)

# make test TESTS=tests/serving runs a part: files, folders, or any other arguments of pytest.
TESTS ?=

# A commit is checked by one share of what takes long, which its hash chooses. SHARES=all runs all of them.
SHARES ?=
SLOW_SHARES := 8
AOT_SHARES := 4
NEWEST_SHARES := 4
COMMIT := $(shell git rev-parse --short=8 HEAD 2>/dev/null || echo 00000000)
share = $(if $(filter all,$(SHARES)),,--share $$((0x$(COMMIT) % $(1) + 1))/$(1))

# Tests of a file share what they compile; those that are few and long are better balanced.
COUNTED := -n 2 -o console_output_style=count
BY_FILE := $(COUNTED) --dist loadgroup
BALANCED := $(COUNTED) --dist worksteal

.PHONY: demo docs test interpreted slow slow-share aot newest peers vllm aisimulate conformance ray lint types contracts clean

demo: .venv/.kernels
	.venv/bin/jaxinfer generate examples/demo_model --max-tokens 56 --temperature 0.7 --top-p 0.9 --seed 0 \
	  --prompt $$'    def test_read(self):\n        with open(self.path) as f:\n'

# Fails too if the tests have become too expensive (benchmarks/suite.py).
test: .venv/.dev
	$(if $(TESTS),.venv/bin/python -m pytest $(BY_FILE) $(TESTS),.venv/bin/python -m benchmarks.suite --check -q $(BY_FILE))

# GPU kernels in Mosaic's interpreter, which looks for races.
interpreted: .venv/.dev
	.venv/bin/python -m pytest $(BALANCED) -m interpreted

slow: .venv/.dev .venv-conformance/.conformance .venv-ray/.ray
	.venv/bin/python -m pytest -m 'slow and not aot and not gpu'

# Soaks are left to `make slow`.
slow-share: .venv/.dev .venv-conformance/.conformance
	.venv/bin/python -m pytest $(BALANCED) -m 'slow and not soak and not aot and not gpu' $(call share,$(SLOW_SHARES))

# Compiling for a GPU that is not there needs XLA's CUDA compiler, which other CPU work should not load.
aot: .venv-aot/.aot
	.venv-aot/bin/python -m pytest $(BALANCED) -m aot $(call share,$(AOT_SHARES))

# The newest JAX, where it could break us first. GPU kernels are for JAX 0.11 (pallas_kernels/dispatch.py).
newest: .venv-newest/.newest
	.venv-newest/bin/python -m pytest $(BALANCED) $(call share,$(NEWEST_SHARES)) tests/models tests/compiled tests/generation/lora/test_peft.py $(addprefix tests/kernels/test_,linear.py weights.py kv_pages.py rotary.py)

peers: .venv-peers/.peers

conformance: .venv-conformance/.conformance

ray: .venv-ray/.ray

# A server that benchmarks.serving compares with; its packages contradict those of the other peers.
vllm: .venv-vllm/.vllm

# A simulator that benchmarks.planner compares with.
aisimulate: .venv-aisimulate/.aisimulate

lint: .venv/.dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check

types: .venv/.dev
	.venv/bin/pyright

# The site in build/site; dead links are errors. Its search needs a server: python -m http.server -d build/site
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build

contracts: .venv/.dev
	.venv/bin/lint-imports --no-cache  # which would know modules that are gone, behind links

clean:
	rm -rf .venv .venv-aot .venv-newest .venv-peers .venv-vllm .venv-aisimulate .venv-conformance .venv-ray build *.egg-info

%/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "jaxinfer needs Python 3.12 or newer: install python3.12 (with venv), pyenv's 3.12, or uv." >&2; exit 1; }
	@echo "Setting up $* with $(PYTHON)"
	@$(PYTHON) -m venv $*
	@./pip-install $* --upgrade pip

.venv/.base: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@./pip-install .venv -e . -c constraints.txt
	@touch $@

# The CPU kernels, while people wait for pip anyway; without a compiler it says so, and XLA runs.
.venv/.kernels: .venv/.base $(wildcard pallas_kernels/cpu/* pallas_kernels/*/cpu/*)
	@.venv/bin/python -m jaxinfer.compiled.cpu_build
	@touch $@

.venv/.dev: .venv/.base
	@./pip-install .venv -e '.[dev,docs,all]' -c constraints.txt
	@touch $@

# Only the compiler is installed here, which .venv must not have: JAX would look for a GPU. The rest is that of .venv.
.venv-aot/.aot: .venv/.dev .venv-aot/pyvenv.cfg
	@for site in $$(cd .venv && echo lib/python*/site-packages); do echo "../../../../.venv/$$site" > .venv-aot/$$site/shared.pth; done
	@./pip-install .venv-aot -e '.[aot]' -c constraints.txt
	@touch $@

# Ray, which pins packages, for its example. The rest is that of .venv.
.venv-ray/.ray: .venv/.dev .venv-ray/pyvenv.cfg
	@for site in $$(cd .venv && echo lib/python*/site-packages); do echo "../../../../.venv/$$site" > .venv-ray/$$site/shared.pth; done
	@./pip-install .venv-ray -e '.[ray]' -c constraints.txt
	@touch $@

.venv-newest/.newest: .venv-newest/pyvenv.cfg pyproject.toml
	@./pip-install .venv-newest --upgrade -e '.[dev,images]'
	@touch $@

# The engines that benchmarks compare with, in an interpreter of their own: PyTorch's CPU build may exist for one Python only.
.venv-peers/pyvenv.cfg: PYTHON := $(or $(PEERS_PYTHON),$(PYTHON))
.venv-peers/.peers: .venv-peers/pyvenv.cfg benchmarks/peers/requirements.txt benchmarks/peers/optional.txt
	@./pip-install .venv-peers -r benchmarks/peers/requirements.txt
	@./pip-install .venv-peers -r benchmarks/peers/optional.txt || echo "Benchmarks leave out what is optional."
	@touch $@

# Clients and checkers of the OpenAI API, which need other packages than ours. Tests of what is not here are skipped.
.venv-conformance/.conformance: .venv-conformance/pyvenv.cfg tests/conformance/requirements.txt tests/conformance/alone.txt tests/conformance/package.json
	@./pip-install .venv-conformance -r tests/conformance/requirements.txt
	@./pip-install .venv-conformance --no-deps -r tests/conformance/alone.txt
	@cp tests/conformance/package.json .venv-conformance
	@npm install --silent --no-package-lock --prefix .venv-conformance || echo "The tests of npm's client are left out."
	@touch $@

.venv-aisimulate/pyvenv.cfg: PYTHON := $(or $(PEERS_PYTHON),$(PYTHON))
.venv-aisimulate/.aisimulate: .venv-aisimulate/pyvenv.cfg benchmarks/peers/aisimulate.txt
	@./pip-install .venv-aisimulate -r benchmarks/peers/aisimulate.txt
	@touch $@

# uv resolves them, which pip does not in minutes. The CUDA builds of three packages would break every import.
.venv-vllm/pyvenv.cfg: PYTHON := $(or $(PEERS_PYTHON),$(PYTHON))
.venv-vllm/.vllm: .venv-vllm/pyvenv.cfg benchmarks/peers/vllm.txt
	@./pip-install .venv-vllm uv
	@.venv-vllm/bin/uv pip install --python .venv-vllm/bin/python --index-strategy unsafe-best-match \
	  -r benchmarks/peers/vllm.txt $(addprefix --find-links ,$(PIP_FIND_LINKS))
	@.venv-vllm/bin/uv pip uninstall --python .venv-vllm/bin/python torchvision torchaudio torchcodec
	@touch $@
