#!/usr/bin/env bash
# Set up a fresh machine and run the default tests. Arguments go to pytest:
#
#   bash tests/run.sh                     the default tests: about five minutes on two cores
#   bash tests/run.sh -m full             the further tests that .ci/run runs: about half an hour on slow cores
#   bash tests/run.sh tests/unit/core     all tests of a folder or file but the long ones
#   bash tests/run.sh -m gpu              the tests that need a CUDA device; with --emulate-cuda on emulated ones
#
# The environment is made in .venv (or where VENV says) and used again until what it is made from changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
bash requirements/install.sh "$venv" dev
export OMP_NUM_THREADS=1
# The tests start hundreds of interpreters, each of which would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
# The tests write many small files, each safely: on a disk that is most of their time. Failed tests leave theirs there.
memory=/dev/shm
if [ -z "${TMPDIR:-}" ] && [ "$(df --output=avail -B1G "$memory" 2>/dev/null | tail -1)" -ge 8 ] 2>/dev/null; then
    export TMPDIR=$memory
fi
names_a_path=
for word in "$@"; do
    if [ -e "${word%%::*}" ]; then names_a_path=1; fi
done
if [ -z "$names_a_path" ]; then
    # Many tests leave a core idle: they wait for ranks, for disks and for each other. A file stays in one process, whose
    # tests share their set-up. Files with few tests take longest; without their order by number the last ones are short.
    set -- --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
    echo "== pytest $*: three processes collect the tests (about 20 s), then each dot is a test that passed"
fi
exec "$venv/bin/python" -m pytest "$@"
