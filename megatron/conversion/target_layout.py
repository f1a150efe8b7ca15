"""Change the layout and the precision that a checkpoint records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megatron.config.checks import parallelism
from megatron.config.run_config import RunConfig
from megatron.conversion.conversion_request import Target
from megatron.core.errors import ConfigurationError
from megatron.core.pipeline_parallel.stage_layout import layout_problems
from megatron.interop.inference_model import EVEN_PIPELINE

_TARGET_FLAGS = {
    "--tensor-model-parallel-size": "--target-tensor-parallel-size",
    "--pipeline-model-parallel-size": "--target-pipeline-parallel-size",
    "--expert-model-parallel-size": "--target-expert-parallel-size",
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
    problems = [problem for check in parallelism.LAYOUT_CHECKS for problem in check.find(config)]
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
        "--target-expert-parallel-size": target.expert_parallel_size,
        "--target-num-layers-per-virtual-pipeline-stage": virtual,
        "--make-vocab-size-divisible-by": target.make_vocab_size_divisible_by,
    }
    wrong = [
        f"{name} {size} is not positive; give 1 or more"
        for name, size in sizes.items()
        if size is not None and size < 1
    ]
    wrong += _expert_problems(old.num_experts, target.expert_parallel_size)
    if wrong:
        raise ConfigurationError(wrong)
    changes: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": _or(target.expert_parallel_size, old.expert_model_parallel_size),
        "sequence_parallel": old.sequence_parallel and tp > 1,
        "make_vocab_size_divisible_by": _or(target.make_vocab_size_divisible_by, old.make_vocab_size_divisible_by),
    }
    if virtual is not None or pp != old.pipeline_model_parallel_size:
        # A split that was made for another number of stages says nothing about this one.
        changes |= {**EVEN_PIPELINE, "num_layers_per_virtual_pipeline_stage": virtual}
    if target.expert_parallel_size is not None:
        changes["expert_tensor_parallel_size"] = None
    model = dataclasses.replace(old, **changes)
    sizes_of_copy = model.parallel_sizes
    # As many copies of the model as its experts are spread over.
    stage, experts = sizes_of_copy.size_of(("cp", "tp")), sizes_of_copy.ep * sizes_of_copy.expert_tp
    copies = experts // math.gcd(stage, experts)
    return dataclasses.replace(config, model=model, world_size=sizes_of_copy.world_size * copies)


def _expert_problems(num_experts: int | None, size: int | None) -> list[str]:
    if size is None or size < 1 or (num_experts is None and size == 1):
        return []
    if num_experts is None:
        return [f"--target-expert-parallel-size {size}: the model has no experts; leave it out"]
    if num_experts % size:
        works = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        return [f"--target-expert-parallel-size {size} does not divide {num_experts} experts; {works} work"]
    return []


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
