#!/usr/bin/env bash
# Sets up .venv, then serves SmolLM2 (real weights) over OpenAI's HTTP interface, with a page to chat on at
# http://localhost:8000/. Arguments: those of `python -m dynaxla serve`.
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh server
exec .venv/bin/python -m dynaxla serve "$@"
