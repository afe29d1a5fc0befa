# Every target builds .venv first when it is not there. PYTHON chooses the interpreter it is built from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each of the many processes would compile every module again.
export PYTHONDONTWRITEBYTECODE :=
# Bytecode is compiled at the first import: most modules of torch are never imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# What the demo needs, and what developers have on top of it.
USER_STAMP := $(VENV)/.user
DEV_STAMP := $(VENV)/.dev

.PHONY: demo test check matrix docs soak mutants release-check clean

demo: $(USER_STAMP)
	$(BIN)/fastvid demo

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# What depends on versions, with Debian's ffmpeg, the newest and the lowest versions, in throw-away environments
# (noxfile.py). SESSIONS names some of them: make matrix SESSIONS="lowest newest-3.13".
matrix: $(DEV_STAMP)
	$(BIN)/nox $(if $(SESSIONS),--session $(SESSIONS))

docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The long runs: minutes to hours, results in bench/results.
soak: $(DEV_STAMP)
	$(BIN)/python -m pytest -m soak --timeout 14400

# Mutation testing of what must never be wrong; resumes, results in bench/results/mutants.json. MUTANTS has arguments:
# make mutants MUTANTS="--retry-survivors fastvid/format/packets.py".
mutants: $(DEV_STAMP)
	nice $(BIN)/nox --session mutants -- $(MUTANTS)

# Wheel and sdist into clean environments, without extras and with each: a quarter of an hour and a package index.
# FASTVID_PYTHON=python3.13 makes the environments of another Python.
release-check: $(DEV_STAMP)
	$(BIN)/python -m pytest -m soak tests/test_release.py

$(USER_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[torch,prepare]'
	touch $(USER_STAMP)

$(DEV_STAMP): $(USER_STAMP)
	$(PIP) -e '.[torch,prepare,dali-cuda13,object-stores,flow,ray,docs,dev]'
	touch $(DEV_STAMP)

clean:
	rm -rf $(VENV) runs build dist
