"""A candidate of the layout search: parallel sizes, batches, recompute, sharding and precision.

A choice is applied to a run's configuration, or written as flags that replace those of a training command line.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import RunConfig, without_flags
from megatron.core.config_base import with_fields

LAYOUT_FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--sequence-parallel",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--pipeline-schedule",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--moe-token-dispatcher-type",
)
VIRTUAL_FLAGS = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
RECOMPUTE_FLAGS = (
    "--recompute-granularity",
    "--recompute-activations",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--moe-layer-recompute",
    "--distribute-saved-activations",
)
SHARDING_FLAGS = (
    "--use-distributed-optimizer",
    "--data-parallel-sharding-strategy",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)
PRECISION_FLAGS = (
    "--bf16",
    "--fp16",
    "--fp8-format",
    "--fp8-recipe",
    "--fp8-hybrid",
    "--fp8-e4m3",
    "--fp8-param-gather",
)


def replaced(words: Sequence[str], flag: str, *values: str) -> tuple[str, ...]:
    """Return the arguments with one flag set to other values."""
    return (*without_flags(words, (flag,)), flag, *values)


def has_flag(words: Sequence[str], *flags: str) -> bool:
    """Return whether any of the flags is given, as ``--flag value`` or as ``--flag=value``."""
    return not {word.partition("=")[0] for word in words}.isdisjoint(flags)


def whole_value(words: Sequence[str], flag: str, default: int) -> int:
    """Return the last whole number that is given for a flag, or the default."""
    found = default
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == flag:
            text = value or (words[index + 1] if index + 1 < len(words) else "")
            found = int(text) if text.isdecimal() else default
    return found


def as_typed(words: Sequence[str]) -> list[str]:
    """Return one string per flag, with its values."""
    flags: list[str] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags


RECOMPUTES = ("none", "selective", "full")
"""Recompute granularities, from the fastest to the one that saves the least activation memory."""
ZERO_BUBBLE = "zero-bubble"
SEARCHED_FLAGS = (*LAYOUT_FLAGS, *RECOMPUTE_FLAGS, *SHARDING_FLAGS, *PRECISION_FLAGS, "--micro-batch-size")


def layout_of(split: Sequence[int]) -> str:
    """Return the layers per global stage in the notation of --pipeline-model-parallel-layout."""
    return f"E{'|'.join(f't*{count}' for count in split)}L"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Layout, recompute, sharding and precision of one candidate.

    ``counts_ends`` counts the embedding and the loss as one layer each when layers are split into stages. ``sharding``
    is the data-parallel sharding strategy: no_shard, optim or optim_grads. ``precision`` is bf16, fp8 or nvfp4, which
    --fp4-format sets. ``split`` has the number of layers of each global stage and is empty for an even split.
    ``schedule`` is empty for the default one. ``ep`` is the expert-parallel size, and None for a dense model; expert
    tensor parallelism is not used.
    """

    tp: int
    pp: int
    cp: int
    chunks: int
    counts_ends: bool
    micro_batch_size: int
    recompute: str
    sharding: str
    precision: str
    split: tuple[int, ...] = ()
    schedule: str = ""
    ep: int | None = None

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the run's configuration with this choice; it is not yet checked."""
        is_full, is_sharded = self.recompute == "full", self.sharding != "no_shard"
        of_experts: dict[str, Any] = {}
        if self.ep is not None:
            of_experts = {
                "expert_model_parallel_size": self.ep,
                "expert_tensor_parallel_size": 1 if self.tp > 1 else None,
                "moe_token_dispatcher_type": "alltoall",
            }
        model = with_fields(
            config.model,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            context_parallel_size=self.cp,
            sequence_parallel=self.tp > 1,
            num_virtual_stages_per_pipeline_rank=self.chunks if self.chunks > 1 else None,
            pipeline_model_parallel_layout=layout_of(self.split) if self.split else None,
            pipeline_schedule=self.schedule or None,
            num_layers_per_virtual_pipeline_stage=None,
            account_for_embedding_in_pipeline_split=self.counts_ends,
            account_for_loss_in_pipeline_split=self.counts_ends,
            recompute_granularity=None if self.recompute == "none" else self.recompute,
            recompute_method="uniform" if is_full else None,
            recompute_num_layers=1 if is_full else None,
            fp8_format="hybrid" if self.precision == "fp8" else None,
            **of_experts,
        )
        ddp = dataclasses.replace(
            config.ddp,
            use_distributed_optimizer=is_sharded,
            data_parallel_sharding_strategy="optim_grads" if self.sharding == "optim_grads" else "no_shard",
            overlap_grad_reduce=is_sharded,
            overlap_param_gather=is_sharded,
        )
        return self.with_micro_batch(dataclasses.replace(config, model=model, ddp=ddp))

    def with_micro_batch(self, config: RunConfig) -> RunConfig:
        """Return the configuration with this choice's micro-batch size."""
        training = dataclasses.replace(config.training, micro_batch_size=self.micro_batch_size)
        return dataclasses.replace(config, training=training)

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return a training command line whose searched flags are replaced by those of this choice."""
        return (*without_flags(words, SEARCHED_FLAGS), *self._flags())

    def describe(self) -> str:
        """Return the choice on one line."""
        ends = ", embedding and loss counted" if self.counts_ends else ""
        split = f", layers {self.describe_split()}" if self.split else ""
        schedule = f", {self.schedule}" if self.schedule else ""
        experts = "" if self.ep is None else f"ep {self.ep} "
        return (
            f"tp {self.tp} pp {self.pp} cp {self.cp} {experts}vpp {self.chunks}{ends}{split}{schedule}, "
            f"micro-batch {self.micro_batch_size}, recompute {self.recompute}, {self.sharding}, {self.precision}"
        )

    def describe_split(self) -> str:
        """Return a short description of the pipeline split: even, with the ends counted, or the layers per stage."""
        if not self.split:
            return "ends counted" if self.counts_ends else "even"
        runs = [(count, len(list(several))) for count, several in itertools.groupby(self.split)]
        return " ".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)

    def _split_flags(self) -> Iterator[str]:
        """Yield the shortest flags of the split: those of the first and last stage if all other stages are equal."""
        if not self.split:
            return
        first, *middle, last = self.split
        if self.chunks > 1 or len(set(middle)) != 1:
            yield from ("--pipeline-model-parallel-layout", layout_of(self.split))
            return
        for flag, count in (("first", first), ("last", last)):
            if count != middle[0]:
                yield from (f"--decoder-{flag}-pipeline-num-layers", str(count))

    def _flags(self) -> Iterator[str]:
        yield "--bf16"
        if self.precision == "fp8":
            yield from ("--fp8-format", "hybrid")
        yield from ("--micro-batch-size", str(self.micro_batch_size))
        for flag, size in (
            ("--tensor-model-parallel-size", self.tp),
            ("--pipeline-model-parallel-size", self.pp),
            ("--context-parallel-size", self.cp),
            ("--num-virtual-stages-per-pipeline-rank", self.chunks),
        ):
            if size > 1:
                yield from (flag, str(size))
        if self.ep is not None:
            yield from ("--expert-model-parallel-size", str(self.ep), "--moe-token-dispatcher-type", "alltoall")
            if self.tp > 1:
                yield from ("--expert-tensor-parallel-size", "1")
        if self.tp > 1:
            yield "--sequence-parallel"
        yield from self._split_flags()
        if self.schedule:
            yield from ("--pipeline-schedule", self.schedule)
        if self.counts_ends:
            yield from ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
        if self.recompute != "none":
            yield from ("--recompute-granularity", self.recompute)
        if self.recompute == "full":
            yield from ("--recompute-method", "uniform", "--recompute-num-layers", "1")
        if self.sharding != "no_shard":
            yield from ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
        if self.sharding == "optim_grads":
            yield from ("--data-parallel-sharding-strategy", "optim_grads")
