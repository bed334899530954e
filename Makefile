# Every target installs what it needs into .venv first (nothing, when that is done already).
.PHONY: help setup demo test check example

help:
	@echo "make demo     near-data fine-tuning against the plain way, on real photographs (ARGS='--epochs 1')"
	@echo "make test     the test suite (ARGS='-k cli')"
	@echo "make check    format, lint, types, layers"
	@echo "make example  examples/finetune.py"
	@echo "make setup    only install into .venv"

setup:
	@scripts/setup

demo: setup
	@.venv/bin/upriver demo $(ARGS)

test: setup
	@scripts/test $(ARGS)

check: setup
	@scripts/check

example: setup
	@.venv/bin/python examples/finetune.py
