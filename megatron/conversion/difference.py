"""Compare two checkpoints and print their differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.run_config import RunConfig
from megatron.conversion.checkpoint_folder import find_checkpoint
from megatron.conversion.conversion_check import STATE
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.comparison import compare_sources
from megatron.interop.open_checkpoint import open_checkpoint
from megatron.interop.source_view import SourceView
from megatron.interop.torchtitan.told_settings import idle_lines
from megatron.training.checkpointing.config_changes import compare_configs


def diff_checkpoints(
    first: Path,
    second: Path,
    *,
    ckpt_step: int | None = None,
    weights_only: bool = False,
    tolerance: float = 0.0,
    told: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = print,
) -> bool:
    """Print every difference and return whether the checkpoints are equal.

    Equal are two that hold the same tensors, stand at the same point of the same schedule, and are of one model. The
    rest of the configuration, layout and files included, is shown and does not count. ``told`` is what a torchtitan
    folder does not say of its model.

    Raises:
        CheckpointError: one of them is not there or damaged.
    """
    found = [find_checkpoint(path, ckpt_step) for path in (first, second)]
    for line in () if any(each.format == "torchtitan" for each in found) else idle_lines(told or {}):
        log(line)
    folders = [each.folder for each in found]
    left = open_checkpoint(folders[0], told=told)
    try:
        right = open_checkpoint(folders[1], told=told)
        try:
            log(f"first:  {folders[0]}")
            log(f"second: {folders[1]}")
            problems = _tensors(left, right, weights_only, tolerance, log)
            problems += _state(left.common, right.common, weights_only, log)
        finally:
            right.close()
    finally:
        left.close()
    log("equal" if problems == 0 else f"different: {problems} difference{'s' if problems > 1 else ''}")
    return problems == 0


def _tensors(
    left: CheckpointSource,
    right: CheckpointSource,
    weights_only: bool,
    tolerance: float,
    log: Callable[[str], None],
) -> int:
    num_bytes = 0

    def count(more: int) -> None:
        nonlocal num_bytes
        num_bytes += more

    start_time = time.monotonic()
    views = [
        SourceView(source, source.common, keeps_optimizer=not weights_only, on_read=count) for source in (left, right)
    ]
    different, equal, close = 0, 0, 0
    for found in compare_sources(*views):
        if found.is_equal:
            equal += 1
            continue
        is_close = found.is_close(tolerance)
        close += is_close
        different += not is_close
        log(f"  {found}{' (within the tolerance)' if is_close else ''}")
    rate = num_bytes / max(time.monotonic() - start_time, 1e-6) / 1e6
    near = f", {close} within {tolerance:g}" if close else ""
    log(f"tensors: {equal} equal bit by bit{near}, {different} different; {num_bytes / 1e9:.2f} GB at {rate:.0f} MB/s")
    return different


def _state(left: Mapping[str, Any], right: Mapping[str, Any], weights_only: bool, log: Callable[[str], None]) -> int:
    problems = 0
    if not weights_only:
        for line in _different_values({key: left[key] for key in STATE}, {key: right[key] for key in STATE}):
            problems += 1
            log(f"  {line}")
    configs = [RunConfig.from_dict(common["config"]).to_dict() for common in (left, right)]
    changes = compare_configs(*configs)
    for change in changes.shape:
        problems += 1
        log(f"  model: {change}")
    # What decides only which weights there are has been counted where the tensors were compared.
    for change in (*changes.weights, *changes.other):
        log(f"  configuration (does not count): {change}")
    return problems


def _different_values(left: Any, right: Any, path: str = "") -> Iterator[str]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted({*left, *right}):
            yield from _different_values(left.get(key), right.get(key), f"{path}.{key}" if path else key)
    elif left != right:
        yield f"{path}: {_short(left)} and {_short(right)}"


def _short(value: Any) -> str:
    return "state" if isinstance(value, Mapping) else str(value)
