"""Communication of a training step: links between ranks, the bytes that a rank sends, and exposed time.

Links are NVLink within a node, and one network port per GPU between nodes.

Messages of micro-batches come from the traces of the pieces. All other messages follow from the stages, buckets and
shards that training uses. Both are counted as `process_group.CollectiveCall` counts them: by operation and axes, with
the bytes of the full tensor.

The exposed time of gradient reductions and parameter gathers is the time that does not overlap with computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.distributed import plan_buckets, ranges_within
from megatron.core.parallel_config import ELEMENT_BYTES, GRID_AXES, ParallelSizes, Place
from megatron.core.pipeline_parallel import StageContents
from megatron.planner.gpu import Gpu
from megatron.planner.memory import (
    StageState,
    end_trace,
    layer_trace,
    num_gathers,
    parameters_of_buffers,
    recomputed_groups,
)
from megatron.planner.plan import Plan, layer_numbers
from megatron.planner.traces import PHASES, PieceTrace
from megatron.verification import Traffic, TrafficSum

if TYPE_CHECKING:
    from megatron.config import RunConfig


GPUS_A_MACHINE = 8
_LINK_SHARE = 0.8
"""Share of a link's bandwidth that NCCL reaches with large messages."""
_LATENCY_S = 15e-6


@dataclass(frozen=True)
class Links:
    """Links between the ranks of a grid: adjacent ranks belong to one tensor-parallel group, then to cp, dp and pp."""

    gpu: Gpu
    sizes: ParallelSizes

    def tensor_parallel_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-gather or reduce-scatter of ``num_bytes`` over the tensor-parallel ranks."""
        t = self.sizes.tp
        return self._seconds(num_bytes * (t - 1) / t, t, 1) if t > 1 else 0.0

    def context_seconds(self, operation: str, num_bytes: float) -> float:
        """Return the time of one message between the context-parallel ranks: to a neighbor, or over all of them."""
        c = self.sizes.cp
        if c == 1:
            return 0.0
        share = 1.0 if operation == "send" else (c - 1) / c
        return self._seconds(num_bytes * share, c, self.sizes.tp)

    def replica_seconds(self, num_bytes: float, copies: int = 1) -> float:
        """Return the time of an all-gather or reduce-scatter of ``num_bytes`` over the ranks with the same weights.

        With several ``copies`` of the sharded state, each is sharded over an equal number of adjacent ranks.
        """
        n = self.sizes.num_replicas // copies
        return self._seconds(num_bytes * (n - 1) / n, n, self.sizes.tp) if n > 1 else 0.0

    def copies_seconds(self, num_bytes: float, copies: int, *, of_experts: bool = False) -> float:
        """Return the time of an all-reduce of ``num_bytes`` between the copies of the sharded state."""
        sizes = self.sizes
        replicas, stride = sizes.num_replicas, sizes.tp
        if of_experts:
            replicas, stride = sizes.num_expert_replicas, sizes.ep * sizes.expert_tp
        apart = stride * (replicas // copies)
        return self._seconds(2 * num_bytes * (copies - 1) / copies, copies, apart) if copies > 1 else 0.0

    def expert_exchange_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-to-all of ``num_bytes`` over the expert-parallel ranks."""
        n = self.sizes.ep * self.sizes.expert_tp
        if n == 1:
            return 0.0
        here = min(n, GPUS_A_MACHINE)
        inside = num_bytes * (here - 1) / n / self.gpu.link_bandwidth
        # Every rank has its own port to other nodes.
        return _LATENCY_S + max(inside, num_bytes * (n - here) / n / self.gpu.network_bandwidth) / _LINK_SHARE

    def expert_gather_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-gather or reduce-scatter of ``num_bytes`` over the ranks that share all experts."""
        n = self.sizes.ep * self.sizes.expert_tp
        return self._seconds(num_bytes * (n - 1) / n, n, 1) if n > 1 else 0.0

    def expert_replica_seconds(self, num_bytes: float, copies: int = 1) -> float:
        """Return the time of an all-gather or reduce-scatter of ``num_bytes`` over the ranks with the same experts."""
        n = self.sizes.num_expert_replicas // copies
        stride = self.sizes.ep * self.sizes.expert_tp
        return self._seconds(num_bytes * (n - 1) / n, n, stride) if n > 1 else 0.0

    def pipeline_seconds(self, num_bytes: float) -> float:
        """Return the time of a message to the next stage."""
        stride = self.sizes.world_size // self.sizes.pp
        return self._seconds(num_bytes, 2, stride) if self.sizes.pp > 1 else 0.0

    def _seconds(self, num_bytes: float, num_ranks: int, stride: int) -> float:
        """Return the time to send ``num_bytes`` per rank in a group whose ranks are ``stride`` apart.

        If a group spans several nodes, its ranks on one node share the network ports.
        """
        bandwidth = self.gpu.link_bandwidth
        if num_ranks * stride > GPUS_A_MACHINE:
            ports = max(1, GPUS_A_MACHINE // stride)
            bandwidth = min(bandwidth, ports * self.gpu.network_bandwidth)
        return _LATENCY_S + num_bytes / (bandwidth * _LINK_SHARE)


TP, CP, DP, PP, EMBEDDING = ("tp",), ("cp",), ("dp",), ("pp",), ("embedding",)
CP_INNER, CP_OUTER = ("cp_inner",), ("cp_outer",)
DP_CP_INNER, DP_CP_OUTER = ("dp_cp_inner",), ("dp_cp_outer",)
EXPERT_MODEL, EXPERT_DP = ("ep", "etp"), ("edp",)
EXPERT_DP_INNER, EXPERT_DP_OUTER = ("edp_inner",), ("edp_outer",)
DP_CP, MODEL_PARALLEL, WORLD = ("dp", "cp"), ("pp", "tp"), GRID_AXES
_FORWARD, _BACKWARD, _WEIGHTS = range(len(PHASES))
_ONCE = {_FORWARD: 1, _BACKWARD: 1, _WEIGHTS: 1}
_AGAIN = {_FORWARD: 2, _BACKWARD: 1, _WEIGHTS: 1}


@dataclass(frozen=True)
class StepRank:
    """A rank of a configuration, and the sizes that its messages depend on."""

    config: RunConfig
    rank: int

    @property
    def sizes(self) -> ParallelSizes:
        return self.config.parallel_sizes

    @property
    def place(self) -> Place:
        return self.sizes.place(self.rank)

    @property
    def chunks(self) -> tuple[StageContents, ...]:
        return self.config.stage_layout.chunks(self.place["pp"])

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches per step."""
        training = self.config.training
        return training.global_batch_size // (training.micro_batch_size * self.sizes.dp)

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.config.model.params_dtype]

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on the rank, before sequence parallelism shards them."""
        return self.config.data.seq_length // self.sizes.cp * self.config.training.micro_batch_size

    @property
    def hidden_bytes(self) -> int:
        return self.tokens * self.config.model.hidden_size * self.element

    def replicas(self, *, of_experts: bool) -> tuple[tuple[str, ...], int, int]:
        """Return the axes of the ranks with the same parameters, the rank's index among them, and their number."""
        sizes, place = self.sizes, self.place
        if of_experts and sizes.has_expert_grid:
            of_stage = (place["dp"] * sizes.cp + place["cp"]) * sizes.tp + place["tp"]
            return EXPERT_DP, of_stage // (sizes.ep * sizes.expert_tp), sizes.num_expert_replicas
        return DP_CP, place["dp"] * sizes.cp + place["cp"], sizes.num_replicas

    def group_sizes(self) -> dict[tuple[str, ...], int]:
        """Return the size of every process group that communicates."""
        at_an_end = self.place["pp"] in (0, self.sizes.pp - 1)
        slices = {axes: self.sizes.size_of(axes) for axes in (TP, CP, DP, PP, DP_CP, MODEL_PARALLEL, WORLD)}
        slices |= {EXPERT_MODEL: self.sizes.ep * self.sizes.expert_tp, EXPERT_DP: self.sizes.num_expert_replicas}
        inner = self.config.model.cp_inner_size or 1
        levels = {CP_INNER: inner, CP_OUTER: self.sizes.cp // inner}
        copies = self.config.ddp.num_distributed_optimizer_instances
        levels |= {DP_CP_INNER: self.config.ddp.num_shards(self.sizes.num_replicas), DP_CP_OUTER: copies}
        experts = self.config.ddp.num_shards(self.sizes.num_expert_replicas)
        levels |= {EXPERT_DP_INNER: experts, EXPERT_DP_OUTER: copies}
        return slices | levels | {EMBEDDING: min(self.sizes.pp, 2) if at_an_end else 1}


def step_traffic(config: RunConfig, rank: int, capability: tuple[int, int]) -> Traffic:
    """Return the traffic of a rank in one training step on GPUs of a compute capability.

    Raises:
        ConfigurationError: this node cannot simulate CUDA, which traces of pieces need.
    """
    here, plan = StepRank(config, rank), Plan.of(config)
    total = TrafficSum(here.group_sizes())
    _add_samples(total, here)
    for chunk in here.chunks:
        for trace, times in _traces_of(plan, capability, chunk):
            for sent in trace.sent:
                # A trace has only as many data-parallel ranks as are needed to hold all experts.
                if sent.axes != DP:
                    count = here.num_microbatches * times[sent.phase]
                    total.add(sent.operation, sent.axes, sent.num_bytes, count)
        _add_global_loss(total, here, chunk)
    add_sends(total, here)
    add_gradients(total, here)
    add_scalars(total, here)
    return {key: volume for key, volume in total.traffic.items() if volume.num_calls}


def _add_samples(total: TrafficSum, here: StepRank) -> None:
    """Add the broadcast of each batch from the first rank of a tensor-parallel group to the others."""
    from megatron.training import batch_layout

    place = here.place
    num_bytes = batch_layout(here.config, place["pp"], place["cp"], here.config.model.vocab_size).num_bytes
    total.add("broadcast", TP, num_bytes, here.num_microbatches * (num_bytes > 0))


def _traces_of(
    plan: Plan, capability: tuple[int, int], chunk: StageContents
) -> Iterator[tuple[PieceTrace, dict[int, int]]]:
    """Yield the traces of a chunk's pieces, and how often each of their passes runs per micro-batch.

    Layers of one recompute group run forward again, one after the other. The recomputation of the last layer stops as
    soon as everything that the backward pass needs is saved; its own trace shows this.
    """
    if chunk.has_embedding:
        yield end_trace(plan, capability, has_loss=False), _ONCE
    numbers = chunk.layer_numbers
    groups, num_again = recomputed_groups(plan.model, len(numbers))
    for group in groups:
        *before, last = (numbers[place] for place in group)
        for number in before:
            yield layer_trace(plan, capability, number), _AGAIN
        yield layer_trace(plan, capability, last, is_again=True), _ONCE
    for number in numbers[num_again:]:
        yield layer_trace(plan, capability, number), _ONCE
    if chunk.has_loss:
        yield end_trace(plan, capability, has_loss=True), _ONCE


def _add_global_loss(total: TrafficSum, here: StepRank, chunk: StageContents) -> None:
    """Add the all-reduce of the tokens per expert over the data-parallel ranks, for the global auxiliary loss."""
    model = here.config.model
    if "global_aux_loss" not in model.moe.moe_aux_losses:
        return
    numbers = layer_numbers(model, chunk)
    _, num_again = recomputed_groups(model, len(chunk.layer_numbers))
    again = [*numbers[:num_again], *(numbers[len(chunk.layer_numbers) :] if num_again else ())]
    forwards = sum(model.has_experts(number) for number in [*numbers, *again])
    if "moe" in model.recomputed_modules:
        forwards *= 2
    score = max(here.element, 8 if model.moe.moe_router_dtype == "fp64" else 4)
    total.add("all_reduce", DP, (model.moe.num_experts or 0) * score, here.num_microbatches * forwards)


def add_sends(total: TrafficSum, here: StepRank) -> None:
    """Add activations for the next pipeline stage and gradients for the previous one."""
    message = Plan.of(here.config).message_bytes
    stage, last_stage, chunks = here.place["pp"], here.sizes.pp - 1, here.chunks
    for index in range(len(chunks)):
        is_first = index == 0 and stage == 0
        is_last = index == len(chunks) - 1 and stage == last_stage
        total.add("send", PP, message, here.num_microbatches * ((not is_first) + (not is_last)))


def add_gradients(total: TrafficSum, here: StepRank) -> None:
    """Add the gradient reductions (over replicas, copies and the ends of the pipeline) and the parameter gathers."""
    model, ddp, sizes = here.config.model, here.config.ddp, here.sizes
    grad_element = ELEMENT_BYTES[ddp.grad_dtype(model.params_dtype)]
    partial_bytes = 0
    for parameters, units in parameters_of_buffers(model, here.chunks, ddp.shards_over(sizes.num_replicas)):
        axes, replica, replicas = here.replicas(of_experts=parameters[0].is_expert)
        is_sharded, num_shards = ddp.shards_over(replicas), ddp.num_shards(replicas)
        has_copies = is_sharded and ddp.num_distributed_optimizer_instances > 1
        outer = EXPERT_DP_OUTER if axes == EXPERT_DP else DP_CP_OUTER
        if has_copies:
            axes = EXPERT_DP_INNER if axes == EXPERT_DP else DP_CP_INNER
        in_float8 = is_sharded and parameters[0].is_sent_in_float8
        element = 1 if in_float8 else here.element
        tied = [index for index, parameter in enumerate(parameters) if parameter.is_tied]
        buckets = plan_buckets([p.size for p in parameters], tied, ddp, replicas, units).buckets
        if in_float8:
            # The amax of every parameter, or of each expert's part of it, is reduced before the fp8 parameters are
            # gathered.
            is_of_bucket = ddp.overlap_param_gather and ddp.overlap_param_gather_with_optimizer_step
            scales = sum(parameter.num_scales for parameter in parameters)
            total.add("all_reduce", axes, 4 * scales, len(buckets) if is_of_bucket else 1)
        for bucket in buckets:
            grad_bytes = bucket.num_elements * grad_element
            if is_sharded:
                rounds = here.num_microbatches if ddp.shards_gradients else 1
                total.add("reduce_scatter", axes, grad_bytes, rounds)
                gathers = 1
                if ddp.shards_weights:
                    gathers = here.num_microbatches * num_gathers(units[bucket.ranges[0].index])
                total.add("all_gather", axes, bucket.num_elements * element, gathers)
            else:
                total.add("all_reduce", axes, grad_bytes)
            start, end = bucket.start, bucket.end
            if is_sharded:
                start, end = bucket.shard(replica % num_shards, num_shards)
                total.add("all_reduce", outer, (end - start) * grad_element, int(has_copies))
            for held in ranges_within(bucket.ranges, start, end):
                parameter, num_bytes = parameters[held.index], held.num_elements * grad_element
                if parameter.copies_to_sum:
                    partial_bytes += sizes.tp // parameter.copies_to_sum * num_bytes
                if parameter.is_tied:
                    total.add("all_reduce", EMBEDDING, num_bytes)
    if partial_bytes:
        total.add("all_reduce", TP, partial_bytes)


def add_scalars(total: TrafficSum, here: StepRank) -> None:
    """Add the token count, the gradient norm and other reductions of a few float64 numbers."""
    config = here.config
    if config.training.calculate_per_token_loss:
        total.add("broadcast", PP, 8)
        total.add("all_reduce", DP_CP, 8)
    sizes, num_further = here.sizes, config.model.mtp.mtp_depth
    layers = sum(config.model.moe_layers) + num_further * config.model.has_experts(config.model.num_layers)
    replicas = {sizes.num_replicas} | ({sizes.num_expert_replicas} if layers else set())
    is_of_world = sizes.has_expert_grid or any(config.ddp.shards_over(number) for number in replicas)
    norms = 16 if config.optimizer.log_num_zeros_in_grad else 8
    norms += 3 * 8 if config.optimizer.clips_by_kind else 0
    total.add("all_reduce", WORLD if is_of_world else MODEL_PARALLEL, norms)
    if layers:
        # Number of tokens per expert, and number of dropped tokens.
        total.add("all_reduce", WORLD, 8 * layers * ((config.model.moe.num_experts or 0) + 1))
    num_losses = bool(config.model.z_loss_coeff) + num_further
    if config.model.moe.num_experts is not None:
        num_losses += len(config.model.moe.moe_aux_losses) + bool(config.model.moe.moe_z_loss_coeff)
    total.add("all_reduce", WORLD, 32 + 16 * num_losses)
    if config.faults.watches:
        # Whether every rank accepts the step.
        total.add("all_reduce", WORLD, 8)
    if config.model.fp8.fp8_recipe == "delayed" and config.model.fp8.fp8_format is not None:
        # Amax of each operand of each linear layer, and of both linear layers of each expert.
        places = config.model.float8_places
        total.add("all_reduce", WORLD, places.num_layers * places.num_places * 3 * 4)


_COMMUNICATION_SMS = 20
"""Streaming multiprocessors that communication kernels take from matmuls (DeepSeek-V3, arXiv 2412.19437, 3.2.2)."""


@dataclass(frozen=True)
class _Shared:
    """Bytes that the ranks of a stage with the same weights exchange: for the experts, or for all other parameters.

    ``gradients`` are the bytes of the gradient buffers, or of their shards if gradients are sharded. ``weights`` are
    the bytes of the full weights. Each of the ``copies`` is sharded over ``shards`` adjacent ranks.
    """

    gradients: int
    weights: int
    shards: int
    copies: int
    of_experts: bool

    def seconds(self, links: Links, num_bytes: float) -> float:
        """Return the time of an all-gather or reduce-scatter of ``num_bytes``."""
        if self.of_experts:
            return links.expert_replica_seconds(num_bytes, self.copies)
        return links.replica_seconds(num_bytes, self.copies)


def exposed_replica_seconds(plan: Plan, links: Links, stage: StageState, slowest: float) -> float:
    """Return the exposed time of gradient reductions and parameter gathers.

    ``slowest`` is the time of a micro-batch on the slowest stage. Copies of the sharded state all-reduce their gradient
    shards after the last pass.
    """
    ddp, sizes = plan.ddp, plan.parallel_sizes
    several = [
        _shared(plan, sizes.num_replicas, stage, of_experts=False),
        _shared(plan, sizes.num_expert_replicas, stage, of_experts=True),
    ]
    several = [each for each in several if each.gradients]
    copied = sum(_copies_seconds(plan, links, each) for each in several)
    if ddp.shards_weights_over(sizes.num_replicas):
        return copied + plan.num_microbatches * _by_layer(plan, links, several, slowest)
    reduced = gathered = 0.0
    rounds = 1
    for each in several:
        if each.shards == 1:
            reduced += 2 * each.seconds(links, each.gradients)
            continue
        gathered += each.seconds(links, each.weights)
        if ddp.shards_gradients:
            # The full gradients of each micro-batch are reduced to shards.
            reduced, rounds = reduced + each.seconds(links, each.gradients * each.shards), plan.num_microbatches
        else:
            reduced += each.seconds(links, each.gradients)
    # A backward pass overlaps with the reductions, the first forward pass with the gathers.
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
    """Return the exposed time per micro-batch with FSDP, which gathers weights and reduces gradients layer by layer.

    A pass gathers the weights of the next layer while the current layer runs. Overlapped communication slows matmuls
    down.
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
