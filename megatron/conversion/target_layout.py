"""Change the layout and the precision that a checkpoint records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.conversion.conversion_request import Target
from megatron.core.errors import ConfigurationError
from megatron.core.pipeline_parallel.stage_layout import layout_problems
from megatron.interop.inference_model import EVEN_PIPELINE
from megatron.training.config.checks import layout
from megatron.training.config.run_config import RunConfig

_TARGET_FLAGS = {
    "--tensor-model-parallel-size": "--target-tensor-parallel-size",
    "--pipeline-model-parallel-size": "--target-pipeline-parallel-size",
    "--num-layers-per-virtual-pipeline-stage": "--target-num-layers-per-virtual-pipeline-stage",
}


def retarget(common: Mapping[str, Any], target: Target, has_random_streams: bool = False) -> dict[str, Any]:
    """Return a checkpoint's shared state with the target's layout, as a single copy of the model would record it.

    Progress, optimizer and schedule stay what they are, so that a run goes on from the result. With random streams the
    layout that wrote them stays, too: a run at any layout continues those that it can.

    Raises:
        ConfigurationError: the model cannot be cut so; every problem with the values that would work.
    """
    old = RunConfig.from_dict(common["config"])
    config = _with_precision(_with_layout(old, target), target.params_dtype)
    model = config.model
    problems = [problem for check in layout.CHECKS for problem in check.find(config)]
    problems += layout_problems(model, model.num_layers, model.pipeline_model_parallel_layout)
    if model.pipeline_model_parallel_size == 1 and model.num_layers_per_virtual_pipeline_stage is not None:
        problems.append(
            f"--num-layers-per-virtual-pipeline-stage {model.num_layers_per_virtual_pipeline_stage} cuts a pipeline "
            "and --pipeline-model-parallel-size is 1; leave it out"
        )
    if problems:
        raise ConfigurationError([_with_target_flags(problem) for problem in problems])
    changed = dict(common) | {"config": config.to_dict()}
    if not has_random_streams:
        changed["layout"] = config.parallel_sizes.record()
    if not target.keeps_optimizer:
        changed |= {"optimizer": None, "scheduler": None}
    return changed


def _with_layout(config: RunConfig, target: Target) -> RunConfig:
    old = config.model
    tp = _or(target.tensor_parallel_size, old.tensor_model_parallel_size)
    pp = _or(target.pipeline_parallel_size, old.pipeline_model_parallel_size)
    virtual = target.num_layers_per_virtual_pipeline_stage
    sizes = {
        "--target-tensor-parallel-size": tp,
        "--target-pipeline-parallel-size": pp,
        "--target-num-layers-per-virtual-pipeline-stage": virtual,
        "--make-vocab-size-divisible-by": target.make_vocab_size_divisible_by,
    }
    wrong = [
        f"{name} {size} is not positive; give 1 or more"
        for name, size in sizes.items()
        if size is not None and size < 1
    ]
    if wrong:
        raise ConfigurationError(wrong)
    changes: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": old.sequence_parallel and tp > 1,
        "make_vocab_size_divisible_by": _or(target.make_vocab_size_divisible_by, old.make_vocab_size_divisible_by),
    }
    if virtual is not None or pp != old.pipeline_model_parallel_size:
        # A split that was made for another number of stages says nothing about this one.
        changes |= {**EVEN_PIPELINE, "num_layers_per_virtual_pipeline_stage": virtual}
    model = dataclasses.replace(old, **changes)
    return dataclasses.replace(config, model=model, world_size=model.parallel_sizes.world_size)


def _with_precision(config: RunConfig, dtype: str | None) -> RunConfig:
    if dtype is None:
        return config
    precision: dict[str, Any] = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": dtype}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **precision),
        optimizer=dataclasses.replace(config.optimizer, params_dtype=dtype),
    )


def _or(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given


def _with_target_flags(problem: str) -> str:
    for name, target_name in _TARGET_FLAGS.items():
        problem = problem.replace(name, target_name)
    return problem
