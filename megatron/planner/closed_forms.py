"""What a training step sends, as formulas of the configuration: docs/parallelism.md in code, without torch.

A rank's communications are counted as `process_group.CollectiveCall` counts them: by operation and axes, with the
bytes of the whole tensor that the operation is about. Names are those of the document: t, c and p are the tensor-,
context- and pipeline-parallel sizes, d the number of gradient replicas (dp × cp), m the micro-batches of a rank, A the
bytes of the hidden states of a rank's tokens before sequence parallelism shards them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.distributed.param_layout import parts_of_range, plan_buckets
from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.parallel_sizes import GRID_AXES, ParallelSizes, Place
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.tensor_parallel.overlap.linear_overlap import ROW_PARALLEL, linear_overlap
from megatron.planner.expert_layer import ExpertLayer, auxiliary_losses
from megatron.planner.layer_kinds import layer_numbers
from megatron.planner.traffic.adapter_traffic import IN_ORDER, add_adapters, idle_in_first_layer
from megatron.planner.traffic.exchange_traffic import ExchangeTraffic
from megatron.planner.traffic.float8_traffic import Float8LayerEnds
from megatron.planner.traffic.further_traffic import add_further
from megatron.planner.traffic.latent_traffic import add_latent
from megatron.planner.traffic.recomputed_layers import recomputed_layers
from megatron.planner.traffic.sample_traffic import sample_bytes
from megatron.planner.weight_gathers import num_gathers, parameters_of_buffers
from megatron.verification.traffic import Traffic, TrafficSum

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig

TP, CP, DP, PP, EMBEDDING = ("tp",), ("cp",), ("dp",), ("pp",), ("embedding",)
CP_INNER, CP_OUTER = ("cp_inner",), ("cp_outer",)
DP_CP_INNER, DP_CP_OUTER = ("dp_cp_inner",), ("dp_cp_outer",)
EXPERT_MODEL, EXPERT_DP = ("ep", "etp"), ("edp",)
EXPERT_DP_INNER, EXPERT_DP_OUTER = ("edp_inner",), ("edp_outer",)
DP_CP, MODEL_PARALLEL, WORLD = ("dp", "cp"), ("pp", "tp"), GRID_AXES


@dataclass(frozen=True)
class _Rank:
    """Hold a rank's place in the grid and the lengths that the formulas share."""

    config: RunConfig
    sizes: ParallelSizes
    place: Place

    @property
    def num_microbatches(self) -> int:
        training = self.config.training
        return training.global_batch_size // (training.micro_batch_size * self.sizes.dp)

    @property
    def tokens(self) -> int:
        """Return s/c · b: the tokens of a micro-batch that a rank holds."""
        return self.config.data.seq_length // self.sizes.cp * self.config.training.micro_batch_size

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.config.model.params_dtype]

    def replicas(self, *, of_experts: bool) -> tuple[tuple[str, ...], int, int]:
        """Return over which axes ranks hold the same parameters, this rank's place among them, and their number."""
        sizes, place = self.sizes, self.place
        if of_experts and sizes.has_expert_grid:
            of_stage = (place["dp"] * sizes.cp + place["cp"]) * sizes.tp + place["tp"]
            return EXPERT_DP, of_stage // (sizes.ep * sizes.expert_tp), sizes.num_expert_replicas
        return DP_CP, place["dp"] * sizes.cp + place["cp"], sizes.num_replicas

    @property
    def hidden_bytes(self) -> int:
        """Return A = s/c · b · h · e."""
        return self.tokens * self.config.model.hidden_size * self.element

    @property
    def head_bytes(self) -> int:
        """Return s/c · b · k · e."""
        return self.tokens * self.config.model.head_width * self.element

    def group_sizes(self) -> dict[tuple[str, ...], int]:
        """Return the number of ranks of every group that communicates."""
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


def step_traffic(config: RunConfig, rank: int) -> Traffic:
    """Return what a rank sends in one training step."""
    sizes = config.parallel_sizes
    here = _Rank(config, sizes, sizes.place(rank))
    total = TrafficSum(here.group_sizes())
    chunks = config.stage_layout.chunks(here.place["pp"])
    num_bytes = sample_bytes(config, here.tokens, chunks)
    total.add("broadcast", TP, num_bytes, here.num_microbatches * (num_bytes > 0))
    for index, chunk in enumerate(chunks):
        _add_microbatch(total, here, chunk)
        _add_sends(total, here, index, len(chunks))
        if chunk.has_loss and config.model.z_loss_coeff:
            # How many tokens count.
            total.add("all_reduce", CP, 8 if here.element == 8 else 4, here.num_microbatches)
    _add_gradients(total, here, chunks)
    _add_scalars(total, here)
    return {key: volume for key, volume in total.traffic.items() if volume.num_calls}


def _add_microbatch(total: TrafficSum, here: _Rank, chunk: StageContents) -> None:
    """Add what the layers, the embedding and the output layer send for all micro-batches."""
    m = here.num_microbatches
    model = here.config.model
    numbers, num_own = layer_numbers(model, chunk), len(chunk.layer_numbers)
    full, early = recomputed_layers(model, num_own)
    again = {*range(full), *(range(num_own, len(numbers)) if model.recompute_granularity == "full" else ())}
    has_experts = model.moe_layers
    of_experts = {place for place, number in enumerate(numbers) if has_experts[model.kind_of(number)]}
    of_float8 = {place for place, number in enumerate(numbers) if model.is_in_float8(number, model.num_layers)}
    for in_float8 in (False, True):
        own = of_float8 if in_float8 else set(range(len(numbers))) - of_float8
        if own & of_experts:
            _add_experts(total, here, own & of_experts, again, early, in_float8=in_float8)
        own = own - of_experts
        num_again = len(again.intersection(own))
        _add_layer_ends(total, here, in_float8, m * len(own), m * len(own), m * len(own))
        # What is recomputed runs forward again, up to the last thing that the backward pass needs.
        num_early = 0 if "linear_fc2" in model.adapted_parts else len(early.intersection(own))
        _add_layer_ends(total, here, in_float8, m * num_again, m * (num_again - num_early), 0)
        if model.sequence_parallel and "mlp" in model.recomputed_modules:
            # Run again, a feed-forward gathers its input, and ends before its output is scattered.
            if in_float8:
                _float8_ends(here).add_feed_forwards(partial(_add_over_tp, total), m * len(own))
            else:
                total.add("all_gather", TP, here.hidden_bytes, m * len(own))
    if model.lora_rank:
        _add_low_rank(total, here, chunk, again, of_experts)
    predictions = 1 + len(numbers) - num_own
    if predictions > 1:
        is_again = model.recompute_granularity == "full"
        add_further(partial(_add_over_tp, total), model, here.tokens, here.hidden_bytes, m, runs_again=is_again)
        # Labels and which of them count, in whole sequences.
        total.add("all_gather", CP, here.tokens * here.sizes.cp * 2 * 8, m)
    if here.config.model.qk_layernorm_across_heads:
        # A number a token for all queries, one for all keys, and their gradients.
        total.add("all_reduce", TP, here.tokens * max(here.element, 4), 2 * m * (2 * len(numbers) + len(again)))
    if model.distribute_saved_activations:
        length = 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
        total.add("all_gather", TP, here.hidden_bytes, m * math.ceil(full / length))
    for position, number in enumerate(numbers):
        if here.sizes.cp > 1:
            is_recomputed = "core_attn" in model.recomputed_modules or position in again
            exchange = ExchangeTraffic(model, here.sizes, here.head_bytes, here.element)
            exchange.add(total.add, model.cp_exchange(model.kind_of(number)), m * (1 + is_recomputed), m)
    A = here.hidden_bytes
    if here.config.model.sequence_parallel:
        total.add("reduce_scatter", TP, A, m * chunk.has_embedding)
        is_trained = not model.lora_rank
        total.add("all_gather", TP, A, m * (chunk.has_embedding and is_trained))
        output = linear_overlap(here.config.model, "output")
        _add_beside_product(total, here, "all_gather", output.forward, m * chunk.has_loss, predictions)
        total.add("all_gather", TP, predictions * A, m * (chunk.has_loss and is_trained))
        _add_beside_product(total, here, "reduce_scatter", output.backward, m * chunk.has_loss, predictions)
    else:
        total.add("all_reduce", TP, A, m * chunk.has_embedding)
        total.add("all_reduce", TP, predictions * A, m * chunk.has_loss)
    # The cross-entropy: the largest normalizer, then the sum of exponentials and the label's logit.
    numbers_bytes = predictions * here.tokens * max(here.element, 4)
    total.add("all_reduce", TP, numbers_bytes, m * chunk.has_loss)
    total.add("all_reduce", TP, 2 * numbers_bytes, m * chunk.has_loss)


def _add_low_rank(total: TrafficSum, here: _Rank, chunk: StageContents, again: set[int], of_experts: set[int]) -> None:
    """Add what low-rank adapters send for all micro-batches, and take away what a frozen embedding wants nothing of.

    The layers at the places ``of_experts`` have adapters of a feed-forward's ends where they have a shared expert.
    """
    model, m = here.config.model, here.num_microbatches
    add, narrow_bytes = partial(_add_over_tp, total), here.tokens * model.lora_rank * here.element
    layers = set(range(len(chunk.layer_numbers)))
    shared = of_experts if model.moe_shared_expert_intermediate_size else set[int]()
    fed = layers - of_experts | shared
    for reached, names in ((layers, IN_ORDER[:2]), (fed, IN_ORDER[2:])):
        add_adapters(add, model, narrow_bytes, m * len(reached) + m * len(again & reached), m * len(reached), names)
    if {"moe", "shared_experts"}.intersection(model.recomputed_modules):
        add_adapters(add, model, narrow_bytes, m * len(shared), 0, IN_ORDER[2:])
    if "mlp" in model.recomputed_modules:
        dense = m * len(layers - of_experts)
        add_adapters(add, model, narrow_bytes, dense, 0, IN_ORDER[2:])
        if "linear_fc2" in model.adapted_parts:
            # Run again, a feed-forward goes on to its adapter.
            is_in_product = linear_overlap(model, "fc2").forward
            operation = "reduce_scatter" if model.sequence_parallel else "all_reduce"
            _add_beside_product(total, here, operation, is_in_product, dense)
    if 0 not in chunk.layer_numbers:
        return
    first, idle = chunk.layer_numbers.index(0), idle_in_first_layer(model)
    if first in of_experts and "fc1" in idle:
        # Nothing of the experts' input is wanted either, nor of the router's.
        _expert_layer(here).add_traffic_of_input(total.add, -m)
        idle = idle if first in shared else idle[:2]
    for name in idle:
        is_column = name not in ROW_PARALLEL
        if not model.sequence_parallel:
            add("all_reduce", here.hidden_bytes, -m if is_column else 0)
        elif model.is_in_float8(0, model.num_layers):
            _float8_ends(here).add_gradient(add, -m, is_column=is_column)
        else:
            is_chunked = linear_overlap(model, name).backward
            _add_beside_product(total, here, "reduce_scatter" if is_column else "all_gather", is_chunked, -m)


def _expert_layer(here: _Rank) -> ExpertLayer:
    return ExpertLayer(here.config.model, here.tokens, here.config.training.micro_batch_size, here.element)


def _float8_ends(here: _Rank) -> Float8LayerEnds:
    return Float8LayerEnds(here.config.model, here.tokens, here.hidden_bytes)


def _add_over_tp(total: TrafficSum, operation: str, num_bytes: int, count: int) -> None:
    total.add(operation, TP, num_bytes, count)


def _add_experts(
    total: TrafficSum, here: _Rank, places: set[int], again: set[int], early: set[int], *, in_float8: bool = False
) -> None:
    """Add what layers of experts send for all micro-batches; those at the places of ``again`` run forward again.

    Those at ``early`` places, and feed-forwards that alone run again, stop when all that they save is there.
    """
    model, m, num_layers = here.config.model, here.num_microbatches, len(places)
    entered, backward = m * (num_layers + len(again & places)), m * num_layers
    fed_again = backward if "moe" in model.recomputed_modules else 0
    stopped = m * len(early & places) + fed_again
    layer = _expert_layer(here)
    layer.add_traffic(total.add, entered + fed_again, entered + fed_again - stopped, backward)
    _add_layer_ends(total, here, in_float8, entered, entered, backward, ("attention",))
    if layer.shared_width:
        goes_on = model.moe_shared_expert_gate or "linear_fc2" in model.adapted_parts
        stopped = 0 if goes_on or model.moe_shared_expert_overlap else stopped
        times = entered + fed_again
        left = times - stopped
        if "shared_experts" in model.recomputed_modules and not fed_again:
            # Run again, it ends where all that is saved is there, which with a gate is behind its last sum.
            times, left = times + backward, left + (backward if goes_on else 0)
        _add_layer_ends(total, here, in_float8, times, left, backward, ("feed-forward",))


def _add_layer_ends(
    total: TrafficSum,
    here: _Rank,
    in_float8: bool,
    entered: int,
    left: int,
    backward: int,
    regions: tuple[str, ...] = ("attention", "feed-forward"),
) -> None:
    """Add what a number of layers send where they enter and leave these tensor-parallel regions."""
    A = here.hidden_bytes
    model = here.config.model
    if model.multi_latent_attention and "attention" in regions:
        again = backward if "mla_up_proj" in model.recomputed_modules else 0
        tokens, times = here.tokens * here.element, left if regions == ("attention",) else entered
        if in_float8 and model.sequence_parallel:
            _float8_ends(here).add_latent(partial(_add_over_tp, total), entered, times, backward, again)
        else:
            add_latent(partial(_add_over_tp, total), model, tokens, entered, times, backward, again)
        regions = tuple(region for region in regions if region != "attention")
    if here.config.model.sequence_parallel and in_float8:
        for region in regions:
            times = entered if region == "attention" else left
            _float8_ends(here).add(partial(_add_over_tp, total), entered, times, backward)
    elif here.config.model.sequence_parallel:
        qkv, proj, fc1, fc2 = (linear_overlap(here.config.model, name) for name in ("qkv", "proj", "fc1", "fc2"))
        if fc2.forward or fc2.backward:
            left = entered  # The product and its sum over the ranks are one operation, which runs to its end.
        ends = {"attention": (qkv, proj, entered), "feed-forward": (fc1, fc2, left)}
        for column, row, times in (ends[region] for region in regions):
            _add_beside_product(total, here, "all_gather", column.forward, entered)
            _add_beside_product(total, here, "reduce_scatter", row.forward, times)
            # Backward: the gradient of the output, and the input once more for the gradient of a weight that has one.
            _add_beside_product(total, here, "all_gather", row.backward, backward)
            total.add("all_gather", TP, A, 0 if here.config.model.lora_rank else backward)
            _add_beside_product(total, here, "reduce_scatter", column.backward, backward)
    else:
        total.add("all_reduce", TP, A, sum({"attention": entered, "feed-forward": left}[region] for region in regions))
        total.add("all_reduce", TP, A, len(regions) * backward)


def _add_beside_product(
    total: TrafficSum, here: _Rank, operation: str, is_chunked: bool, count: int, times: int = 1
) -> None:
    """Add a collective of A, so many times as large, or the t - 1 sends of its parts round a ring beside a product."""
    t = here.sizes.tp
    if is_chunked:
        total.add("send", TP, times * here.hidden_bytes // t, count * (t - 1))
    else:
        total.add(operation, TP, times * here.hidden_bytes, count)


def _add_sends(total: TrafficSum, here: _Rank, index: int, num_chunks: int) -> None:
    """Add a chunk's activations for the next stage and gradients for the previous one."""
    message = here.hidden_bytes // (here.sizes.tp if here.config.model.sequence_parallel else 1)
    is_first = index == 0 and here.place["pp"] == 0
    is_last = index == num_chunks - 1 and here.place["pp"] == here.sizes.pp - 1
    total.add("send", PP, message, here.num_microbatches * ((not is_first) + (not is_last)))


def _add_gradients(total: TrafficSum, here: _Rank, chunks: tuple[StageContents, ...]) -> None:
    """Add the reductions of gradients over replicas, copies and the ends of the pipeline, and the new parameters."""
    model, ddp, sizes = here.config.model, here.config.ddp, here.sizes
    grad_element = ELEMENT_BYTES[ddp.grad_dtype(model.params_dtype)]
    partial_bytes = 0
    for parameters, units in parameters_of_buffers(model, chunks, ddp.shards_over(sizes.num_replicas)):
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
            # The amax of every parameter, or of each expert's part of it, before what they scale is sent.
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
                    gathers = here.num_microbatches * num_gathers(units[bucket.slots[0].index])
                total.add("all_gather", axes, bucket.num_elements * element, gathers)
            else:
                total.add("all_reduce", axes, grad_bytes)
            start, end = bucket.start, bucket.end
            if is_sharded:
                start, end = bucket.shard(replica % num_shards, num_shards)
                total.add("all_reduce", outer, (end - start) * grad_element, int(has_copies))
            for part in parts_of_range(bucket.slots, start, end):
                parameter, part_bytes = parameters[part.index], (part.end - part.start) * grad_element
                if parameter.copies_to_sum:
                    partial_bytes += sizes.tp // parameter.copies_to_sum * part_bytes
                if parameter.is_tied:
                    total.add("all_reduce", EMBEDDING, part_bytes)
    if partial_bytes:
        total.add("all_reduce", TP, partial_bytes)


def _add_scalars(total: TrafficSum, here: _Rank) -> None:
    """Add the token count, the gradient norm, and what all ranks agree on: a few float64 numbers each."""
    config = here.config
    if config.training.calculate_per_token_loss:
        total.add("broadcast", PP, 8)
        total.add("all_reduce", DP_CP, 8)
    sizes, num_further = here.sizes, config.model.num_further_tokens
    layers = sum(config.model.moe_layers) + num_further * config.model.moe_layers[-1]
    replicas = {sizes.num_replicas} | ({sizes.num_expert_replicas} if layers else set())
    is_of_world = sizes.has_expert_grid or any(config.ddp.shards_over(number) for number in replicas)
    norms = 16 if config.optimizer.log_num_zeros_in_grad else 8
    norms += 3 * 8 if config.optimizer.clips_by_kind else 0
    total.add("all_reduce", WORLD if is_of_world else MODEL_PARALLEL, norms)
    if layers:
        # How many tokens each expert was given, and how many choices were dropped.
        total.add("all_reduce", WORLD, 8 * layers * ((config.model.num_experts or 0) + 1))
    num_losses = len(auxiliary_losses(config.model)) + bool(config.model.z_loss_coeff) + num_further
    total.add("all_reduce", WORLD, 32 + 16 * num_losses)
    if config.faults.watches:
        # Whether every rank accepts the step.
        total.add("all_reduce", WORLD, 8)
    if config.model.fp8_recipe == "delayed" and config.model.fp8_format is not None:
        # The amax of each operand of each linear layer, and of each expert's two.
        places = config.model.float8_places
        total.add("all_reduce", WORLD, places.num_layers * places.num_places * 3 * 4)
