"""What a training step sends, as formulas of the configuration: docs/parallelism.md in code, without torch.

A rank's communications are counted as `process_group.CollectiveCall` counts them: by operation and axes, with the
bytes of the whole tensor that the operation is about. Names are those of the document: t, c and p are the tensor-,
context- and pipeline-parallel sizes, d the number of gradient replicas (dp × cp), m the micro-batches of a rank, A the
bytes of the hidden states of a rank's tokens before sequence parallelism cuts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.distributed.param_layout import ParamLayout, default_bucket_size, parts_of_range, plan_layout
from megatron.core.pipeline_parallel.stage_layout import StageContents
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
DP_CP, MODEL_PARALLEL, WORLD = ("dp", "cp"), ("pp", "tp"), ("pp", "dp", "cp", "tp")


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
class _Place:
    """Hold a rank's coordinates and the lengths that the formulas share."""

    config: RunConfig
    rank: int

    @property
    def tp(self) -> int:
        return self.config.model.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        return self.config.model.context_parallel_size

    @property
    def pp(self) -> int:
        return self.config.model.pipeline_model_parallel_size

    @property
    def dp(self) -> int:
        return self.config.data_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // (self.tp * self.cp * self.dp)

    @property
    def replica(self) -> int:
        """Return the place among the d ranks that hold the same weights."""
        return self.rank // self.tp % (self.dp * self.cp)

    @property
    def num_microbatches(self) -> int:
        training = self.config.training
        return training.global_batch_size // (training.micro_batch_size * self.dp)

    @property
    def tokens(self) -> int:
        """Return s/c · b: the tokens of a micro-batch that a rank holds."""
        return self.config.data.seq_length // self.cp * self.config.training.micro_batch_size

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.config.model.params_dtype]

    @property
    def hidden_bytes(self) -> int:
        """Return A = s/c · b · h · e."""
        return self.tokens * self.config.model.hidden_size * self.element

    @property
    def grad_element(self) -> int:
        if self.config.ddp.grad_reduce_in_bf16 and self.element == 2:
            return 2
        return max(self.element, 4)

    def sizes(self) -> dict[tuple[str, ...], int]:
        """Return the number of ranks of every group that communicates."""
        at_an_end = self.stage in (0, self.pp - 1)
        return {
            TP: self.tp,
            CP: self.cp,
            PP: self.pp,
            EMBEDDING: min(self.pp, 2) if at_an_end else 1,
            DP_CP: self.dp * self.cp,
            MODEL_PARALLEL: self.tp * self.pp,
            WORLD: self.config.world_size,
        }


def step_traffic(config: RunConfig, rank: int) -> Traffic:
    """Return what a rank sends in one training step."""
    place = _Place(config, rank)
    total = _Sum(place.sizes())
    chunks = config.stage_layout.chunks(place.stage)
    _add_samples(total, place, chunks)
    for index, chunk in enumerate(chunks):
        _add_microbatch(total, place, chunk)
        _add_sends(total, place, index, len(chunks))
    _add_gradients(total, place, chunks)
    _add_scalars(total, place)
    return total.traffic


def _add_samples(total: _Sum, place: _Place, chunks: tuple[StageContents, ...]) -> None:
    """Add what the first tensor-parallel rank sends the others of the samples that it reads, once a micro-batch."""
    model, data = place.config.model, place.config.data
    has_embedding = any(chunk.has_embedding for chunk in chunks)
    has_loss = any(chunk.has_loss for chunk in chunks)
    token = 2 if model.vocab_size <= 1 << 16 else 4
    position = 2 if data.seq_length <= 1 << 16 else 4
    num_bytes = place.tokens * token * has_embedding
    # Labels, one byte a token that says whether it counts, and how many of the whole micro-batch do.
    num_bytes += (place.tokens * (token + 1) + 8) * has_loss
    is_rotary = model.position_embedding_type == "rope"
    if data.reset_position_ids and (is_rotary or (model.position_embedding_type != "none" and has_embedding)):
        num_bytes += place.tokens * position
    if data.reset_attention_mask and any(chunk.layer_numbers for chunk in chunks):
        num_bytes += place.tokens * place.cp * position  # of the whole sequences
    total.add("broadcast", TP, num_bytes, place.num_microbatches * (num_bytes > 0))


def _add_microbatch(total: _Sum, place: _Place, chunk: StageContents) -> None:
    """Add what the layers, the embedding and the output layer send for all micro-batches."""
    m = place.num_microbatches
    layers = len(chunk.layer_numbers)
    full, early = _recomputed(place, layers)
    _add_layer_ends(total, place, m * layers, m * layers, m * layers)
    # What is recomputed runs forward again, up to the last thing that the backward pass needs.
    _add_layer_ends(total, place, m * full, m * (full - early), 0)
    for number in chunk.layer_numbers:
        _add_exchange(total, place, number)
    A = place.hidden_bytes
    if place.config.model.sequence_parallel:
        total.add("reduce_scatter", TP, A, m * chunk.has_embedding)
        total.add("all_gather", TP, A, m * chunk.has_embedding)
        total.add("all_gather", TP, A, 2 * m * chunk.has_loss)
        total.add("reduce_scatter", TP, A, m * chunk.has_loss)
    else:
        total.add("all_reduce", TP, A, m * chunk.has_embedding)
        total.add("all_reduce", TP, A, m * chunk.has_loss)
    # The cross-entropy: the largest normalizer, then the sum of exponentials and the label's logit.
    wide = max(place.element, 4)
    total.add("all_reduce", TP, place.tokens * wide, m * chunk.has_loss)
    total.add("all_reduce", TP, 2 * place.tokens * wide, m * chunk.has_loss)


def _recomputed(place: _Place, layers: int) -> tuple[int, int]:
    """Return how many layers run forward again, and how many of those stop before their last communication.

    A recomputed group of layers ends where the backward pass has all that it saved. Without dropout nothing is saved
    behind the last layer's fc2, whose sum over the tensor ranks is then left out.
    """
    model = place.config.model
    if model.recompute_granularity != "full":
        return 0, 0
    length = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        recomputed = groups = min(length, layers)
    else:
        recomputed, groups = layers, math.ceil(layers / length)
    return recomputed, groups if model.hidden_dropout == 0.0 else 0


def _add_layer_ends(total: _Sum, place: _Place, entered: int, left: int, backward: int) -> None:
    """Add what a number of layers send where they enter and leave their two tensor-parallel regions."""
    A = place.hidden_bytes
    if place.config.model.sequence_parallel:
        total.add("all_gather", TP, A, 2 * entered)
        total.add("reduce_scatter", TP, A, entered + left)
        # Backward: the gradients of both outputs, and both inputs once more for the weights' gradients.
        total.add("all_gather", TP, A, 4 * backward)
        total.add("reduce_scatter", TP, A, 2 * backward)
    else:
        total.add("all_reduce", TP, A, entered + left)
        total.add("all_reduce", TP, A, 2 * backward)


def _add_exchange(total: _Sum, place: _Place, number: int) -> None:
    """Add what the attention of a layer sends for all micro-batches."""
    if place.cp == 1:
        return
    model, c = place.config.model, place.cp
    exchange = model.cp_comm_type[0 if len(model.cp_comm_type) == 1 else number]
    heads = model.num_attention_heads // place.tp
    groups = max(model.num_query_groups // place.tp, 1)
    forwards = place.num_microbatches * (1 + _attention_is_recomputed(place, number))
    backwards = place.num_microbatches
    head_bytes = place.tokens * model.kv_channels * place.element
    if exchange == "p2p":
        keys_and_values = 2 * groups * head_bytes
        total.add("send", CP, keys_and_values, (c - 1) * (forwards + backwards))
        total.add("send", CP, keys_and_values // place.element * max(place.element, 4), c * backwards)
    elif exchange == "all_gather":
        total.add("all_gather", CP, 2 * groups * head_bytes * c, forwards)
        total.add("reduce_scatter", CP, 2 * groups * head_bytes * c, backwards)
    else:
        there = (heads + 2 * math.lcm(groups, c)) * head_bytes
        back = heads * head_bytes
        # A recomputed core alone ends before its output goes back: nothing behind it is needed.
        again = forwards - backwards if model.recompute_granularity == "full" else 0
        total.add("all_to_all", CP, there, forwards + backwards)
        total.add("all_to_all", CP, back, 2 * backwards + again)


def _attention_is_recomputed(place: _Place, number: int) -> bool:
    model = place.config.model
    if model.recompute_granularity == "selective":
        return True
    if model.recompute_granularity != "full":
        return False
    if model.recompute_method != "block":
        return True
    chunks = place.config.stage_layout.chunks(place.stage)
    first = next(chunk.layer_numbers[0] for chunk in chunks if number in chunk.layer_numbers)
    return number - first < (model.recompute_num_layers or 1)


def _add_sends(total: _Sum, place: _Place, index: int, num_chunks: int) -> None:
    """Add a chunk's activations for the next stage and gradients for the previous one."""
    message = place.hidden_bytes // (place.tp if place.config.model.sequence_parallel else 1)
    is_first = index == 0 and place.stage == 0
    is_last = index == num_chunks - 1 and place.stage == place.pp - 1
    total.add("send", PP, message, place.num_microbatches * ((not is_first) + (not is_last)))


@dataclass(frozen=True)
class _Parameter:
    """Hold a parameter's local size and, where its gradient is a part, how many of the t ranks hold a copy."""

    size: int
    copies_to_sum: int = 0
    is_tied: bool = False


def _parameters(place: _Place, chunk: StageContents) -> Iterator[_Parameter]:
    """Yield a chunk's parameters in the order of the model."""
    model, t = place.config.model, place.tp
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    is_cut = model.sequence_parallel and t > 1
    vocabulary = model.padded_vocab_size // t * h
    is_tied = not model.untie_embeddings_and_output_weights and chunk.has_embedding != chunk.has_loss

    def replicated(size: int, is_partial: bool = is_cut) -> _Parameter:
        return _Parameter(size, t if is_partial and t > 1 else 0)

    def norm(width: int, is_partial: bool = is_cut) -> Iterator[_Parameter]:
        yield replicated(width, is_partial)
        if model.normalization == "LayerNorm":
            yield replicated(width, is_partial)

    def linear(rows: int, columns: int, bias: _Parameter | None) -> Iterator[_Parameter]:
        yield _Parameter(rows * columns)
        if bias is not None:
            yield bias

    def query_key_value() -> Iterator[_Parameter]:
        queries, groups = model.num_attention_heads * d // t, model.num_query_groups
        if groups % t == 0:
            rows = queries + 2 * groups * d // t
            yield from linear(rows, h, _Parameter(rows) if model.has_qkv_bias else None)
            return
        for width in (h, 1) if model.has_qkv_bias else (h,):
            yield _Parameter(queries * width)
            yield _Parameter(2 * d * width, t // groups)

    def has_bias(bias: _Parameter) -> _Parameter | None:
        return bias if model.add_bias_linear else None

    if chunk.has_embedding:
        yield _Parameter(vocabulary, is_tied=is_tied)
        if model.position_embedding_type == "learned_absolute":
            yield replicated(model.max_position_embeddings * h)
    for _ in chunk.layer_numbers:
        yield from norm(h)
        yield from linear(h, model.num_attention_heads * d // t, has_bias(replicated(h)))
        yield from query_key_value()
        if model.qk_layernorm:
            yield from norm(d, True)
            yield from norm(d, True)
        yield from norm(h)
        gated = f * (2 if model.swiglu else 1) // t
        yield from linear(gated, h, has_bias(_Parameter(gated)))
        yield from linear(h, f // t, has_bias(replicated(h)))
    if chunk.has_loss:
        yield from norm(h)
        if model.untie_embeddings_and_output_weights or not chunk.has_embedding:
            yield _Parameter(vocabulary, is_tied=is_tied)


def _layout(place: _Place, parameters: list[_Parameter]) -> ParamLayout:
    ddp, d = place.config.ddp, place.dp * place.cp
    is_sharded = ddp.shards_optimizer and d > 1
    piecewise = is_sharded and (ddp.shards_gradients or ddp.overlap_param_gather)
    bucket_size = None
    if ddp.overlap_grad_reduce or piecewise:
        bucket_size = ddp.ddp_bucket_size or default_bucket_size(d)
    alone = [index for index, parameter in enumerate(parameters) if is_sharded and parameter.is_tied]
    return plan_layout([p.size for p in parameters], bucket_size, num_shards=d, alone=alone)


def _add_gradients(total: _Sum, place: _Place, chunks: tuple[StageContents, ...]) -> None:
    """Add the reductions of gradients over replicas, copies and the ends of the pipeline, and the new parameters."""
    ddp, d = place.config.ddp, place.dp * place.cp
    is_sharded = ddp.shards_optimizer and d > 1
    partial_bytes = 0
    for chunk in chunks:
        parameters = list(_parameters(place, chunk))
        layout = _layout(place, parameters)
        for bucket in layout.buckets:
            grad_bytes = bucket.num_elements * place.grad_element
            if is_sharded:
                rounds = place.num_microbatches if ddp.shards_gradients else 1
                total.add("reduce_scatter", DP_CP, grad_bytes, rounds)
                total.add("all_gather", DP_CP, bucket.num_elements * place.element)
            else:
                total.add("all_reduce", DP_CP, grad_bytes)
            start, end = bucket.shard(place.replica, d) if is_sharded else (bucket.start, bucket.end)
            for part in parts_of_range(bucket.slots, start, end):
                parameter, part_bytes = parameters[part.index], (part.end - part.start) * place.grad_element
                if parameter.copies_to_sum:
                    partial_bytes += place.tp // parameter.copies_to_sum * part_bytes
                if parameter.is_tied:
                    total.add("all_reduce", EMBEDDING, part_bytes)
    if partial_bytes:
        total.add("all_reduce", TP, partial_bytes)


def _add_scalars(total: _Sum, place: _Place) -> None:
    """Add the token count, the gradient norm, and what all ranks agree on: a few float64 numbers each."""
    config = place.config
    if config.training.calculate_per_token_loss:
        total.add("broadcast", PP, 8)
        total.add("all_reduce", DP_CP, 8)
    is_sharded = config.ddp.shards_optimizer and place.dp * place.cp > 1
    norms = 16 if config.optimizer.log_num_zeros_in_grad else 8
    total.add("all_reduce", WORLD if is_sharded else MODEL_PARALLEL, norms)
    total.add("all_reduce", WORLD, 32)
