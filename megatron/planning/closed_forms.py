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

from megatron.core.context_parallel.head_sharing import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.distributed.param_layout import parts_of_range, plan_buckets
from megatron.core.parallel_sizes import GRID_AXES, ParallelSizes, Place
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.tensor_parallel.overlap.linear_overlap import ROW_PARALLEL, linear_overlap
from megatron.planning.adapter_traffic import add_adapters, idle_in_first_layer
from megatron.planning.float8_traffic import Float8LayerEnds
from megatron.planning.plan import refuse_unplanned
from megatron.planning.weight_gathers import num_gathers, parameters_of_buffers

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig

ELEMENT_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Volume:
    """Hold how many communications there are and how many bytes they are about."""

    num_calls: int
    num_bytes: int

    def __add__(self, other: Volume) -> Volume:
        """Return both together."""
        return Volume(self.num_calls + other.num_calls, self.num_bytes + other.num_bytes)

    def __mul__(self, count: int) -> Volume:
        """Return ``count`` times this."""
        return Volume(self.num_calls * count, self.num_bytes * count)


Traffic = dict[tuple[str, tuple[str, ...]], Volume]
"""Volumes by operation and axes."""

TP, CP, PP, EMBEDDING = ("tp",), ("cp",), ("pp",), ("embedding",)
CP_INNER, CP_OUTER = ("cp_inner",), ("cp_outer",)
DP_CP_INNER, DP_CP_OUTER = ("dp_cp_inner",), ("dp_cp_outer",)
DP_CP, MODEL_PARALLEL, WORLD = ("dp", "cp"), ("pp", "tp"), GRID_AXES


class _Sum:
    """Add up communications; those over one rank are none."""

    def __init__(self, sizes: dict[tuple[str, ...], int]) -> None:
        self.sizes = sizes
        self.traffic: Traffic = {}

    def add(self, operation: str, axes: tuple[str, ...], num_bytes: int, count: int = 1) -> None:
        if self.sizes[axes] > 1 and count:
            key = (operation, axes)
            self.traffic[key] = self.traffic.get(key, Volume(0, 0)) + Volume(1, num_bytes) * count


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

    @property
    def hidden_bytes(self) -> int:
        """Return A = s/c · b · h · e."""
        return self.tokens * self.config.model.hidden_size * self.element

    @property
    def head_bytes(self) -> int:
        """Return s/c · b · k · e."""
        return self.tokens * self.config.model.kv_channels * self.element

    def group_sizes(self) -> dict[tuple[str, ...], int]:
        """Return the number of ranks of every group that communicates."""
        at_an_end = self.place["pp"] in (0, self.sizes.pp - 1)
        slices = {axes: self.sizes.size_of(axes) for axes in (TP, CP, PP, DP_CP, MODEL_PARALLEL, WORLD)}
        inner = self.config.model.cp_inner_size or 1
        levels = {CP_INNER: inner, CP_OUTER: self.sizes.cp // inner}
        copies = self.config.ddp.num_distributed_optimizer_instances
        levels |= {DP_CP_INNER: self.config.ddp.num_shards(self.sizes.num_replicas), DP_CP_OUTER: copies}
        return slices | levels | {EMBEDDING: min(self.sizes.pp, 2) if at_an_end else 1}


def step_traffic(config: RunConfig, rank: int) -> Traffic:
    """Return what a rank sends in one training step.

    Raises:
        ConfigurationError: the model has experts, latent attention or further tokens, which are not planned.
    """
    refuse_unplanned(config.model)
    sizes = config.parallel_sizes
    here = _Rank(config, sizes, sizes.place(rank))
    total = _Sum(here.group_sizes())
    chunks = config.stage_layout.chunks(here.place["pp"])
    _add_samples(total, here, chunks)
    for index, chunk in enumerate(chunks):
        _add_microbatch(total, here, chunk)
        _add_sends(total, here, index, len(chunks))
    _add_gradients(total, here, chunks)
    _add_scalars(total, here)
    return {key: volume for key, volume in total.traffic.items() if volume.num_calls}


def _add_samples(total: _Sum, here: _Rank, chunks: tuple[StageContents, ...]) -> None:
    """Add what the first tensor-parallel rank sends the others of the samples that it reads, once a micro-batch."""
    model, data = here.config.model, here.config.data
    has_embedding = any(chunk.has_embedding for chunk in chunks)
    has_loss = any(chunk.has_loss for chunk in chunks)
    token = 2 if model.vocab_size <= 1 << 16 else 4
    position = 2 if data.seq_length <= 1 << 16 else 4
    num_bytes = here.tokens * token * has_embedding
    # Labels, one byte a token that says whether it counts, and how many of the whole micro-batch do.
    num_bytes += (here.tokens * (token + 1) + 8) * has_loss
    is_rotary = model.position_embedding_type == "rope"
    if data.reset_position_ids and (is_rotary or (model.position_embedding_type != "none" and has_embedding)):
        num_bytes += here.tokens * position
    if data.reset_attention_mask and any(chunk.layer_numbers for chunk in chunks):
        num_bytes += here.tokens * here.sizes.cp * position  # of the whole sequences
    total.add("broadcast", TP, num_bytes, here.num_microbatches * (num_bytes > 0))


def _add_microbatch(total: _Sum, here: _Rank, chunk: StageContents) -> None:
    """Add what the layers, the embedding and the output layer send for all micro-batches."""
    m = here.num_microbatches
    layers = len(chunk.layer_numbers)
    full, early = _recomputed(here, layers)
    model = here.config.model
    float8_layers = model.float8_layers(model.num_layers)
    for in_float8 in (False, True):
        own = [place for place, number in enumerate(chunk.layer_numbers) if (number in float8_layers) == in_float8]
        num_again = sum(place < full for place in own)
        _add_layer_ends(total, here, in_float8, m * len(own), m * len(own), m * len(own))
        # What is recomputed runs forward again, up to the last thing that the backward pass needs.
        _add_layer_ends(total, here, in_float8, m * num_again, m * (num_again - len(early.intersection(own))), 0)
        if model.sequence_parallel and "mlp" in model.recomputed_modules:
            # Run again, a feed-forward gathers its input, and ends before its output is scattered.
            if in_float8:
                _float8_ends(here).add_feed_forwards(partial(_add_over_tp, total), m * len(own))
            else:
                total.add("all_gather", TP, here.hidden_bytes, m * len(own))
    if model.lora_rank:
        _add_low_rank(total, here, chunk, full)
    if here.config.model.qk_layernorm_across_heads:
        # A number a token for all queries, one for all keys, and their gradients.
        total.add("all_reduce", TP, here.tokens * max(here.element, 4), 2 * m * (2 * layers + full))
    if model.distribute_saved_activations:
        length = 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
        total.add("all_gather", TP, here.hidden_bytes, m * math.ceil(full / length))
    for position, number in enumerate(chunk.layer_numbers):
        _add_exchange(total, here, number, is_recomputed="core_attn" in model.recomputed_modules or position < full)
    A = here.hidden_bytes
    if here.config.model.sequence_parallel:
        total.add("reduce_scatter", TP, A, m * chunk.has_embedding)
        is_trained = not model.lora_rank
        total.add("all_gather", TP, A, m * (chunk.has_embedding and is_trained))
        output = linear_overlap(here.config.model, "output")
        _add_beside_product(total, here, "all_gather", output.forward, m * chunk.has_loss)
        total.add("all_gather", TP, A, m * (chunk.has_loss and is_trained))
        _add_beside_product(total, here, "reduce_scatter", output.backward, m * chunk.has_loss)
    else:
        total.add("all_reduce", TP, A, m * chunk.has_embedding)
        total.add("all_reduce", TP, A, m * chunk.has_loss)
    # The cross-entropy: the largest normalizer, then the sum of exponentials and the label's logit.
    wide = max(here.element, 4)
    total.add("all_reduce", TP, here.tokens * wide, m * chunk.has_loss)
    total.add("all_reduce", TP, 2 * here.tokens * wide, m * chunk.has_loss)


def _recomputed(here: _Rank, layers: int) -> tuple[int, set[int]]:
    """Return how many layers, the first ones, run forward again, and which stop before their last communication.

    A recomputed group of layers ends where the backward pass has all that it saved. Without dropout nothing is saved
    behind the last layer's fc2, whose sum over the tensor ranks is then left out, unless a norm or an adapter comes
    after it.
    """
    model = here.config.model
    if model.recompute_granularity != "full":
        return 0, set()
    length = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        recomputed, length = min(length, layers), 1
    else:
        recomputed = layers
    ends = {min(start + length, layers) - 1 for start in range(0, recomputed, length)}
    is_last = (
        model.hidden_dropout == 0.0 and model.norm_placement == "before" and "linear_fc2" not in model.adapted_parts
    )
    return recomputed, ends if is_last else set()


def _add_low_rank(total: _Sum, here: _Rank, chunk: StageContents, num_again: int) -> None:
    """Add what low-rank adapters send for all micro-batches, and take away what a frozen embedding wants nothing of."""
    model, m, layers = here.config.model, here.num_microbatches, len(chunk.layer_numbers)
    add, narrow_bytes = partial(_add_over_tp, total), here.tokens * model.lora_rank * here.element
    add_adapters(add, model, narrow_bytes, m * (layers + num_again), m * layers)
    if "mlp" in model.recomputed_modules:
        add_adapters(add, model, narrow_bytes, m * layers, 0, ("fc1", "fc2"))
        if "linear_fc2" in model.adapted_parts:
            # Run again, a feed-forward goes on to its adapter.
            is_in_product = linear_overlap(model, "fc2").forward
            operation = "reduce_scatter" if model.sequence_parallel else "all_reduce"
            _add_beside_product(total, here, operation, is_in_product, m * layers)
    if 0 not in chunk.layer_numbers:
        return
    for name in idle_in_first_layer(model):
        is_column = name not in ROW_PARALLEL
        if not model.sequence_parallel:
            add("all_reduce", here.hidden_bytes, -m if is_column else 0)
        elif 0 in model.float8_layers(model.num_layers):
            _float8_ends(here).add_gradient(add, -m, is_column=is_column)
        else:
            is_chunked = linear_overlap(model, name).backward
            _add_beside_product(total, here, "reduce_scatter" if is_column else "all_gather", is_chunked, -m)


def _float8_ends(here: _Rank) -> Float8LayerEnds:
    return Float8LayerEnds(here.config.model, here.tokens, here.hidden_bytes)


def _add_over_tp(total: _Sum, operation: str, num_bytes: int, count: int) -> None:
    total.add(operation, TP, num_bytes, count)


def _add_layer_ends(total: _Sum, here: _Rank, in_float8: bool, entered: int, left: int, backward: int) -> None:
    """Add what a number of layers send where they enter and leave their two tensor-parallel regions."""
    A = here.hidden_bytes
    if here.config.model.sequence_parallel and in_float8:
        _float8_ends(here).add(partial(_add_over_tp, total), entered, left, backward)
    elif here.config.model.sequence_parallel:
        qkv, proj, fc1, fc2 = (linear_overlap(here.config.model, name) for name in ("qkv", "proj", "fc1", "fc2"))
        if fc2.forward or fc2.backward:
            left = entered  # The product and its sum over the ranks are one operation, which runs to its end.
        for column, row, times in (qkv, proj, entered), (fc1, fc2, left):
            _add_beside_product(total, here, "all_gather", column.forward, entered)
            _add_beside_product(total, here, "reduce_scatter", row.forward, times)
            # Backward: the gradient of the output, and the input once more for the gradient of a weight that has one.
            _add_beside_product(total, here, "all_gather", row.backward, backward)
            total.add("all_gather", TP, A, 0 if here.config.model.lora_rank else backward)
            _add_beside_product(total, here, "reduce_scatter", column.backward, backward)
    else:
        total.add("all_reduce", TP, A, entered + left)
        total.add("all_reduce", TP, A, 2 * backward)


def _add_beside_product(total: _Sum, here: _Rank, operation: str, is_chunked: bool, count: int) -> None:
    """Add a collective of A, or the t - 1 sends of A/t of a ring beside a layer's product."""
    t = here.sizes.tp
    if is_chunked:
        total.add("send", TP, here.hidden_bytes // t, count * (t - 1))
    else:
        total.add(operation, TP, here.hidden_bytes, count)


def _add_exchange(total: _Sum, here: _Rank, number: int, is_recomputed: bool) -> None:
    """Add what the attention of a layer sends for all micro-batches."""
    model, c = here.config.model, here.sizes.cp
    if c == 1:
        return
    exchange = model.cp_exchange(number)
    groups = key_value_heads_of_rank(model.num_query_groups, here.sizes.tp)
    forwards = here.num_microbatches * (1 + is_recomputed)
    if exchange == "p2p":
        _add_ring(total, here, CP, c, groups, forwards)
    elif exchange == "all_gather":
        gathered = 2 * groups * here.head_bytes * c
        total.add("all_gather", CP, gathered, forwards)
        total.add("reduce_scatter", CP, gathered, here.num_microbatches)
    elif exchange == "a2a":
        _add_all_to_alls(total, here, CP, c, groups, forwards)
    else:
        inner = model.cp_inner_size or 1
        # A rank of the ring has a share of the heads, and the tokens of all who share them: as many bytes as before.
        groups = _add_all_to_alls(total, here, CP_INNER, inner, groups, forwards)
        _add_ring(total, here, CP_OUTER, c // inner, groups, forwards)


def _add_ring(total: _Sum, here: _Rank, axes: tuple[str, ...], size: int, groups: int, forwards: int) -> None:
    keys_and_values, backwards = 2 * groups * here.head_bytes, here.num_microbatches
    total.add("send", axes, keys_and_values, (size - 1) * (forwards + backwards))
    total.add("send", axes, keys_and_values // here.element * max(here.element, 4), size * backwards)


def _add_all_to_alls(total: _Sum, here: _Rank, axes: tuple[str, ...], size: int, groups: int, forwards: int) -> int:
    """Add what shares the heads, and return the key-value heads that are shared, repeated ones included."""
    model, backwards = here.config.model, here.num_microbatches
    heads = model.num_attention_heads // here.sizes.tp
    copies = copies_of_key_value_heads(heads, groups, size)
    assert copies is not None, "a checked configuration shares the heads"
    there = (heads + 2 * copies * groups) * here.head_bytes
    # A recomputed core alone ends before its output goes back: nothing behind it is needed.
    again = forwards - backwards if model.recompute_granularity == "full" else 0
    total.add("all_to_all", axes, there, forwards + backwards)
    total.add("all_to_all", axes, heads * here.head_bytes, 2 * backwards + again)
    return copies * groups


def _add_sends(total: _Sum, here: _Rank, index: int, num_chunks: int) -> None:
    """Add a chunk's activations for the next stage and gradients for the previous one."""
    message = here.hidden_bytes // (here.sizes.tp if here.config.model.sequence_parallel else 1)
    is_first = index == 0 and here.place["pp"] == 0
    is_last = index == num_chunks - 1 and here.place["pp"] == here.sizes.pp - 1
    total.add("send", PP, message, here.num_microbatches * ((not is_first) + (not is_last)))


def _add_gradients(total: _Sum, here: _Rank, chunks: tuple[StageContents, ...]) -> None:
    """Add the reductions of gradients over replicas, copies and the ends of the pipeline, and the new parameters."""
    model, ddp, sizes = here.config.model, here.config.ddp, here.sizes
    is_sharded = ddp.shards_over(sizes.num_replicas)
    grad_element = ELEMENT_BYTES[ddp.grad_dtype(model.params_dtype)]
    replica = here.place["dp"] * sizes.cp + here.place["cp"]
    num_shards = ddp.num_shards(sizes.num_replicas)
    has_copies = is_sharded and ddp.num_distributed_optimizer_instances > 1
    sharding = DP_CP_INNER if has_copies else DP_CP
    partial_bytes = 0
    for parameters, units in parameters_of_buffers(model, chunks, is_sharded):
        in_float8 = is_sharded and parameters[0].is_sent_in_float8
        element = 1 if in_float8 else here.element
        tied = [index for index, parameter in enumerate(parameters) if parameter.is_tied]
        buckets = plan_buckets([p.size for p in parameters], tied, ddp, sizes.num_replicas, units).buckets
        if in_float8:
            # The amax of every parameter, before what they scale is sent.
            is_of_bucket = ddp.overlap_param_gather and ddp.overlap_param_gather_with_optimizer_step
            total.add("all_reduce", sharding, 4 * len(parameters), len(buckets) if is_of_bucket else 1)
        for bucket in buckets:
            grad_bytes = bucket.num_elements * grad_element
            if is_sharded:
                rounds = here.num_microbatches if ddp.shards_gradients else 1
                total.add("reduce_scatter", sharding, grad_bytes, rounds)
                gathers = 1
                if ddp.shards_weights:
                    gathers = here.num_microbatches * num_gathers(units[bucket.slots[0].index])
                total.add("all_gather", sharding, bucket.num_elements * element, gathers)
            else:
                total.add("all_reduce", DP_CP, grad_bytes)
            start, end = bucket.start, bucket.end
            if is_sharded:
                start, end = bucket.shard(replica % num_shards, num_shards)
                total.add("all_reduce", DP_CP_OUTER, (end - start) * grad_element, int(has_copies))
            for part in parts_of_range(bucket.slots, start, end):
                parameter, part_bytes = parameters[part.index], (part.end - part.start) * grad_element
                if parameter.copies_to_sum:
                    partial_bytes += sizes.tp // parameter.copies_to_sum * part_bytes
                if parameter.is_tied:
                    total.add("all_reduce", EMBEDDING, part_bytes)
    if partial_bytes:
        total.add("all_reduce", TP, partial_bytes)


def _add_scalars(total: _Sum, here: _Rank) -> None:
    """Add the token count, the gradient norm, and what all ranks agree on: a few float64 numbers each."""
    config = here.config
    if config.training.calculate_per_token_loss:
        total.add("broadcast", PP, 8)
        total.add("all_reduce", DP_CP, 8)
    is_sharded = config.ddp.shards_over(here.sizes.num_replicas)
    norms = 16 if config.optimizer.log_num_zeros_in_grad else 8
    total.add("all_reduce", WORLD if is_sharded else MODEL_PARALLEL, norms)
    total.add("all_reduce", WORLD, 32)
    if config.model.fp8_recipe == "delayed" and config.model.float8_layers(config.model.num_layers):
        # The amax of each operand of each linear layer.
        total.add("all_reduce", WORLD, config.model.num_layers * 4 * 3 * 4)
