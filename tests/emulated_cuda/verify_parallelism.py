"""Run ``tools/verify_parallelism.py --emulate-cuda``: activate the emulator, then run the cells on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli import verify_parallelism
from megatron.verification.cells import MAX_WORLD_SIZE
from tests.emulated_cuda.activation import activate
from tests.emulated_cuda.build import BuildError, built_libraries
from tests.emulated_cuda.environment import emulated_environment


def main() -> int:
    """Verify and return the exit status of the command; 2 if there can be no emulator."""
    arguments = verify_parallelism.parse_arguments(None)
    try:
        variables = emulated_environment(
            MAX_WORLD_SIZE, arguments.emulate_cuda, triton=arguments.emulated_triton == "interpreter"
        )
        built_libraries(lambda line: print(line, file=sys.stderr))
    except (ValueError, BuildError) as error:
        print(f"error: --emulate-cuda: {error}", file=sys.stderr)
        return 2
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    activate()
    from tests.emulated_cuda.verification import emulated_verifier

    return verify_parallelism.main(None, emulated_verifier)


if __name__ == "__main__":
    sys.exit(main())
