#!/usr/bin/env bash
# Sets up .venv, then runs linters, the layer check, the type checker and the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh
.venv/bin/ruff check dynaxla tests benchmarks examples
.venv/bin/ruff format --check dynaxla tests benchmarks examples
.venv/bin/lint-imports
.venv/bin/mypy
.venv/bin/python -m pytest --numprocesses 2 --dist worksteal "$@"
