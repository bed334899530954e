# Every target installs what it needs into .venv first (nothing, when that is done already).
.PHONY: help setup demo test test-full check docs example

help:
	@echo "make demo       near-data fine-tuning against the plain way, on real photographs (ARGS='--epochs 1')"
	@echo "make test       the tests that every change must pass (ARGS='-k cli', ARGS='--ledger costs.tsv')"
	@echo "make test-full  all tests, also those that take long by nature: before a release"
	@echo "make check      format, lint, types, layers"
	@echo "make docs       the documentation as a site, into site/; a broken link fails"
	@echo "make example    examples/finetune.py"
	@echo "make setup      only install into .venv"

setup:
	@scripts/setup

demo: setup
	@.venv/bin/upriver demo $(ARGS)

test: setup
	@scripts/test $(ARGS)

test-full: setup
	@scripts/test --full $(ARGS)

check: setup
	@scripts/check

docs: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
	@echo site/index.html

example: setup
	@.venv/bin/python examples/finetune.py
