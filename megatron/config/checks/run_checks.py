"""All checks of a run configuration together."""

from __future__ import annotations

from megatron.config.checks import base, execution, files, float8, model, moe, optimizer, parallelism, training
from megatron.config.checks import model as attention_kinds
from megatron.config.checks import model as further_tokens
from megatron.config.checks import model as latent_attention
from megatron.config.run_config import RunConfig

_CHECKS = (
    *base.FIELD_CHECKS,
    *parallelism.DATA_PARALLEL_CHECKS,
    *parallelism.LAYOUT_CHECKS,
    *parallelism.CONTEXT_PARALLEL_CHECKS,
    *model.MODEL_CHECKS,
    *parallelism.PIPELINE_CHECKS,
    *training.BATCH_CHECKS,
    *optimizer.CHECKS,
    *training.PROFILING_CHECKS,
    *execution.CUDA_GRAPH_CHECKS,
    *execution.ACTIVATION_CHECKS,
    *float8.CHECKS,
    *moe.CHECKS,
    *further_tokens.MTP_CHECKS,
    *latent_attention.MLA_CHECKS,
    *attention_kinds.ATTENTION_CHECKS,
    *training.FAULT_CHECKS,
)
_RUN_CHECKS = (*training.LENGTH_CHECKS, *files.DATA_FILE_CHECKS, *files.FILE_CHECKS)


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
