"""Declaration that kinds of linear attention share: the heads and sizes of the ``--linear-*`` flags.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from megatron.core.config_base import POSITIVE, Config, flag
from megatron.core.errors import divisors
from megatron.core.parallel_config import ParallelConfig
from megatron.core.transformer.recurrent_kind import RecurrentHeads, RecurrentKind, check_context, check_sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(Config, in_args=False):
    """Shapes of linear attention."""

    linear_conv_kernel_dim: int = flag(4, role="shape", bounds=POSITIVE)
    """Positions that the convolution before linear attention covers, its own included."""
    linear_key_head_dim: int = flag(128, role="shape", bounds=POSITIVE)
    """Query and key dimension per head of linear attention."""
    linear_value_head_dim: int = flag(128, role="shape", bounds=POSITIVE)
    """Value dimension per head of linear attention."""
    linear_num_key_heads: int = flag(16, role="shape", bounds=POSITIVE)
    """Number of query and key heads of linear attention."""
    linear_num_value_heads: int = flag(32, role="shape", bounds=POSITIVE)
    """Number of value heads of linear attention, a multiple of the key heads."""

    @property
    def linear_key_size(self) -> int:
        """Return the width of all key heads of linear attention together, which is also that of the query heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Return the width of all value heads of linear attention together."""
        return self.linear_num_value_heads * self.linear_value_head_dim


class LinearAttentionKind(RecurrentKind[LinearAttentionConfig]):
    """Linear attention, which --experimental-attention-variant selects. Value heads may share a key head."""

    flags: ClassVar[type] = LinearAttentionConfig

    def inner_size(self, hybrid: LinearAttentionConfig, hidden_size: int) -> int:
        return hybrid.linear_value_size

    def heads(self, hybrid: LinearAttentionConfig, hidden_size: int) -> RecurrentHeads:
        return RecurrentHeads("linear_num_value_heads", hybrid.linear_num_value_heads, hybrid.linear_num_key_heads)

    def check_shapes(self, hybrid: LinearAttentionConfig, hidden_size: int, layout: ParallelConfig) -> Iterator[str]:
        tensor = max(layout.tensor_model_parallel_size, 1)
        keys, values = hybrid.linear_num_key_heads, hybrid.linear_num_value_heads
        if values % keys:
            yield (
                f"--linear-num-value-heads {values} is not divisible by --linear-num-key-heads {keys}; numbers of key "
                f"heads that work: {divisors(values, values)}"
            )
        yield from check_sharding("--linear-num-key-heads", keys, tensor)
        yield from check_sharding("--linear-num-value-heads", values, tensor)
        yield from check_context(layout, "--linear-num-value-heads", values, "--linear-num-key-heads", keys)

    def input_widths(
        self, hybrid: LinearAttentionConfig, hidden_size: int, tensor: int
    ) -> Mapping[str, tuple[int, int]]:
        return {"--linear-num-value-heads x --linear-value-head-dim": (hybrid.linear_value_size, tensor)}
