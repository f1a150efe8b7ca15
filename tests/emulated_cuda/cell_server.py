"""A process with emulated devices that verifies cells for tests, whose own process has none.

python -m tests.emulated_cuda.cell_server FILE_DESCRIPTOR DTYPE
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from types import TracebackType

from megatron.training.model_setup import ModelProvider
from megatron.verification.cells import MAX_WORLD_SIZE, Cell
from megatron.verification.verifier import CellReport
from tests.emulated_cuda.build import built_libraries
from tests.emulated_cuda.environment import REPOSITORY, emulated_environment

_END_S = 30.0


class EmulatedVerifier:
    """Verify cells on emulated devices, all in one set of processes."""

    def __init__(self, dtype: str = "float64", *, triton: bool = False) -> None:
        built_libraries()
        self._connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "tests.emulated_cuda.cell_server", str(theirs.fileno()), dtype]
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=emulated_environment(MAX_WORLD_SIZE, triton=triton),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def check(self, cell: Cell, provider: ModelProvider | None = None) -> CellReport:
        """Return how a cell compares with one process on the CPU; ``provider`` makes another model on the devices.

        Raises:
            EOFError: the process is gone.
        """
        self._connection.send((cell, provider))
        report = self._connection.recv()
        assert isinstance(report, CellReport)
        return report

    def __enter__(self) -> EmulatedVerifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        status = self._process.wait(_END_S)
        assert status == 0, f"the process of the emulated devices ended with status {status}"


def _serve(connection: Connection, dtype: str) -> None:
    from tests.emulated_cuda.verification import emulated_verifier

    with emulated_verifier(MAX_WORLD_SIZE, dtype) as verifier:
        usual_provider = verifier.model_provider
        while True:
            try:
                cell, provider = connection.recv()
            except EOFError:
                return
            verifier.model_provider = usual_provider if provider is None else provider
            connection.send(verifier.check(cell))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2])
