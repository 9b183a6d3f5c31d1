# Sourced by the other scripts: makes .venv with glmconv and what the caller asks for.
# Usage: . scripts/environment.sh EXTRAS [PACKAGE…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make_environment() {
    local extras=$1
    shift
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "glmconv needs Python 3.11 or newer; name one with PYTHON=…" >&2
        exit 2
    fi
    if [ ! -x .venv/bin/python ]; then
        "$python" -m venv .venv
    fi
    # One torch that is a CPU build where the platform has one, and the versions that the figures
    # in docs/evidence were made with.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt torch
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}" "$@"
}
