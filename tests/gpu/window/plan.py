"""The parts of the GPU window in their order, with the time that each may take. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TOTAL_SECONDS = 600.0
_PLANNED_SHARE = 0.85
"""Share of a window that the parts plan with. The rest is for the starts of processes, and goes to the last part."""
_MOST = 2.0
_START_SECONDS = 30.0
"""A part is stopped after this multiple of its own time and these seconds, in which a process imports torch from a cold
disk, as long as the later parts keep their own times."""
_LAST_MARGIN = 0.08
"""Share of its limit before which the last part should begin nothing more."""


@dataclass(frozen=True)
class Part:
    """Describe a part: its number, its seconds in a window of `TOTAL_SECONDS`, and what it shows.

    On the emulator Triton programs are interpreted if ``interprets``, else the package is hidden.
    """

    number: int
    seconds: float
    module: str
    title: str
    shows: str
    interprets: bool = False


PARTS = (
    Part(0, 10, "environment", "Versions and available paths", "which kernels this GPU and this torch have", True),
    Part(1, 20, "constants", "Roofline constants", "launch costs, copy rates and the sustained matmul rate"),
    Part(2, 50, "gemms", "GEMMs", "the time of each GEMM shape of the models"),
    Part(3, 40, "programs", "Kernels and Triton programs", "whether they compute what torch's operators do", True),
    Part(4, 30, "attention", "Attention", "the rate of each attention kernel, forward and backward"),
    Part(5, 60, "small_model", "GPT-2 345M", "time per step, and whether CUDA graphs compute the same"),
    Part(6, 60, "features", "Features on a tiny model", "whether each feature runs, with the losses of the CPU"),
    Part(7, 80, "headline", "8B and Qwen3 shapes", "time per step of large models"),
    Part(8, 30, "profiled", "Profile", "which kernels take the time, and how long the GPU is idle"),
    Part(9, 70, "layouts", "One-GPU layouts in bf16", "whether each layout agrees with the plain one on the CPU"),
    Part(
        *(10, 60, "shared_gpu", "Ranks that share the GPU, over NCCL"),
        "whether layouts of several ranks agree with one process on the CPU",
    ),
)


def choose_parts(only: Sequence[int] = (), skip: Sequence[int] = ()) -> tuple[Part, ...]:
    """Return the parts with these numbers, or all, without those that are skipped.

    Raises:
        ValueError: there is no part with one of the numbers.
    """
    known = {part.number for part in PARTS}
    if unknown := sorted({*only, *skip} - known):
        raise ValueError(f"there is no part {unknown[0]}; the parts are 0 to {len(PARTS) - 1}")
    return tuple(part for part in PARTS if (not only or part.number in only) and part.number not in skip)


def planned_seconds(parts: Iterable[Part], total: float) -> dict[int, float]:
    """Return the time of each part by its number, in proportion to the plan."""
    chosen = tuple(parts)
    scale = total * _PLANNED_SHARE / sum(part.seconds for part in chosen)
    return {part.number: part.seconds * scale for part in chosen}


@dataclass(frozen=True)
class PartTime:
    """Say when a part should begin nothing more, counted from when it has started, and when it is stopped."""

    planned: float
    limit: float


def part_time(part: Part, later: Sequence[Part], planned: dict[int, float], left: float) -> PartTime:
    """Return the time of a part, so that each later part still has its planned time; the last part has what is left.

    ``left`` is what is left of the window.
    """
    if not later:
        return PartTime(left * (1.0 - _LAST_MARGIN), max(0.0, left))
    own = planned[part.number]
    spare = max(0.0, left - own - sum(planned[each.number] for each in later))
    limit = max(0.0, min(own + spare, _MOST * own + _START_SECONDS, left))
    return PartTime(min(own + spare / 2, limit), limit)
