"""One choice of layout, micro-batches, recompute, sharding and precision: as configuration and as flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.advice.training_words import (
    LAYOUT_FLAGS,
    PRECISION_FLAGS,
    RECOMPUTE_FLAGS,
    SHARDING_FLAGS,
)
from megatron.training.config.arguments import without_flags
from megatron.training.config.run_config import RunConfig

RECOMPUTES = ("none", "selective", "full")
"""From the fastest to the one that keeps least."""
SEARCHED_FLAGS = (*LAYOUT_FLAGS, *RECOMPUTE_FLAGS, *SHARDING_FLAGS, *PRECISION_FLAGS, "--micro-batch-size")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Hold what is chosen; ``counts_ends`` lets the embedding and the loss count as a layer each.

    ``sharding`` is of the replicas: no_shard, optim or optim_grads. ``precision`` is bf16 or fp8.
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

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the configuration of a run with this choice; the checks have still to see it."""
        is_full, is_sharded = self.recompute == "full", self.sharding != "no_shard"
        model = dataclasses.replace(
            config.model,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            context_parallel_size=self.cp,
            sequence_parallel=self.tp > 1,
            num_virtual_stages_per_pipeline_rank=self.chunks if self.chunks > 1 else None,
            num_layers_per_virtual_pipeline_stage=None,
            account_for_embedding_in_pipeline_split=self.counts_ends,
            account_for_loss_in_pipeline_split=self.counts_ends,
            recompute_granularity=None if self.recompute == "none" else self.recompute,
            recompute_method="uniform" if is_full else None,
            recompute_num_layers=1 if is_full else None,
            fp8_format="hybrid" if self.precision == "fp8" else None,
        )
        ddp = dataclasses.replace(
            config.ddp,
            use_distributed_optimizer=is_sharded,
            data_parallel_sharding_strategy="optim_grads" if self.sharding == "optim_grads" else "no_shard",
            overlap_grad_reduce=is_sharded,
            overlap_param_gather=is_sharded,
        )
        training = dataclasses.replace(config.training, micro_batch_size=self.micro_batch_size)
        return dataclasses.replace(config, model=model, ddp=ddp, training=training)

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return a training's command line with this choice in place of what it says of the same subjects."""
        return (*without_flags(words, SEARCHED_FLAGS), *self._flags())

    def describe(self) -> str:
        """Return the choice on one line."""
        ends = ", embedding and loss counted" if self.counts_ends else ""
        return (
            f"tp {self.tp} pp {self.pp} cp {self.cp} vpp {self.chunks}{ends}, micro-batch {self.micro_batch_size}, "
            f"recompute {self.recompute}, {self.sharding}, {self.precision}"
        )

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
        if self.tp > 1:
            yield "--sequence-parallel"
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
