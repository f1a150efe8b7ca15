#!/usr/bin/env bash
# Set up a fresh machine and run the default tests. Arguments go to pytest: bash tests/run.sh -k checkpoint
#
# The environment is made in .venv (or where VENV says) and used again until what it is made from changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
bash requirements/install.sh "$venv" dev
export OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest "$@"
