"""The machine that the GPU tests measure, and the report that they leave."""

from __future__ import annotations

import functools
import os
import platform
import time
from pathlib import Path

import pytest
import torch

from megatron.core.device import Device
from megatron.core.optimizer import optimizer, update_bucket
from megatron.training.initialize import LaunchEnvironment
from tests.emulated_cuda.activation import is_active
from tests.emulated_cuda.environment import TRITON_VARIABLE
from tests.gpu.report import Report
from tests.gpu.timing import gpu_type
from tests.harness.training_run import REPOSITORY, run_command

FOLDER_VARIABLE = "GPU_REPORT"
_SMALL_BUCKET = 2**12


@pytest.fixture(scope="session")
def num_gpus() -> int:
    """Return the number of GPUs; without one there is nothing to run."""
    if not torch.cuda.is_available():
        pytest.exit("the tests marked gpu need a CUDA device, and torch sees none: ask python tools/doctor.py", 2)
    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def is_emulated() -> bool:
    """Return whether the devices are emulated (``--emulate-cuda``): sizes are small then, and times mean nothing."""
    return is_active()


@pytest.fixture
def _measures_speed(is_emulated: bool) -> None:
    """Skip a test of speeds on emulated devices."""
    if is_emulated:
        pytest.skip("a speed is measured on a GPU only, and these devices are emulated (--emulate-cuda)")


@pytest.fixture
def _small_buckets(is_emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small parameters on emulated devices into several buckets, so that their copies overlap as on a GPU."""
    if is_emulated:
        cut = functools.partial(update_bucket.cut_into_buckets, max_elements=_SMALL_BUCKET)
        monkeypatch.setattr(optimizer, "cut_into_buckets", cut)


@pytest.fixture
def _cells_without_triton(is_emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide Triton from the processes of cells on emulated devices: interpreted, one cell takes a minute or more.

    The kernels' own tests interpret the programs.
    """
    if is_emulated:
        monkeypatch.setenv(TRITON_VARIABLE, "absent")
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="session")
def device(num_gpus: int) -> Device:
    return Device("cuda", 0)


@pytest.fixture(scope="session")
def gpu() -> str | None:
    """Return the dry run's name of the GPU, if it knows it."""
    return gpu_type(torch.cuda.get_device_name(0))


def _doctor_findings(folder: Path) -> list[str]:
    """Return what the doctor warns of; it measures copies and matmuls, which take minutes on emulated devices."""
    from megatron.cli.doctor.examination import Request, examine

    found = examine(Request(os.environ, LaunchEnvironment(), folder))
    return [finding.describe() for finding in found if finding.status in ("warning", "wrong")]


@pytest.fixture(scope="session")
def report(num_gpus: int, is_emulated: bool, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return the report of this session, in a folder that ``GPU_REPORT`` names."""
    # A report of a GPU stays where it is.
    usual = tmp_path_factory.mktemp("emulated_report") if is_emulated else REPOSITORY / "gpu_report"
    report = Report(Path(os.environ.get(FOLDER_VARIABLE, usual)).resolve())
    commit = run_command(["git", "rev-parse", "HEAD"]).stdout.strip() or "not a git checkout"
    major, minor = torch.cuda.get_device_capability(0)
    report.machine = {
        "figures": "emulated: no GPU was used, and no time is a measurement" if is_emulated else "measured",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit,
        "GPUs": f"{num_gpus} x {torch.cuda.get_device_name(0)}, capability {major}.{minor}",
        "memory": f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB each",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}",
        "system": f"Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "doctor": [] if is_emulated else _doctor_findings(report.folder),
    }
    report.write()
    print(f"\nthe report goes to {report.folder}")
    return report
