"""Which softmax attention has, and which layers rotate queries and keys."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import Config, flag
from megatron.core.transformer.layer_pattern import parse_layer_pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKindsConfig(Config):
    """Hold what of attention is neither its widths nor its kernels."""

    softmax_type: str = flag("vanilla", choices=("vanilla", "off-by-one", "learnable"), role="shape", in_args=True)
    """What attention scores are divided by: the sum of their exponentials (vanilla), that and 1 (off-by-one), or that
    and the exponential of a number that each head learns, its sink (learnable)."""
    no_rope_freq: str | None = flag(None, metavar="N", role="meaning", seen_as="layers_without_rotary", in_args=False)
    """Which layers leave queries and keys as they are where positions are rotary: every Nth, or a list with a 1 for
    each that does and a 0 for the others: ([0]*3+[1])*4; by default none."""

    @property
    def has_sinks(self) -> bool:
        """Tell whether the sum below the softmax has a further summand."""
        return self.softmax_type != "vanilla"


def without_rotary(pattern: str | None, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it leaves queries and keys as they are.

    Raises:
        ValueError: the pattern is neither a number nor a list of the layers; the message says why.
    """
    if pattern is None:
        return (False,) * num_layers
    kinds = parse_layer_pattern(pattern, num_layers)
    # A number leaves out every Nth layer there, and these are the ones that are left out.
    return tuple(not kind for kind in kinds) if pattern.strip().isdecimal() else kinds
