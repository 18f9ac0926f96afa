# Each target does all of its own set-up.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.run
	$(BIN)/specdec demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes at the first time)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes at the first time)"
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build *.egg-info
