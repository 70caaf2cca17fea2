#!/usr/bin/env bash
# Sets up .venv, then embeds the sentences of a real text with real weights, compiled and in eager. Argument: a query.
set -euo pipefail
cd "$(dirname "$0")"
./setup_env.sh example
.venv/bin/python examples/embed_sentences.py "$@"
