"""What to change where a configuration is refused or does not fit: the cheapest changes, each tried before it is named.

A change is tried as a user would: its flags go through the parser and all checks, and what they come to is predicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.config.arguments import ParsedArguments, without_flags
from megatron.core.errors import ConfigurationError
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict, usable_bytes
from megatron.planner.step_time import StepTime
from megatron.planner.training_words import (
    LAYOUT_FLAGS,
    RECOMPUTE_FLAGS,
    VIRTUAL_FLAGS,
    as_typed,
    has_flag,
    replaced,
    whole_value,
)

WANTED = 3
_NO_LIMIT = 1 << 62
_MIB = 2**20
_TP, _PP, _CP = LAYOUT_FLAGS[:3]
_MICRO, _GLOBAL, _SEQUENCE, _GPUS = "--micro-batch-size", "--global-batch-size", "--sequence-parallel", "GPUs"
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_ALTERS = {_GLOBAL: 1, _GPUS: 2}
_SECOND = ("recompute", "sharding", _MICRO, _GLOBAL, _GPUS)
"""Subjects of a second edit beside a first one of any subject."""
_MOST_TRIED = 200
"""Edits that are parsed, so that an answer takes a second or two."""

Read = Callable[[Sequence[str], int], ParsedArguments]
"""Parse and check training flags for a number of ranks; raise ConfigurationError for what is wrong."""


@dataclass(frozen=True)
class Change:
    """Hold flags that make a configuration run, as a user types them, and what they cost in words.

    ``seconds_per_token`` is GPU time a token, the measure of what is cheap; ``alters`` counts what the user may not be
    free to alter: the global batch, the number of GPUs.
    """

    flags: str
    cost: str
    seconds_per_token: float
    alters: int

    def only_adds_to(self, other: Change) -> bool:
        """Return whether this is another change and more, without being cheaper."""
        return f" {other.flags} " in f" {self.flags} " and other.seconds_per_token <= self.seconds_per_token


@dataclass(frozen=True)
class _Edit:
    """Hold one edit of a command line: what it is about, in words, and its outcome."""

    subject: str
    flags: str
    words: tuple[str, ...]
    world_size: int
    alters: int = 0


def find_changes(
    words: Sequence[str], world_size: int, read: Read, gpu: Gpu, implementation: Implementation
) -> tuple[Change, ...]:
    """Return the cheapest changes that make a refused or too large configuration run, at most three.

    Two changes are tried together where there are fewer single ones, unless some problem stays whatever is changed.
    """
    try:
        plan, lasting = Plan.of(read(words, world_size).config), set[str]()
        time = predict(plan, implementation, gpu, usable=_NO_LIMIT).time
        before = None if time is None else _seconds_per_token(plan, time)
    except ConfigurationError as error:
        before, lasting = None, set(error.problems)
    changes, seen = list[Change](), set[frozenset[str]]()
    edits = list(_edits(_Edit("", "", tuple(words), world_size)))
    second = (edit for first in edits for edit in _edits(first) if edit.subject.split()[-1] in _SECOND)
    for edit in itertools.chain(edits, second):
        is_single = len(edit.subject.split()) == 1
        if len(seen) >= _MOST_TRIED or ((len(changes) >= WANTED or lasting) and not is_single):
            break
        key = frozenset((*as_typed(edit.words), str(edit.world_size)))
        if key in seen or not _may_be(edit):
            continue
        seen.add(key)
        try:
            change = _try(edit, before, read, gpu, implementation)
        except ConfigurationError as error:
            lasting.intersection_update(error.problems)
            continue
        lasting.clear()
        if change is not None and not any(change.only_adds_to(other) for other in changes):
            changes = [*(other for other in changes if not other.only_adds_to(change)), change]
    changes.sort(key=lambda change: (change.alters, change.seconds_per_token))
    return tuple(changes[:WANTED])


def _edits(before: _Edit) -> Iterator[_Edit]:
    """Yield a further edit of each subject that is not edited yet."""
    for subject, flags, words, world_size in _single_edits(before.words, before.world_size):
        if subject not in before.subject.split():
            alters = before.alters + _ALTERS.get(subject, 0)
            yield _Edit(
                f"{before.subject} {subject}".strip(), f"{before.flags} {flags}".strip(), words, world_size, alters
            )


def _single_edits(words: tuple[str, ...], world: int) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    """Yield subjects, flags as they are typed, the words with them, and the number of ranks."""
    bare = tuple(without_flags(words, RECOMPUTE_FLAGS))
    for recompute in (_FULL, ("--recompute-granularity", "selective")):
        yield "recompute", " ".join(recompute), (*bare, *recompute), world
    sharding = ("--data-parallel-sharding-strategy", "optim_grads")
    yield "sharding", " ".join(sharding), replaced(words, *sharding), world
    micro = whole_value(words, _MICRO, 1)
    sizes = {size: whole_value(words, size, 1) for size in (_TP, _PP, _CP)}
    for flag, most in ((_TP, 8), (_PP, 16), (_CP, 8)):
        for size in range(1, most + 1):
            if size != sizes[flag]:
                sequence = (_SEQUENCE,) if flag == _TP and size > 1 and not has_flag(words, _SEQUENCE) else ()
                given = " ".join((flag, str(size), *sequence))
                yield flag, given, (*replaced(words, flag, str(size)), *sequence), world
    for size in sorted({1, micro // 2} - {0, micro}):
        yield _MICRO, f"{_MICRO} {size}", replaced(words, _MICRO, str(size)), world
    if has_flag(words, *VIRTUAL_FLAGS):
        yield "virtual", "(no virtual stages)", tuple(without_flags(words, VIRTUAL_FLAGS)), world
    for flag in (_SEQUENCE, "--fp8-format", "--cpu-offloading", "--pipeline-schedule"):
        if has_flag(words, flag):
            yield flag, f"(no {flag})", tuple(without_flags(words, (flag,))), world
    copy = math.prod(sizes.values())
    batch, step = whole_value(words, _GLOBAL, 0), micro * max(1, world // copy)
    if batch % step:
        for size in sorted({max(step, batch // step * step), (batch // step + 1) * step}):
            yield _GLOBAL, f"{_GLOBAL} {size}", replaced(words, _GLOBAL, str(size)), world
    wholes = {world // copy * copy, (world // copy + 1) * copy} - {0}
    for size in (2 * world, 4 * world, 8 * world) if world % copy == 0 else sorted(wholes):
        yield _GPUS, f"({size} GPUs in place of {world})", words, size


def _may_be(edit: _Edit) -> bool:
    """Return whether the ranks are whole copies of the model and share the batch: what is soon seen, before parsing."""
    copy = math.prod(whole_value(edit.words, flag, 1) for flag in (_TP, _PP, _CP))
    if edit.world_size % copy:
        return False
    batch = whole_value(edit.words, _GLOBAL, 0)
    return batch % (whole_value(edit.words, _MICRO, 1) * (edit.world_size // copy)) == 0


def _try(edit: _Edit, before: float | None, read: Read, gpu: Gpu, implementation: Implementation) -> Change | None:
    """Return what an edit comes to, or None where it does not fit either.

    Raises:
        ConfigurationError: it is refused.
    """
    plan = Plan.of(read(edit.words, edit.world_size).config)
    prediction = predict(plan, implementation, gpu)
    if prediction.time is None or prediction.used_bytes is None:
        return None
    seconds = _seconds_per_token(plan, prediction.time)
    speed = f"{1e3 * prediction.time.total:.0f} ms a step"
    if before is not None:
        speed += f", {100 * (seconds / before - 1):+.1f} % GPU time a token"
    margin = (usable_bytes(gpu) - prediction.used_bytes) // _MIB
    return Change(edit.flags, f"{speed}; {margin} MiB left", seconds, edit.alters)


def _seconds_per_token(plan: Plan, time: StepTime) -> float:
    """Return the time of all GPUs together that a token takes."""
    return time.total * plan.parallel_sizes.world_size / (plan.global_batch_size * plan.seq_length)
