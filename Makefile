# Every target installs what it needs into .venv on first use; later calls start at once.
PYTHON ?= python3
BIN    := .venv/bin

.PHONY: demo test fuzz lowest lint bench interop docs web wheel clean

demo: .venv/.ready
	$(BIN)/chasm demo

test: lint
	$(BIN)/python -m pytest

# New damage for every reader, recipe, run folder and study folder: five minutes on two cores. EXAMPLES=1000 fills an hour.
EXAMPLES ?= 100
fuzz: .venv/.ready
	CHASM_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -o addopts= -q -n 2 tests/fuzz

# The tests of what reads, trains, reports and talks, with the oldest versions that pyproject.toml allows.
lowest:
	mkdir -p build
	$(PYTHON) -c 'import itertools, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; e = p["optional-dependencies"]; \
	  print(*{r.replace(">=", "==") for r in itertools.chain(p["dependencies"], *map(e.get, "train data report hub cluster".split())) if ">=" in r}, sep="\n")' > build/lowest.txt
	test -x build/lowest/bin/python || $(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet --disable-pip-version-check -c build/lowest.txt -e '.[train,data,report,hub,cluster]' pytest hypothesis
	build/lowest/bin/python -m pytest -o addopts= -q --ignore=tests/train/test_export.py tests/common tests/data tests/train tests/models tests/studies/test_slurm.py tests/cli/test_train_cli.py tests/cli/test_data_cli.py tests/cli/test_errors.py

lint: .venv/.ready
	$(BIN)/ruff check src tests benchmarks docs examples setup.py
	$(BIN)/ruff format --check src tests benchmarks docs examples
	$(BIN)/mypy

# Tests against other people's programs, from the packages of Debian or Ubuntu, PyPI and npm. Only what is missing is
# installed. `make test` neither needs nor runs them.
PROGRAMS := bart:bart ismrmrd_generate_cartesian_shepp_logan:ismrmrd-tools dcm2niix:dcm2niix dcmdump:dcmtk dciodvfy:dicom3tools \
  chromium:chromium node:nodejs npm:npm
interop: .venv/.ready
	missing=$$(for pair in $(PROGRAMS); do command -v $${pair%:*} > /dev/null || echo $${pair#*:}; done); \
	  test -z "$$missing" || $$(command -v sudo) apt-get install -y --no-install-recommends $$missing
	cd web && npm ci --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt openvino wandb mlflow-skinny
	$(BIN)/python -m pytest -m interop tests/interop
	$(BIN)/python -m pytest tests/train/test_trackers.py

# Copies the libraries of the page that `chasm app` shows from npm into the package. Needed only to change their versions.
web:
	cd web && npm ci --ignore-scripts --no-audit --no-fund && node vendor.mjs

bench: .venv/.ready
	$(BIN)/python benchmarks/operator_cpu.py

# The site, into build/site: pages, API reference, examples that are executed. Needs no network; warnings are errors.
docs: .venv/.docs-ready
	rm -rf build/doctrees build/site docs/api/objects docs/gallery
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/site
	$(BIN)/python docs/site_tools/check.py build/site
	$(BIN)/python -m pytest tests/docs tests/test_house.py -k "examples or docs"

# Source archive and wheel, into dist/. The same commit gives the same bytes.
wheel: .venv/.ready
	rm -rf dist build/lib build/bdist.*
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# One environment for all targets: made again only when the pins or the declared dependencies change. Networks of timm and
# deepinv are tested, too; both want torchvision, and that wants a torch of its own build, so none brings its dependencies.
.venv/.ready: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "chasm needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchvision timm deepinv
	touch $@

.venv/.docs-ready: .venv/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  docs/api/objects docs/gallery docs/commands docs/generated docs/repository docs/_static/pictures-data.js
