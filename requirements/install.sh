#!/usr/bin/env bash
# Make a virtual environment that holds one of this folder's sets, and the project in editable form.
#
#   requirements/install.sh VENV runtime|dev
#
# Does nothing if VENV already holds exactly this. PYTHON names the interpreter to start from. The development set also
# compiles the emulated CUDA devices of the tests, which are cached for all environments of the user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:?usage: requirements/install.sh VENV runtime|dev}
set=${2:?usage: requirements/install.sh VENV runtime|dev}
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null; then
    echo "$python is not found: install Python 3.10 or newer, or set PYTHON to one" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "$("$python" --version) is too old: Python 3.10 or newer is needed; set PYTHON to one" >&2
    exit 2
fi

# What the environment depends on: the interpreter, where it lies, the pinned versions, and what is compiled.
fingerprint=$({
    "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
    pwd
    cat pyproject.toml setup.py requirements/*
    find megatron -name '*.cpp' -o -name '*.h' | LC_ALL=C sort | xargs cat
} | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')

build_emulator() {
    if [ "$set" = dev ] && [ -f tests/emulated_cuda/build.py ]; then "$venv/bin/python" -m tests.emulated_cuda.build; fi
}

# The development set holds the runtime set, so either will do for running.
for held in "$set" dev; do
    stamp="$venv/installed-$held"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ]; then
        # Its own cache knows whether its sources have changed.
        build_emulator
        exit 0
    fi
done

echo "== installing requirements/$set.txt and the project into $venv"
rm -f "$venv"/installed-*
if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -c \
    "import sys; sys.exit(sys.version != '''$("$python" -c 'import sys; print(sys.version)')''')"; then
    if ! "$python" -m venv --clear "$venv"; then
        echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 2
    fi
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install -qq -r "requirements/$set.txt"
# The pinned set holds the build requirements, so nothing is fetched for an isolated build environment.
"$venv/bin/python" -m pip install -qq --no-build-isolation --no-deps --editable .
echo "$fingerprint" >"$venv/installed-$set"
build_emulator
