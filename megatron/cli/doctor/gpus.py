"""Checks of GPUs: the driver, the devices that torch sees, and whether they are compatible."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.cli.doctor.host_checks import Finding, judge

_QUERY_TIMEOUT_S = 60.0
FIELDS = (
    *("index", "name", "driver_version", "memory.total", "memory.used", "persistence_mode", "compute_mode"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "clocks.sm", "clocks.max.sm"),
    *("clocks.applications.graphics", "pcie.link.width.current", "pcie.link.width.max", "temperature.gpu"),
)
"""Fields queried from nvidia-smi; see ``nvidia-smi --help-query-gpu``."""
_OLDEST_DRIVER: Mapping[int, tuple[int, ...]] = {11: (450, 80), 12: (525, 60), 13: (580,)}
"""Oldest Linux driver for each major version of CUDA, from NVIDIA's table of minor version compatibility."""
_MAX_USED_MIB = 1024.0
_MIN_CLOCK_SHARE = 0.95
_HOT_CELSIUS = 85.0


@dataclass(frozen=True)
class TorchCuda:
    """CUDA support and devices of torch; ``cuda`` is the version that torch was built for, None for a CPU build.

    ``architectures`` are those that torch's kernels were compiled for. ``peers`` lists, for each device, the devices
    that it can access directly.
    """

    cuda: str | None
    nccl: str | None = None
    names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    architectures: tuple[str, ...] = ()
    peers: tuple[tuple[int, ...], ...] = ()


def query_driver() -> str | None:
    """Return the CSV output of nvidia-smi, None without nvidia-smi, or an empty string if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def query_torch() -> TorchCuda:
    """Query torch's CUDA support and devices."""
    if not torch.cuda.is_available():
        return TorchCuda(torch.version.cuda)
    devices = range(torch.cuda.device_count())
    return TorchCuda(
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        names=tuple(torch.cuda.get_device_name(device) for device in devices),
        capabilities=tuple(torch.cuda.get_device_capability(device) for device in devices),
        architectures=tuple(torch.cuda.get_arch_list()),
        peers=tuple(
            tuple(other for other in devices if other != device and torch.cuda.can_device_access_peer(device, other))
            for device in devices
        ),
    )


def parse_driver(answer: str) -> list[dict[str, str]]:
    """Parse nvidia-smi's CSV output to one dictionary per GPU, by field name without the unit."""
    rows = list(csv.reader(answer.splitlines(), skipinitialspace=True))
    if not rows:
        return []
    names = [name.partition(" [")[0] for name in rows[0]]
    return [dict(zip(names, row)) for row in rows[1:] if len(row) == len(names)]


def examine_gpus(answer: str | None, seen: TorchCuda, visible: str | None) -> Iterator[Finding]:
    """Yield findings on the GPUs, from nvidia-smi's output, torch's devices and CUDA_VISIBLE_DEVICES."""
    if answer is None and not seen.names:
        yield Finding("skipped", "GPUs", "there is no NVIDIA driver: runs use the CPU, and no GPU is checked")
        return
    gpus = parse_driver(answer or "")
    if not gpus:
        yield Finding("warning", "nvidia-smi", "does not respond: clocks, memory errors and modes are not checked")
    elif seen.cuda is None:
        remedy = "install torch with CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield Finding("wrong", "GPUs", f"this torch is built for the CPU, but the node has {len(gpus)} GPUs", remedy)
    elif not seen.names:
        text = f"torch for CUDA {seen.cuda} sees none of the {len(gpus)} GPUs" + _visible(visible)
        yield Finding("wrong", "GPUs", text, "check CUDA_VISIBLE_DEVICES, the driver, and docker run --gpus all")
    yield from _examine_driver(gpus, seen)
    yield from _examine_seen(seen, len(gpus), visible)
    for gpu in gpus:
        yield from _examine_gpu(gpu)


def _examine_driver(gpus: Sequence[Mapping[str, str]], seen: TorchCuda) -> Iterator[Finding]:
    if not gpus or seen.cuda is None:
        return
    driver = gpus[0].get("driver_version", "")
    oldest = _OLDEST_DRIVER.get(int(seen.cuda.partition(".")[0]))
    parts = tuple(int(part) for part in driver.split(".") if part.isdecimal())
    is_old = oldest is not None and bool(parts) and parts < oldest
    needed = ".".join(map(str, oldest or ()))
    text = f"{driver}, torch is built for CUDA {seen.cuda}"
    yield judge("driver", is_old, text, f"install driver {needed} or newer, or torch for an older CUDA", "wrong")


def _examine_seen(seen: TorchCuda, num_gpus: int, visible: str | None) -> Iterator[Finding]:
    if not seen.names:
        return
    text = f"torch sees {len(seen.names)}" + (f" of {num_gpus}" if num_gpus else "") + _visible(visible)
    yield judge("GPUs", len(set(seen.names)) > 1, f"{text}: {', '.join(sorted(set(seen.names)))}", "run on equal GPUs")
    yield Finding("ok", "NCCL", f"{seen.nccl}, of torch")
    lacking = sorted({each for each in seen.capabilities if not _has_kernels(each, seen.architectures)})
    text = f"torch has kernels for {' '.join(seen.architectures)}"
    names = ", ".join(f"{major}.{minor}" for major, minor in lacking)
    yield judge("architecture", bool(lacking), text, f"install a torch with kernels for {names}", "wrong")
    if min(seen.capabilities) < (8, 0):
        yield Finding("warning", "bf16", "these GPUs do not support bf16 GEMMs", "use --fp16")
    num = len(seen.names)
    apart = [f"{a}-{b}" for a in range(num) for b in range(a + 1, num) if b not in seen.peers[a]]
    if num > 1:
        text = f"{num * (num - 1) // 2 - len(apart)} of {num * (num - 1) // 2} pairs reach each other's memory"
        remedy = f"{' '.join(apart)} communicate through host memory: check nvidia-smi topo -m, IOMMU and ACS"
        yield judge("peers", bool(apart), text, remedy)


def _has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether torch has kernels for a GPU: binaries of the same major version, or PTX of an earlier one."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = "".join(digit for digit in digits if digit.isdecimal())
        built = int(number[:-1]), int(number[-1])
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def _examine_gpu(gpu: Mapping[str, str]) -> Iterator[Finding]:
    subject = f"GPU {gpu.get('index', '?')}"
    findings = [
        ("persistence_mode", gpu.get("persistence_mode") == "Disabled", "nvidia-smi -pm 1", "warning"),
        ("ecc.mode.current", gpu.get("ecc.mode.current") == "Disabled", "nvidia-smi -e 1, and a restart", "warning"),
        ("mig.mode.current", gpu.get("mig.mode.current") == "Enabled", "nvidia-smi -mig 0 for a whole GPU", "warning"),
        ("compute_mode", gpu.get("compute_mode") == "Prohibited", "nvidia-smi -c 0", "wrong"),
        (
            "ecc.errors.uncorrected.volatile.total",
            (_number(gpu, "ecc.errors.uncorrected.volatile.total") or 0) > 0,
            "stop using this GPU: its memory is failing",
            "wrong",
        ),
        ("memory.used", (_number(gpu, "memory.used") or 0) > _MAX_USED_MIB, "stop the process that uses it", "warning"),
        ("temperature.gpu", (_number(gpu, "temperature.gpu") or 0) > _HOT_CELSIUS, "check its cooling", "warning"),
        (
            "pcie.link.width.current",
            _is_below(gpu, "pcie.link.width.current", "pcie.link.width.max", 1.0),
            f"the slot provides fewer than {gpu.get('pcie.link.width.max')} lanes: reseat the card",
            "warning",
        ),
        (
            "clocks.applications.graphics",
            _is_below(gpu, "clocks.applications.graphics", "clocks.max.sm", _MIN_CLOCK_SHARE),
            f"it could go up to {gpu.get('clocks.max.sm')}: nvidia-smi -rac",
            "warning",
        ),
    ]
    problems = [
        Finding("wrong" if status == "wrong" else "warning", subject, f"{field} is {gpu.get(field)}", remedy)
        for field, is_problem, remedy, status in findings
        if is_problem
    ]
    text = f"{gpu.get('name')}, {gpu.get('memory.total')}, {gpu.get('clocks.sm')} now, {gpu.get('temperature.gpu')} °C"
    yield from problems or [Finding("ok", subject, text)]


def _number(gpu: Mapping[str, str], field: str) -> float | None:
    """Return the number of a field, without its unit; None for values such as ``[N/A]``."""
    try:
        return float(gpu.get(field, "").split()[0])
    except (ValueError, IndexError):
        return None


def _is_below(gpu: Mapping[str, str], field: str, limit: str, share: float) -> bool:
    value, most = _number(gpu, field), _number(gpu, limit)
    return value is not None and most is not None and value < most * share


def _visible(visible: str | None) -> str:
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
