"""The environment of a run on emulated devices. This module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.emulated_cuda.gpus import GPUS

GPU_VARIABLE = "EMULATED_CUDA"
"""The name of a GPU type; set, it makes every Python process of a run use the emulator."""
DEVICES_VARIABLE = "EMULATED_CUDA_DEVICES"
MEMORY_VARIABLE = "EMULATED_CUDA_MEMORY"
TRITON_VARIABLE = "EMULATED_CUDA_TRITON"
REPORTS_VARIABLE = "EMULATED_CUDA_REPORTS"
"""A file to which every process appends its reports."""

REPOSITORY = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).with_name("startup")


def emulated_environment(
    num_devices: int = 1,
    gpu: str = "h100",
    *,
    triton: bool = True,
    reports: Path | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables with which a command runs on emulated devices.

    Triton programs are interpreted. Without ``triton`` the package is absent, which is much faster.

    Raises:
        ValueError: the GPU type is unknown.
    """
    if gpu not in GPUS:
        raise ValueError(f"{gpu!r} is no emulated GPU type; {', '.join(GPUS)} are")
    variables = dict(os.environ if base is None else base)
    path = [str(STARTUP), str(REPOSITORY), *filter(None, [variables.get("PYTHONPATH", "")])]
    variables |= {
        GPU_VARIABLE: gpu,
        DEVICES_VARIABLE: str(num_devices),
        MEMORY_VARIABLE: str(GPUS[gpu].total_memory),
        "PYTHONPATH": os.pathsep.join(path),
    }
    variables |= {"TRITON_INTERPRET": "1"} if triton else {TRITON_VARIABLE: "absent"}
    if reports is not None:
        variables[REPORTS_VARIABLE] = str(reports)
    # Tests hide GPUs by this variable.
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(num_devices)))
    # It would keep a run on the CPU.
    variables.pop("MEGATRON_DEVICE", None)
    return variables
