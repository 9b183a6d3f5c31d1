#!/usr/bin/env bash
# Everything that CI checks: style, types, unit tests, then the tests against the real models.
# Arguments go to pytest instead of the default selection: scripts/test.sh -m "not slow"
. "$(dirname "$0")/environment.sh"
make_environment "dev,verify"
scripts/mcore_lane.sh

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export GLMCONV_MCORE_NEXT=$PWD/.lanes/mcore-next

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
failed=0
# By file: what a module makes is made once, and its mounts and traced children have one worker.
.venv/bin/python -m pytest -m "not slow" -n 2 --dist loadfile || failed=1
.venv/bin/python -m pytest -m slow || failed=1
exit $failed
