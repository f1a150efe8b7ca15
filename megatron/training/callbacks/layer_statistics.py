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
from megatron.core.transformer import QueryKeyClip, SelfAttention, largest_logits
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


class AttentionLogits(Callback):
    """Recorder of the largest attention logit of the forward passes while it ``is_on``; see `largest_logits`."""

    def __init__(self, chunks: Sequence[Model], device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._forget()
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, SelfAttention):
                    module.logit_observers.append(self._observe_layer)

    def _forget(self) -> None:
        self._largest = torch.full((), -torch.inf, device=self._device)

    def on_begin(self, run: TrainingRun) -> None:
        self._forget()

    def before_step(self, run: TrainingRun) -> None:
        self.is_on = run.log_interval.is_due(run.train_state.iteration + 1)

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        return replace(report, max_attention_logit=self.take(run.runtime.state.world)) if self.is_on else report

    def _observe_layer(
        self, layer: SelfAttention, query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern
    ) -> None:
        self.observe(query, key, pattern, layer.cp)

    @torch.no_grad()
    def observe(self, query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern, cp: Group) -> None:
        """Include the logits of a layer, if recording is on.

        Shapes: ``query: [s/cp, b, n, d]``, ``key: [s/cp, b, g, d]``.
        """
        if not self.is_on:
            return
        self._largest = torch.maximum(self._largest, largest_logits(query, key, pattern, cp).max())

    def take(self, world: Group) -> float | None:
        """Return and reset the largest logit over all ranks, or None if no layer reported one.

        Collective; waits for the device.
        """
        all_reduce(self._largest, world, op="max")
        largest = self._largest.item()
        self._forget()
        return None if largest == -torch.inf else largest


class ClippedLogits(AttentionLogits):
    """Recorder of the largest attention logit by the logits that QK-clip observes, as Megatron-LM logs it."""

    def __init__(self, clip: QueryKeyClip, device: torch.device) -> None:
        super().__init__((), device)
        self._clip = clip

    def take(self, world: Group) -> float | None:
        """Return the largest logit of the step over all ranks. Collective; waits for the device."""
        return self._clip.largest()
