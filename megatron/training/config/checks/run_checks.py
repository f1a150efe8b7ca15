"""All checks of a run configuration together."""

from __future__ import annotations

from megatron.training.config.checks import (
    activation_memory,
    batch,
    context_parallelism,
    cuda_graphs,
    data_files,
    fields,
    files,
    float8,
    layout,
    model,
    optimizer,
    pipeline,
    profiling,
)
from megatron.training.config.checks.architectures import attention_kinds, further_tokens, latent_attention
from megatron.training.config.checks.model_parts import experts
from megatron.training.config.run_config import RunConfig
from megatron.training.faults import fault_checks

_CHECKS = (
    *fields.CHECKS,
    *layout.DATA_PARALLEL_CHECKS,
    *layout.CHECKS,
    *context_parallelism.CHECKS,
    *model.CHECKS,
    *pipeline.CHECKS,
    *batch.CHECKS,
    *optimizer.CHECKS,
    *profiling.CHECKS,
    *cuda_graphs.CHECKS,
    *activation_memory.CHECKS,
    *float8.CHECKS,
    *experts.CHECKS,
    *further_tokens.CHECKS,
    *latent_attention.CHECKS,
    *attention_kinds.CHECKS,
    *fault_checks.CHECKS,
)
_RUN_CHECKS = (*batch.LENGTH_CHECKS, *data_files.CHECKS, *files.CHECKS)


def find_problems(config: RunConfig, broken: frozenset[str] = frozenset(), *, needs_files: bool = True) -> list[str]:
    """Return every problem of a resolved configuration, one line each.

    ``broken`` names fields whose value could not be read; no check that reads one of them is made. Without
    ``needs_files`` the run's data, its tokenizer and its length need not be there.
    """
    problems: list[str] = []
    for check in (*_CHECKS, *(_RUN_CHECKS if needs_files else ())):
        if broken.isdisjoint(check.reads):
            problems.extend(check.find(config))
    return list(dict.fromkeys(problems))
