"""How much memory the activations of a rank take at most, in closed form: an estimate, from shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.context_parallel.head_sharing import key_value_heads_of_rank
from megatron.planning.closed_forms import ELEMENT_BYTES

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig


def activation_bytes(config: RunConfig, rank: int) -> int:
    """Estimate the bytes of activations of a rank at the fullest moment of a training step.

    Counted are the operands that the products, norms and activation functions of each layer keep for the backward
    pass, the queries, keys, values and output of attention (its scores are taken to be computed again), and the logits
    of one micro-batch on the stage that has them, once in the model's type and twice in float32. Of layers that are
    recomputed whole, their inputs are counted, and one layer once more.
    """
    model, sizes = config.model, config.parallel_sizes
    place = sizes.place(rank)
    chunks = config.stage_layout.chunks(place["pp"])
    num_tokens = config.data.seq_length // sizes.cp * config.training.micro_batch_size
    per_layer = _layer_elements(config)
    outer = model.hidden_size // (sizes.tp if model.sequence_parallel else 1)
    num_layers = sum(len(chunk.layer_numbers) for chunk in chunks) / len(chunks)
    kept, extra = num_layers * per_layer, 0.0
    if model.recompute_granularity == "full":
        length = model.recompute_num_layers or 1
        if model.recompute_method == "block":
            recomputed = min(length, num_layers)
            kept, extra = recomputed * outer + (num_layers - recomputed) * per_layer, per_layer
        else:
            kept, extra = num_layers / length * outer, length * per_layer
    elements = kept * _passes_in_flight(config, place["pp"], len(chunks)) + extra
    total = num_tokens * elements * ELEMENT_BYTES[model.params_dtype]
    if any(chunk.has_loss for chunk in chunks):
        width = model.padded_vocab_size // sizes.tp
        total += num_tokens * width * (ELEMENT_BYTES[model.params_dtype] + 8)
    return int(total)


def _layer_elements(config: RunConfig) -> float:
    """Return the elements that a layer keeps of a token."""
    model, t = config.model, config.parallel_sizes.tp
    outer = model.hidden_size / (t if model.sequence_parallel else 1)
    key_value = 2 * key_value_heads_of_rank(model.num_query_groups, t) * model.kv_channels
    attention = 2 * model.query_projection_size / t + key_value
    feed_forward = model.ffn_hidden_size * (3 if model.is_gated else 2) / t
    # Input and output of both norms; dropout adds a mask of a byte an element, which two halves stand for.
    return 4 * outer + attention + feed_forward + (outer if model.hidden_dropout else 0)


def _passes_in_flight(config: RunConfig, stage: int, num_chunks: int) -> int:
    """Return how many forward passes of one chunk wait for their backward pass on a stage at once."""
    sizes = config.parallel_sizes
    num_microbatches = config.training.global_batch_size // (config.training.micro_batch_size * sizes.dp)
    behind = sizes.pp - stage - 1
    waiting = behind + 1 if num_chunks == 1 else 2 * behind + (num_chunks - 1) * sizes.pp + 1
    return min(waiting, num_microbatches * num_chunks)
