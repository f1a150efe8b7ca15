"""All checks of a run configuration together."""

from __future__ import annotations

from megatron.training.config.checks import (
    batch,
    checkpoint,
    context_parallelism,
    data_files,
    layout,
    model,
    pipeline,
    ranges,
    schedule,
    tokenizer_files,
)
from megatron.training.config.run_config import RunConfig

_CHECKS = (
    *ranges.CHECKS,
    *layout.CHECKS,
    *context_parallelism.CHECKS,
    *model.CHECKS,
    *pipeline.CHECKS,
    *batch.CHECKS,
    *schedule.CHECKS,
    *data_files.CHECKS,
    *tokenizer_files.CHECKS,
    *checkpoint.CHECKS,
)


def find_problems(config: RunConfig, broken: frozenset[str] = frozenset()) -> list[str]:
    """Return every problem of a resolved configuration, one line each.

    ``broken`` names fields whose value could not be read; no check that reads one of them is made.
    """
    problems: list[str] = []
    for check in _CHECKS:
        if broken.isdisjoint(check.reads):
            problems.extend(check.find(config))
    return list(dict.fromkeys(problems))
