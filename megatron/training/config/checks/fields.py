"""Checks of what each field says of itself: its bounds, the fields that it excludes, the one that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig

_MAX_SEED = 2**32 - 1


def _check_bounds(config: RunConfig) -> Iterator[str]:
    """Report each value outside its bounds."""
    for spec, value in config.flags():
        bounds = spec.options.bounds
        if bounds is not None and value is not None and not bounds.hold(value):
            yield f"{spec.typed(value)}: a value {bounds.words} is expected"


def _check_exclusions(config: RunConfig) -> Iterator[str]:
    """Report fields that are given together and cannot be, each group once."""
    flags = list(config.flags())
    given = {spec.name: spec.typed(value) for spec, value in flags if value != spec.default}
    reported: set[str] = set()
    for spec, _ in flags:
        if spec.name not in given or not spec.options.excludes:
            continue
        names = [name for name in (spec.name, *spec.options.excludes) if name in given]
        if len(names) > 1 and spec.name not in reported:
            reported.update(names)
            yield f"{' and '.join(given[name] for name in names)} exclude each other; keep one"


def _check_needs(config: RunConfig) -> Iterator[str]:
    """Report each field that is given without the one that it needs."""
    flags = list(config.flags())
    missing = {spec.name: spec for spec, value in flags if value == spec.default}
    for spec, value in flags:
        needed = missing.get(spec.options.needs or "")
        if needed is not None and spec.name not in missing:
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


CHECKS = (
    Check((), _check_bounds),
    Check((), _check_exclusions),
    Check((), _check_needs),
    Check(("seed",), _check_seed),
    Check(("replication_jump",), _check_replication),
)
