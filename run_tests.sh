#!/usr/bin/env bash
# Sets up .venv, then runs the tests and beside them linters, the layer check and the type checker. Arguments go to pytest;
# --full runs also the tests that are marked long, as CI does.
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh
unset PYTHONDONTWRITEBYTECODE # some twenty processes import the package and the tests
report="$(mktemp)"
trap 'rm -f "$report"' EXIT

check() {
    .venv/bin/ruff check dynaxla tests benchmarks conformance examples &&
        .venv/bin/ruff format --check dynaxla tests benchmarks conformance examples &&
        .venv/bin/lint-imports &&
        .venv/bin/mypy
}

check >"$report" 2>&1 &
failed=0
.venv/bin/python -m pytest --numprocesses 2 --dist worksteal "$@" || failed=$?
wait $! || failed=$?
cat "$report"
exit "$failed"
