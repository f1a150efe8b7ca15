"""Declaration that kinds of linear attention share: the heads and sizes of the ``--linear-*`` flags.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from megatron.core.errors import divisors
from megatron.core.transformer.recurrent_kind import RecurrentHeads, RecurrentKind, check_context, check_sharding

if TYPE_CHECKING:
    from megatron.core.transformer.decoder_config import DecoderConfig
    from megatron.core.transformer.hybrid_config import HybridConfig


class LinearAttentionKind(RecurrentKind):
    """Linear attention, which --experimental-attention-variant selects. Value heads may share a key head."""

    prefix: ClassVar[str] = "linear_"
    unread: ClassVar[tuple[str, ...]] = ("linear_attention_freq",)

    def inner_size(self, hybrid: HybridConfig, hidden_size: int) -> int:
        return hybrid.linear_value_size

    def heads(self, hybrid: HybridConfig, hidden_size: int) -> RecurrentHeads:
        return RecurrentHeads("linear_num_value_heads", hybrid.linear_num_value_heads, hybrid.linear_num_key_heads)

    def check_shapes(self, model: DecoderConfig) -> Iterator[str]:
        tensor = max(model.tensor_model_parallel_size, 1)
        keys, values = model.hybrid.linear_num_key_heads, model.hybrid.linear_num_value_heads
        if values % keys:
            yield (
                f"--linear-num-value-heads {values} is not divisible by --linear-num-key-heads {keys}; numbers of key "
                f"heads that work: {divisors(values, values)}"
            )
        yield from check_sharding("--linear-num-key-heads", keys, tensor)
        yield from check_sharding("--linear-num-value-heads", values, tensor)
        yield from check_context(model, "--linear-num-value-heads", values, "--linear-num-key-heads", keys)

    def input_widths(self, model: DecoderConfig) -> Mapping[str, tuple[int, int]]:
        tensor = max(model.tensor_model_parallel_size, 1)
        return {"--linear-num-value-heads x --linear-value-head-dim": (model.hybrid.linear_value_size, tensor)}


def delta_rule_multiply_adds(hybrid: HybridConfig) -> float:
    """Return the multiply-adds per token of the gated delta rule with its convolution, as Megatron-LM counts them."""
    keys, values = hybrid.linear_key_size, hybrid.linear_value_size
    return hybrid.linear_conv_kernel_dim * (2 * keys + values) + 4 * values * hybrid.linear_key_head_dim
