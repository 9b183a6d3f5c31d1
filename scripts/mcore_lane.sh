#!/usr/bin/env bash
# A second megatron-core beside the environment's own, so that both supported ends are tested.
# megatron-core >= 0.17 asks for Python 3.12; 0.19.2 runs on 3.11 as a test lane all the same.
set -euo pipefail
cd "$(dirname "$0")/.."
lane=.lanes/mcore-next
if [ ! -e "$lane/.done" ]; then
    rm -rf "$lane"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        --ignore-requires-python --target "$lane" megatron-core==0.19.2
    touch "$lane/.done"
fi
