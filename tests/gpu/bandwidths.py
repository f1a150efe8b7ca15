"""Bandwidth of collectives, measured by the processes of a launcher: torchrun … -m tests.gpu.bandwidths FILE BYTES …"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.cli.doctor.benchmarks import OPERATIONS, REDUCING, REDUCTIONS, measure_collective
from megatron.core.device import select_device
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.training.initialize import initialize_distributed, read_launch_environment, shut_down
from tests.harness.training_run import CommandResult, launch_prefix, run_command


def measure_bandwidths(
    num_ranks: int, sizes: Sequence[int], folder: Path
) -> tuple[list[dict[str, Any]], CommandResult]:
    """Return a row for each operation and size that was measured, and the command that measured them."""
    path = folder / "bandwidths.json"
    path.unlink(missing_ok=True)
    # torchrun takes the name of a module where plain Python takes -m as well.
    command = [*launch_prefix(num_ranks), "-m", "tests.gpu.bandwidths", path, *map(str, sizes)]
    done = run_command(command, timeout_s=600.0)
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows, done


def main(path: str, *sizes: str) -> None:
    """Measure as one of the ranks; the first writes the file again after each row, so that a failure costs no other."""
    launch = read_launch_environment()
    device = select_device(launch.local_rank or 0)
    device.make_current()
    initialize_distributed(launch, device, device.default_backend, 5)
    world = create_parallel_state(ParallelSizes(dp=launch.world_size)).world
    rows: list[dict[str, Any]] = []
    for operation in OPERATIONS:
        for reduction in REDUCTIONS if operation in REDUCING else REDUCTIONS[:1]:
            for size in sizes:
                found = measure_collective(operation, int(size), world, device, reduction)
                rows.append(
                    {
                        "operation": f"{operation} {reduction}" if operation in REDUCING else operation,
                        "ranks": found.group_size,
                        "bytes": found.num_bytes,
                        "ms": found.seconds * 1e3,
                        "gb_s": found.bus_bytes_per_s / 1e9,
                    }
                )
                if launch.rank == 0:
                    Path(path).write_text(json.dumps(rows))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
