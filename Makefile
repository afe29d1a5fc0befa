# Every target builds .venv first when it is not there. PYTHON chooses the interpreter it is built from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check soak clean

demo: $(STAMP)
	$(BIN)/fastvid demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The long runs: minutes to hours, results in bench/results.
soak: $(STAMP)
	$(BIN)/python -m pytest -m soak --timeout 14400

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dali-cuda13,object-stores,report,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build dist
