"""What a benchmark's figures depend on of the machine: its processor and its kernel's version, not its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Return one line such as ``AMD EPYC, 2 processors, Linux 6.18.44``."""
    return f"{_processor()}, {os.cpu_count()} processors, {platform.system()} {kernel_version()}"


def kernel_version() -> str:
    """Return the kernel's version without the suffix that its builder gave it, which may name a host."""
    return platform.release().partition("-")[0]


def _processor() -> str:
    """Return the processor's model, or its architecture where the system has no ``/proc/cpuinfo`` that says it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
