"""Configuration checks: the type of a check, and the bounds and exclusions that each field declares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from megatron.config.run_config import RunConfig
from megatron.core.errors import choices


@dataclasses.dataclass(frozen=True)
class Check:
    """Pair a pure function that yields problems, one line each, with the fields that it reads.

    A check is left out where one of its fields has no usable value: its problem is already known.
    """

    reads: tuple[str, ...]
    find: Callable[[RunConfig], Iterable[str]]


def divisors(number: int, limit: int) -> str:
    """Return the divisors of a number up to a limit as text, for messages that say what would work."""
    return choices(size for size in divisors_of(abs(number)) if size <= limit)


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a number above 0, the smallest first; of any other number none."""
    small = [size for size in range(1, math.isqrt(max(number, 0)) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


_MAX_SEED = 2**32 - 1


def _check_bounds(config: RunConfig) -> Iterator[str]:
    """Report each value outside its bounds."""
    for spec, value in config.flags("bounds"):
        bounds = spec.options.bounds
        if bounds is not None and value is not None and not bounds.hold(value):
            yield f"{spec.typed(value)}: a value {bounds.words} is expected"


def _check_exclusions(config: RunConfig) -> Iterator[str]:
    """Report fields that are given together and cannot be, each group once."""
    reported: set[str] = set()
    for spec, value in config.flags("excludes"):
        if value == spec.default or spec.name in reported:
            continue
        others = [each for each in map(config.flag, spec.options.excludes) if each is not None]
        given = [(spec, value), *(each for each in others if each[1] != each[0].default)]
        if len(given) > 1:
            reported.update(each.name for each, _ in given)
            yield f"{' and '.join(each.typed(number) for each, number in given)} exclude each other; keep one"


def _check_needs(config: RunConfig) -> Iterator[str]:
    """Report each field that is given without the one that it needs."""
    for spec, value in config.flags("needs"):
        found = None if value == spec.default else config.flag(spec.options.needs or "")
        if found is not None and found[1] == found[0].default:
            needed = found[0]
            what = needed.flags[0] if needed.is_bool else needed.typed(needed.metavar)
            remedy = "add it or leave this out" if needed.is_bool else "add it"
            yield f"{spec.typed(value)} has no effect without {what}; {remedy}"


def _check_seed(config: RunConfig) -> Iterator[str]:
    seed = config.initialization.seed
    if seed > _MAX_SEED:
        yield f"--seed {seed}: NumPy takes seeds up to {_MAX_SEED}"


def _check_replication(config: RunConfig) -> Iterator[str]:
    restart, world_size = config.restart, config.world_size
    jump = restart.replication_jump or 1
    if restart.replication and jump % world_size == 0:
        given = "" if restart.replication_jump is None else f" --replication-jump {jump}"
        remedy = f"give a jump of 1 to {world_size - 1}" if world_size > 1 else "leave it out"
        yield f"--replication{given}: with world size {world_size} each rank would send its copy to itself; {remedy}"


FIELD_CHECKS = (
    Check((), _check_bounds),
    Check((), _check_exclusions),
    Check((), _check_needs),
    Check(("seed",), _check_seed),
    Check(("replication_jump",), _check_replication),
)
