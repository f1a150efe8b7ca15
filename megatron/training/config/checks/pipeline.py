"""Checks of how the layers are spread over pipeline stages and of the schedule that runs them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.errors import ConfigurationError
from megatron.core.pipeline_parallel.schedules import default_schedule, schedule_problems
from megatron.core.pipeline_parallel.stage_layout import layout_problems
from megatron.training.config.checks.check import Check
from megatron.training.config.checks.layout import has_whole_copies
from megatron.training.config.run_config import RunConfig


def _check_layout(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_layers > 0 and model.pipeline_model_parallel_size > 0:
        yield from layout_problems(model, model.num_layers, model.pipeline_model_parallel_layout)


def _check_virtual_stages(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.pipeline_model_parallel_size != 1:
        return
    given = {
        "--num-layers-per-virtual-pipeline-stage": model.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": model.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": model.pipeline_model_parallel_layout,
    }
    for name, value in given.items():
        if value is not None:
            yield (
                f"{name} {value} cuts a pipeline and --pipeline-model-parallel-size is 1; leave it out, or use a "
                "pipeline size of 2 or more"
            )


def _check_schedule(config: RunConfig) -> Iterator[str]:
    model, training = config.model, config.training
    pp, per_step = model.pipeline_model_parallel_size, training.micro_batch_size
    if pp <= 0 or model.num_layers <= 0 or not has_whole_copies(config):
        return
    per_step *= config.data_parallel_size
    if per_step <= 0 or training.global_batch_size <= 0 or training.global_batch_size % per_step:
        return
    try:
        num_chunks = config.stage_layout.num_chunks
    except ConfigurationError:
        return  # Said by the check of the layout.
    name = model.pipeline_schedule or default_schedule(pp, num_chunks)
    group_size = model.microbatch_group_size_per_virtual_pipeline_stage
    yield from schedule_problems(name, pp, training.global_batch_size // per_step, num_chunks, group_size)


LAYOUT_FIELDS = (
    "num_layers",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)
"""What decides which layers are on which stage."""

CHECKS = (
    Check(LAYOUT_FIELDS, _check_layout),
    Check(LAYOUT_FIELDS, _check_virtual_stages),
    Check(
        (
            *LAYOUT_FIELDS,
            "pipeline_schedule",
            "microbatch_group_size_per_virtual_pipeline_stage",
            "micro_batch_size",
            "global_batch_size",
        ),
        _check_schedule,
    ),
)
