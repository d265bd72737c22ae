# make demo    train on real digits on the XLA device
# make test    run every notebook and every test
# make docs    build the site in _docs/
# make browse  open every page of the site in headless Chromium, and type what users search for; ARGS=folder for screenshots
# make bench   time a training step beside other loops, JAX and the CPU; ARGS='--models convnet' for a part, in some five minutes
# make dist    build wheel and sdist in dist/, and check what a package index would
# make in-step   are notebooks and package in step? Shows what nbdev would change
# make types   check the types of what `fastai_xla.all` exports
# make foreign NBS=folder   run notebooks of others on the CPU and on XLA and compare;
#                           ARGS='--recipes tests/foreign/recipes/fastai --out results.csv'
# make tpu-check   compile the coverage table's cases for a TPU, without one; ARGS='--groups model' for a part
# All of them make .venv first, with everything that is needed.
# PYTHON=/path/to/python3.12 says which Python .venv is made with; otherwise the first here that fits
fits := import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))
pythons := python3 python3.13 python3.12 python3.11 python3.10
PYTHON ?= $(shell for p in $(pythons); do $$p -c '$(fits)' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# setuptools warns of what every editable installation is; modules are compiled as they are imported: all of them take a third of the time
editable := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile -e
TPU := $(if $(wildcard /dev/accel0 /dev/vfio/0),[tpu])

# some images forbid it, and each new process would compile all that it imports anew: 20 s where reading it takes 7
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test in-step dist types docs browse readme bench foreign tpu-check clean

demo: .venv/installed
	$(BIN)/fastai_xla_demo

test: .venv/installed-dev
	$(BIN)/python -m pytest $(ARGS)

dist: .venv/installed-dev
	rm -rf dist *.egg-info   # where an earlier list of files is kept
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

in-step: .venv/installed-dev
	$(BIN)/nbdev-clean
	$(BIN)/nbdev-export
	git diff --exit-code

types: .venv/installed-dev
	$(BIN)/python -m mypy --follow-imports=silent --ignore-missing-imports --warn-unused-ignores tests/typed_uses.py

docs: .venv/installed-docs
	$(BIN)/python docs/build.py

browse: .venv/installed-docs
	$(BIN)/python -m pip install --quiet playwright
	$(BIN)/python docs/browse.py _docs $(ARGS)

bench: .venv/installed-bench
	$(BIN)/python benchmarks/steps.py $(ARGS)

foreign: .venv/installed-dev
	$(BIN)/python -m tests.foreign $(NBS) $(ARGS)

tpu-check: .venv/installed-aot
	$(BIN)/python benchmarks/tpu_check.py $(ARGS)

readme: .venv/installed-docs
	$(BIN)/python docs/build.py readme

.venv/installed: settings.ini setup.py pyproject.toml
	@"$(PYTHON)" -c '$(fits)' 2>/dev/null || { echo 'fastai_xla takes Python 3.10 to 3.13: make ... PYTHON=/path/to/python3.12'; exit 1; }
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(editable) '.$(TPU)'
	touch $@

.venv/installed-%: .venv/installed
	$(editable) '.[$*]'
	touch $@

clean:
	rm -rf _docs _proc _build build dist *.egg-info
