# Every target installs what it needs into .venv first; only Python 3.11 or newer must be there.

PYTHON ?= python3
bin := .venv/bin
stamp := .venv/.installed

.PHONY: install test test-all gpu versions check golden demo clean

install: $(stamp)

$(stamp): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(bin)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

test: check
	$(bin)/python -m pytest -n auto --dist loadfile -m "not slow and not gpu"

test-all: check
	$(bin)/python -m pytest -n auto --dist loadfile

# What needs a GPU, on one; skipped where torch sees none.
gpu: install
	$(bin)/python -m pytest -m gpu

# By hand: an hour, and gigabytes where pip brings builds of torch for CUDA. VERSIONS="2.9.1 2.15.0"
# tries these alone.
versions: install
	$(bin)/python tests/versions.py $(VERSIONS)

check: install
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

# The committed scripts of every spec: review the difference before committing it.
golden: install
	for spec in specs/*.yaml; do $(bin)/ppc compile $$spec || exit 1; done
	$(bin)/python docs/scripts.py

demo: install
	$(bin)/ppc compile specs/quickstart.yaml -o build/demo
	cd build/demo && $(abspath $(bin))/torchrun --standalone --nproc-per-node 2 run.py
	$(bin)/python specs/sample.py build/demo

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
