"""Run configuration: all parts of it, and the values that follow from several parts."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.data_config import DataConfig, TokenizerConfig
from megatron.config.resilience_config import FaultConfig, RestartConfig
from megatron.config.training_config import (
    CheckpointConfig,
    InitializationConfig,
    LoggingConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.core.config_base import Config, FieldSpec, config_from_dict, config_to_dict, field_specs, flag
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.pipeline_parallel.schedules import default_schedule
from megatron.core.pipeline_parallel.stage_layout import StageLayout, plan_stage_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig(Config, role="output"):
    """Name the files that give values where the command line gives none; they are part of the others' values then."""

    model_preset: str | None = flag(None, metavar="NAME")
    """Model whose shape is taken from a file of this project; --config and flags win over it."""
    config: tuple[str, ...] = flag((), append=True, metavar="FILE")
    """TOML or YAML file of flags and their values, or its URL, as --print-config writes it; may be repeated: later
    files win over earlier ones, and the command line over all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleLengths:
    """Hold the lengths of a schedule in samples (one step of the scheduler is one sample).

    A warm-up that is given as a share of the decay need not be a whole number of samples.
    """

    lr_warmup_steps: float
    lr_decay_steps: int
    wsd_decay_steps: int | None
    weight_decay_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Hold every part of a run's configuration, and the world size that it was resolved for."""

    model: GPTConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    ddp: DistributedDataParallelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    initialization: InitializationConfig
    faults: FaultConfig = dataclasses.field(default_factory=FaultConfig)
    restart: RestartConfig = dataclasses.field(default_factory=RestartConfig)
    sources: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    world_size: int = 1

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Return the grid of the run's ranks; it has fewer than there are where they are not whole model copies."""
        return self.model.parallel_sizes.in_world(self.world_size)

    @property
    def data_parallel_size(self) -> int:
        return self.parallel_sizes.dp

    @property
    def stage_layout(self) -> StageLayout:
        """Return which layers are on which pipeline stage.

        Raises:
            ConfigurationError: they cannot be spread as the flags say; a validated configuration can.
        """
        return plan_stage_layout(self.model, self.model.num_layers, self.model.pipeline_model_parallel_layout)

    @property
    def pipeline_schedule(self) -> str:
        """Return the name of the schedule that training runs."""
        pp = self.model.pipeline_model_parallel_size
        return self.model.pipeline_schedule or default_schedule(pp, self.stage_layout.num_chunks)

    @property
    def train_samples(self) -> int:
        """Return the number of samples of the whole run."""
        if self.training.train_samples:
            return self.training.train_samples
        return self.training.batch_sizes.samples_of_iterations(self.training.train_iters)

    @property
    def train_iters(self) -> int:
        """Return the number of iterations of the whole run, batch-size ramp-up included."""
        if self.training.train_iters:
            return self.training.train_iters
        return self.training.batch_sizes.iterations_of_samples(self.training.train_samples)

    @property
    def schedule_lengths(self) -> ScheduleLengths:
        """Return the lengths of the learning-rate and weight-decay schedules in samples.

        As in Megatron: lengths given in iterations count full global batches, ramp-up or not.
        """
        schedule, batch = self.scheduler, self.training.global_batch_size
        wsd_decay: int | None
        if self.training.train_samples:
            total = self.training.train_samples
            decay = schedule.lr_decay_samples or total
            warmup: float = schedule.lr_warmup_samples
            wsd_decay = schedule.lr_wsd_decay_samples
        else:
            total = self.training.train_iters * batch
            decay = (schedule.lr_decay_iters or self.training.train_iters) * batch
            warmup = schedule.lr_warmup_iters * batch
            wsd_decay = None if schedule.lr_wsd_decay_iters is None else schedule.lr_wsd_decay_iters * batch
        if schedule.lr_warmup_fraction is not None:
            warmup = schedule.lr_warmup_fraction * decay
        return ScheduleLengths(
            lr_warmup_steps=warmup, lr_decay_steps=decay, wsd_decay_steps=wsd_decay, weight_decay_steps=total
        )

    @property
    def metrics_jsonl(self) -> str | None:
        """Return the file of the metrics, or None where neither it nor --save is given."""
        save = self.checkpoint.local_save
        if self.logging.metrics_jsonl is not None or save is None:
            return self.logging.metrics_jsonl
        return f"{save}/metrics.jsonl"

    @property
    def profile_folder(self) -> str | None:
        """Return the folder of the traces of torch's profiler, or None where none is given."""
        return self.logging.tensorboard_dir or self.checkpoint.local_save

    def flags(self, option: str | None = None) -> Iterator[tuple[FieldSpec, Any]]:
        """Yield every field that a flag sets, with its value; or those alone of which this option says something."""
        parts = vars(self)
        for part, spec in command_line_fields(option):
            yield spec, getattr(parts[part], spec.name)

    def flag(self, name: str) -> tuple[FieldSpec, Any] | None:
        """Return the field of this name and its value, None where no flag sets it."""
        part, spec = _fields_by_name(tuple(RunConfig.__annotations__.items())).get(name, ("", None))
        return None if spec is None else (spec, getattr(vars(self)[part], name))

    def to_dict(self) -> dict[str, Any]:
        return config_to_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Read back what `to_dict` returned; raise ConfigurationError for anything else."""
        return config_from_dict(cls, values)


def config_parts() -> dict[str, type]:
    """Return the configuration classes of a run by the name of the part."""
    hints = typing.get_type_hints(RunConfig)
    return {name: hint for name, hint in hints.items() if hint is not int}


def command_line_fields(option: str | None = None) -> tuple[tuple[str, FieldSpec], ...]:
    """Return (part, field) for every field that a flag sets, or for those of which this option says something."""
    return _fields_of(tuple(RunConfig.__annotations__.items()), option)


@functools.cache
def _fields_by_name(annotations: tuple[tuple[str, Any], ...]) -> dict[str, tuple[str, FieldSpec]]:
    return {spec.name: (part, spec) for part, spec in _fields_of(annotations, None)}


@functools.cache
def _fields_of(annotations: tuple[tuple[str, Any], ...], option: str | None) -> tuple[tuple[str, FieldSpec], ...]:
    """Return what `command_line_fields` does while `RunConfig` has these annotations."""
    return tuple(
        (part, spec)
        for part, config_class in config_parts().items()
        for spec in field_specs(config_class)
        if spec.options.cli and (option is None or getattr(spec.options, option))
    )
