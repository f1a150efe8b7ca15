"""How long ranks with the same weights reduce gradients and gather parameters while nothing else is done."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planner.gpu import Gpu
from megatron.planner.links import Links
from megatron.planner.plan import Plan
from megatron.planner.stage_memory import StageState

_COMMUNICATION_SMS = 20
"""Streaming multiprocessors that an exchange's kernels take from matmuls: those of DeepSeek-V3 (arXiv 2412.19437,
section 3.2.2)."""


@dataclass(frozen=True)
class _Shared:
    """Hold what a stage's ranks with the same weights exchange: all but the experts, or these.

    ``gradients`` are bytes of the buffers, of shards where gradients are sharded; ``weights`` are whole. Over
    ``shards`` neighbours each of ``copies`` is cut.
    """

    gradients: int
    weights: int
    shards: int
    copies: int
    of_experts: bool

    def seconds(self, links: Links, num_bytes: float) -> float:
        """Return the time of gathering or scattering so many bytes."""
        if self.of_experts:
            return links.expert_replica_seconds(num_bytes, self.copies)
        return links.replica_seconds(num_bytes, self.copies)


def exposed_replica_seconds(plan: Plan, links: Links, stage: StageState, slowest: float) -> float:
    """Return what reducing gradients and gathering parameters takes beside the passes that hide it.

    ``slowest`` is the time of a micro-batch on the slowest stage. Copies of what is sharded sum their shards of
    gradients when all passes have ended.
    """
    ddp, sizes = plan.ddp, plan.parallel_sizes
    several = [
        _shared(plan, sizes.num_replicas, stage, of_experts=False),
        _shared(plan, sizes.num_expert_replicas, stage, of_experts=True),
    ]
    several = [each for each in several if each.gradients]
    copied = sum(_copies_seconds(plan, links, each) for each in several)
    if ddp.shards_weights and ddp.shards_over(sizes.num_replicas):
        return copied + plan.num_microbatches * _by_layer(plan, links, several, slowest)
    reduced = gathered = 0.0
    rounds = 1
    for each in several:
        if each.shards == 1:
            reduced += 2 * each.seconds(links, each.gradients)
            continue
        gathered += each.seconds(links, each.weights)
        if ddp.shards_gradients:
            # Each micro-batch's gradients are reduced, the whole of them to a shard.
            reduced, rounds = reduced + each.seconds(links, each.gradients * each.shards), plan.num_microbatches
        else:
            reduced += each.seconds(links, each.gradients)
    # The backward pass of a micro-batch hides the one, the forward pass of the first the other.
    hidden_reduction = slowest * 2 / 3 if ddp.overlap_grad_reduce else 0.0
    hidden_gather = slowest / 3 if ddp.overlap_param_gather else 0.0
    exposed = rounds * exposed_seconds(links.gpu, reduced, hidden_reduction)
    return copied + exposed + exposed_seconds(links.gpu, gathered, hidden_gather)


def _shared(plan: Plan, replicas: int, stage: StageState, *, of_experts: bool) -> _Shared:
    shards = plan.ddp.num_shards(replicas) if plan.ddp.shards_over(replicas) else 1
    gradients, weights = stage.expert_gradients, stage.expert_gathered_bytes
    if not of_experts:
        gradients, weights = stage.gradients - gradients, stage.gathered_bytes - weights
    return _Shared(gradients, weights, shards, replicas // shards if shards > 1 else 1, of_experts)


def _copies_seconds(plan: Plan, links: Links, shared: _Shared) -> float:
    of_shard = shared.gradients / (1 if plan.ddp.shards_gradients else shared.shards)
    return links.copies_seconds(of_shard, shared.copies, of_experts=shared.of_experts)


def _by_layer(plan: Plan, links: Links, several: list[_Shared], slowest: float) -> float:
    """Return what a micro-batch takes longer where its weights are gathered layer by layer, and gradients reduced.

    Each pass gathers beside the products of the layer before; what is beside them costs its share.
    """
    gathered = sum(each.seconds(links, each.weights) for each in several)
    reduced = sum(each.seconds(links, each.gradients * each.shards) for each in several)
    beside, alone = (reduced, 0.0) if plan.ddp.overlap_grad_reduce else (0.0, reduced)
    passes = ((gathered, slowest / 3), (gathered + beside, slowest * 2 / 3))
    return alone + sum(exposed_seconds(links.gpu, sent, hidden) for sent, hidden in passes)


def exposed_seconds(gpu: Gpu, sent: float, hidden: float) -> float:
    """Return the exposed time of a collective of ``sent`` seconds, of which up to ``hidden`` overlap with matmuls.

    Overlapped communication takes streaming multiprocessors from the matmuls. A device without them loses none.
    """
    share = _COMMUNICATION_SMS / gpu.num_sms if gpu.num_sms > _COMMUNICATION_SMS else 0.0
    return max(0.0, sent - hidden) + share * min(sent, hidden)
