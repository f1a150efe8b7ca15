#!/usr/bin/env bash
# Set up a fresh machine and run the default tests, three files at a time. Arguments go to pytest, which then runs one
# file at a time: bash tests/run.sh -k checkpoint
#
# The environment is made in .venv (or where VENV says) and used again until what it is made from changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
bash requirements/install.sh "$venv" dev
export OMP_NUM_THREADS=1
# The tests start hundreds of interpreters, each of which would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
# Many tests leave a core idle: they wait for ranks, for disks and for each other. A file stays in one process, whose
# tests share what they set up.
[ $# -gt 0 ] || set -- --numprocesses 3 --dist loadfile
exec "$venv/bin/python" -m pytest "$@"
