"""Build the model of this rank, its data-parallel wrapper, the optimizer and the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.collectives import all_gather_objects
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.extensions.apex import load_fused_adam
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler, ScheduleConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.initialize import Runtime

ModelProvider = Callable[[RunConfig, Runtime], GPTModel]
"""Return this rank's model, initialised, on its device."""


@dataclass(frozen=True, eq=False)
class TrainingParts:
    """Hold what a training step works on."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def module(self) -> Any:
        """Return the model without its wrapper."""
        return self.model.module


def build_training_parts(config: RunConfig, runtime: Runtime, model_provider: ModelProvider) -> TrainingParts:
    """Build model, optimizer and schedule, and print the parameter count of every model-parallel rank."""
    module = model_provider(config, runtime)
    report_parameter_counts(module, runtime)
    model = DistributedDataParallel(
        module, config.ddp, runtime.state, calculate_per_token_loss=config.training.calculate_per_token_loss
    )
    fused_adam = load_fused_adam() if runtime.device.is_cuda else None
    optimizer = make_optimizer(config.optimizer, [model], runtime.state, fused_adam)
    return TrainingParts(model, optimizer, OptimizerParamScheduler(optimizer, schedule_of(config)))


def schedule_of(config: RunConfig) -> ScheduleConfig:
    """Return the learning-rate and weight-decay schedule of a run in samples."""
    lengths, schedule, optimizer = config.schedule_lengths, config.scheduler, config.optimizer
    weight_decay = optimizer.weight_decay
    return ScheduleConfig(
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        init_lr=schedule.lr_warmup_init,
        lr_warmup_steps=lengths.lr_warmup_steps,
        lr_decay_steps=lengths.lr_decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        wsd_decay_steps=lengths.wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        start_wd=weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        end_wd=weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
        wd_incr_steps=lengths.weight_decay_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
    )


def report_parameter_counts(module: GPTModel, runtime: Runtime) -> None:
    """Print one line for every model-parallel rank, in order, padding of the vocabulary included."""
    count = sum(parameter.numel() for parameter in module.parameters())
    state = runtime.state
    counts = all_gather_objects((state.pp.rank, state.tp.rank, count), state.model_parallel)
    if runtime.is_reporter:
        for pp_rank, tp_rank, rank_count in sorted(counts):
            ranks, place = "(tensor, pipeline) model parallel rank", f"({tp_rank}, {pp_rank})"
            print(f" > number of parameters on {ranks} {place}: {rank_count}", flush=True)
