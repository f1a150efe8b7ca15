"""Recommend flags of a planned run that hide communication or launches, if the prediction says that they help.

A recommended flag is added to the launch command of a plan. It changes no default of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.config import ParsedArguments
from megatron.core.errors import ConfigurationError
from megatron.planner.choice import has_flag
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.plan import Plan
from megatron.planner.prediction import Prediction, predict, usable_bytes

_LEAST_GAIN = 0.005
"""Smallest share of the step time for which a flag is recommended."""
_GRAPHS = ("--cuda-graph-impl", "local")
_CANDIDATES: tuple[tuple[str, ...], ...] = (("--overlap-grad-reduce",), ("--overlap-param-gather",), _GRAPHS)
_NAMES_OF_GRAPHS = ("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph")


@dataclass(frozen=True)
class Recommendation:
    """Flags to add to a command line, and the predicted seconds per step before and after."""

    flags: tuple[str, ...]
    before: float
    after: float

    def describe(self) -> str:
        """Return one line for the user."""
        return (
            f"{' '.join(self.flags)} is recommended: {1e3 * self.after:,.1f} ms per step are predicted with it, "
            f"{1e3 * self.before:,.1f} ms without"
        )

    def to_json(self) -> dict[str, object]:
        return {"flags": list(self.flags), "ms_before": 1e3 * self.before, "ms_after": 1e3 * self.after}


def recommend(
    words: Sequence[str],
    world_size: int,
    read: Callable[[Sequence[str], int], ParsedArguments],
    gpu: Gpu,
    implementation: Implementation,
) -> tuple[Recommendation, ...]:
    """Return the flags that shorten the predicted step of a valid command line, each on top of the earlier ones.

    ``read`` parses and checks a command line. A flag that the command line already has is not tried.
    """
    chosen, found = tuple(words), list[Recommendation]()
    before = _prediction(chosen, world_size, read, gpu, implementation)
    if before is None or before.time is None:
        return ()
    seconds = before.time.total
    for flags in _untried(words):
        after = _prediction((*chosen, *flags), world_size, read, gpu, implementation)
        if after is None or after.time is None or (flags == _GRAPHS and not _has_room_for_graphs(after, gpu)):
            continue
        if after.time.total < (1 - _LEAST_GAIN) * seconds:
            found.append(Recommendation(flags, seconds, after.time.total))
            chosen, seconds = (*chosen, *flags), after.time.total
    return tuple(found)


def _has_room_for_graphs(prediction: Prediction, gpu: Gpu) -> bool:
    """Return whether as much memory is free as activations take, which graphs hold between steps too."""
    activations = max(stage.activations for stage in prediction.stages)
    return usable_bytes(gpu) - (prediction.used_bytes or 0) >= activations


def _untried(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for flags in _CANDIDATES:
        names = _NAMES_OF_GRAPHS if flags == _GRAPHS else flags
        if not has_flag(words, *names):
            yield flags


def _prediction(
    words: Sequence[str],
    world_size: int,
    read: Callable[[Sequence[str], int], ParsedArguments],
    gpu: Gpu,
    implementation: Implementation,
) -> Prediction | None:
    """Return the prediction of a command line, or None if it is invalid or does not fit."""
    try:
        prediction = predict(Plan.of(read(words, world_size).config), implementation, gpu)
    except ConfigurationError:
        return None
    return prediction if prediction.outcome == "ok" else None
