"""What is planned: a model, its layout over ranks, and its batches, without anything of a particular run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.pipeline_parallel.schedules import Action, first_actions, most_passes_in_flight
from megatron.core.pipeline_parallel.stage_layout import StageLayout

if TYPE_CHECKING:
    from megatron.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold the configuration that memory and time follow from; all parts fit together."""

    model: GPTConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    parallel_sizes: ParallelSizes
    stage_layout: StageLayout
    pipeline_schedule: str
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    uses_cuda_graphs: bool = False

    @staticmethod
    def of(config: RunConfig, stage_layout: StageLayout | None = None) -> Plan:
        """Return what a run's configuration says of it; ``stage_layout`` is its own, where that is known already."""
        return Plan(
            model=config.model,
            ddp=config.ddp,
            optimizer=config.optimizer,
            parallel_sizes=config.parallel_sizes,
            stage_layout=stage_layout or config.stage_layout,
            pipeline_schedule=config.pipeline_schedule,
            seq_length=config.data.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            global_batch_size=config.training.global_batch_size,
            uses_cuda_graphs=config.training.cuda_graph_impl == "local",
        )

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches of a step on one rank."""
        return self.global_batch_size // (self.micro_batch_size * self.parallel_sizes.dp)

    @property
    def num_tokens(self) -> int:
        """Return s/c · b: the tokens of a micro-batch that a rank holds."""
        return self.seq_length // self.parallel_sizes.cp * self.micro_batch_size

    @property
    def num_rows(self) -> int:
        """Return the rows of the residual stream of a micro-batch on a rank."""
        return self.num_tokens // self.parallel_sizes.tp if self.model.sequence_parallel else self.num_tokens

    @property
    def num_logits(self) -> int:
        """Return the logits of a micro-batch on a rank of the last stage, those of further tokens among them."""
        return self.num_predictions * (self.model.padded_vocab_size // self.parallel_sizes.tp)

    @property
    def num_predictions(self) -> int:
        """Return how many tokens are predicted from a micro-batch on a rank: the next of each, and further ones."""
        return self.num_tokens * (1 + self.model.num_further_tokens)

    def warm_up_actions(self, stage: int) -> Sequence[Action]:
        """Return a stage's actions of one step; of many rounds of micro-batches only the first."""
        return first_actions(*self._schedule(stage))

    def most_passes_in_flight(self, stage: int) -> int:
        """Return the most passes of a stage's chunks that wait for their backward passes at once."""
        return most_passes_in_flight(*self._schedule(stage))

    def _schedule(self, stage: int) -> tuple[str, int, int, int, int, int | None]:
        """Return what a stage's pipeline schedule depends on, as `first_actions` takes it."""
        group_size = self.model.microbatch_group_size_per_virtual_pipeline_stage
        pp, num_chunks = self.parallel_sizes.pp, self.stage_layout.num_chunks
        return self.pipeline_schedule, pp, stage, self.num_microbatches, num_chunks, group_size
