"""Layer statistics: norms of parameters and gradients, and the largest attention logit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.collectives import all_reduce
from megatron.core.distributed import DistributedDataParallel, ParamShard
from megatron.core.models import Model
from megatron.core.ops import AttentionPattern
from megatron.core.optimizer import DedupMask, sum_of_squares
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group
from megatron.core.transformer import SelfAttention
from megatron.training.callbacks.callback import Callback, TrainingRun, is_due
from megatron.training.loggers import StepReport

_LAYER = re.compile(r"(?<!mtp\.)\blayers\.(\d+)\.")


@dataclass(frozen=True)
class NormsOfLayer:
    """Norms of one layer, or of the parameters before or after all layers."""

    name: str
    params_norm: float
    grad_norm: float


@torch.no_grad()
def measure_layer_norms(
    model_chunks: Sequence[DistributedDataParallel], num_layers: int, state: ParallelState, loss_scale: float
) -> list[NormsOfLayer]:
    """Return the norms of the embedding, of each layer, and of the parameters after them, equal on all ranks.

    The gradients are reduced and not yet clipped; ``loss_scale`` is divided out. Collective; waits for the device.
    """
    shards = [shard for chunk in model_chunks for shard in chunk.shards]
    totals = torch.zeros(num_layers + 2, 2, dtype=torch.float64, device=shards[0].gradient.device)
    counting = DedupMask(model_chunks, state)
    for shard in shards:
        if counting.counts(shard.spec):
            row = totals[_row_of(shard, num_layers)]
            row[0].add_(sum_of_squares(shard.values))
            row[1].add_(sum_of_squares(shard.gradient))
    all_reduce(totals, counting.group)
    names = ["embedding", *(f"layer {number}" for number in range(num_layers)), "output"]
    return [
        NormsOfLayer(name, math.sqrt(of_params), math.sqrt(of_gradients) / loss_scale)
        for name, (of_params, of_gradients) in zip(names, totals.tolist(), strict=True)
    ]


def _row_of(shard: ParamShard, num_layers: int) -> int:
    """Return 0 for the embedding, the number of a layer plus 1, or the last row for the parameters after the layers."""
    found = _LAYER.search(shard.spec.name)
    if found is not None:
        return int(found[1]) + 1
    return 0 if "embedding" in shard.spec.name else num_layers + 1


def format_layer_norms(iteration: int, norms: Sequence[NormsOfLayer]) -> str:
    """Format one line per layer."""
    return "\n".join(
        f" iteration {iteration:8d} | {norm.name:>9} | params norm: {norm.params_norm:.6E} | "
        f"grad norm: {norm.grad_norm:.6E} |"
        for norm in norms
    )


def layer_norm_scalars(norms: Sequence[NormsOfLayer]) -> dict[str, float | None]:
    """Return the norms by their TensorBoard tags."""
    tags = [(norm, norm.name.replace(" ", "-")) for norm in norms]
    return {
        **{f"params-norm/{tag}": norm.params_norm for norm, tag in tags},
        **{f"grad-norm/{tag}": norm.grad_norm for norm, tag in tags},
    }


class LayerNorms(Callback):
    """Log the norms of each layer's parameters and gradients every ``--log-layer-norms`` iterations."""

    def on_gradients(self, run: TrainingRun) -> None:
        iteration = run.train_state.iteration + 1
        if not is_due(run.config.logging.log_layer_norms, iteration):
            return
        num_layers, loss_scale = run.config.model.num_layers, run.parts.optimizer.loss_scale
        norms = measure_layer_norms(run.parts.ddp_chunks, num_layers, run.runtime.state, loss_scale)
        run.runtime.flight.ensure_not_given_up()
        run.log(format_layer_norms(iteration, norms))
        run.log_scalars(layer_norm_scalars(norms), iteration)


_BLOCK_ELEMENTS = 1 << 24


class AttentionLogits(Callback):
    """Recorder of the largest attention logit of the forward passes while it ``is_on``.

    Attention kernels do not return it, so the matmuls of queries and keys are computed a second time, in blocks of
    queries that are not stored. A softcap is not applied.
    """

    def __init__(self, chunks: Sequence[Model], device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._forget()
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, SelfAttention):
                    module.observe_logits = self.observe

    def _forget(self) -> None:
        self._largest = torch.full((), -torch.inf, device=self._device)

    def on_begin(self, run: TrainingRun) -> None:
        self._forget()

    def before_step(self, run: TrainingRun) -> None:
        self.is_on = run.log_interval.is_due(run.train_state.iteration + 1)

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        return replace(report, max_attention_logit=self.take(run.runtime.state.world)) if self.is_on else report

    @torch.no_grad()
    def observe(self, query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern) -> None:
        """Include the logits of a layer, if recording is on.

        Shapes: ``query: [s, b, n, d]``, ``key: [s, b, g, d]``.
        """
        if not self.is_on:
            return
        length, batch, num_heads, width = query.shape
        num_groups = key.shape[2]
        matrix = pattern.mask
        keys = key.permute(1, 2, 3, 0)
        rows = max(1, _BLOCK_ELEMENTS // (batch * num_heads * key.shape[0]))
        positions = torch.arange(length, device=query.device)
        for start in range(0, length, rows):
            block = query[start : start + rows].permute(1, 2, 0, 3)
            block = block.reshape(batch, num_groups, -1, width)
            logits = torch.matmul(block, keys).float() / width**0.5
            logits = logits.view(batch, num_heads, -1, key.shape[0])
            if matrix is None:
                visible = pattern.visible(positions[start : start + rows], positions)
            else:
                visible = matrix[..., start : start + rows, :]
            if visible is not None:
                logits = logits.masked_fill(~visible, -torch.inf)
            self._largest = torch.maximum(self._largest, logits.max())

    def take(self, world: Group) -> float | None:
        """Return and reset the largest logit over all ranks, or None if no layer reported one.

        Collective; waits for the device.
        """
        all_reduce(self._largest, world, op="max")
        largest = self._largest.item()
        self._forget()
        return None if largest == -torch.inf else largest
