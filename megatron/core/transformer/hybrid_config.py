"""Flags of hybrid models: which layers are recurrent, and the kinds of recurrent layers.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.config_base import POSITIVE, Config, flag
from megatron.core.transformer.gated_delta_net_kind import GatedDeltaNetKind
from megatron.core.transformer.kimi_delta_attention_kind import KimiDeltaAttentionKind
from megatron.core.transformer.layer_pattern import evaluate_pattern, parse_layer_pattern
from megatron.core.transformer.linear_attention_kind import LinearAttentionConfig, LinearAttentionKind
from megatron.core.transformer.mamba_kind import MAMBA, MambaConfig, MambaKind
from megatron.core.transformer.recurrent_kind import RecurrentKind

ATTENTION = "attention"
ATTENTION_AND_MAMBA = "attention_and_mamba"
RECURRENT_KINDS: dict[str | None, RecurrentKind[HybridConfig]] = {
    kind.name: kind for kind in (GatedDeltaNetKind(), KimiDeltaAttentionKind(), MambaKind())
}
"""Kinds of recurrent layers by name."""
LINEAR_ATTENTION = tuple(kind.name for kind in RECURRENT_KINDS.values() if isinstance(kind, LinearAttentionKind))
"""Sequence mixers with the shapes of ``linear_*``."""
SPARSE_ATTENTION = "dsa"
"""DeepSeek sparse attention (DSA), a variant of MLA in all layers."""
MLP, MOE = "mlp", "moe"

_VARIANT, _PATTERN = "experimental_attention_variant", "hybrid_override_pattern"


class LayerParts(NamedTuple):
    """Kind of a layer's sequence mixer and of its feed-forward; None stands for a part that the layer does not have."""

    mixer: str | None
    feed_forward: str | None

    @property
    def has_attention(self) -> bool:
        return self.mixer in (ATTENTION, ATTENTION_AND_MAMBA)

    @property
    def recurrence(self) -> RecurrentKind[HybridConfig] | None:
        """Return the kind of the recurrent layer, also of one in parallel with attention."""
        return RECURRENT_KINDS.get(MAMBA if self.mixer == ATTENTION_AND_MAMBA else self.mixer)


_OF_KINDS = {kind.symbol: LayerParts(kind.name, None) for kind in RECURRENT_KINDS.values()}
SYMBOLS = {
    # Messages list Megatron's symbols first.
    "M": _OF_KINDS["M"],
    "*": LayerParts(ATTENTION, None),
    **_OF_KINDS,
    "P": LayerParts(ATTENTION_AND_MAMBA, None),
    "-": LayerParts(None, MLP),
    "E": LayerParts(None, MOE),
}
"""Layers of --hybrid-override-pattern by Megatron's symbols."""
NAMES = {parts.mixer or parts.feed_forward or "": parts for parts in SYMBOLS.values()}
"""Layers of --hybrid-override-pattern by name."""
_SYMBOL_OF_PART = {parts.mixer or parts.feed_forward: symbol for symbol, parts in SYMBOLS.items()}


def recurrent_kinds_of(layers: Iterable[LayerParts]) -> tuple[RecurrentKind[HybridConfig], ...]:
    """Return the kinds of recurrent layers of a model, each once."""
    used = {parts.recurrence for parts in layers}
    return tuple(kind for kind in RECURRENT_KINDS.values() if kind in used)


def format_layers(layers: Sequence[LayerParts]) -> str:
    """Return the symbols of the parts of each layer, with a space between layers: ``G- G- *-``."""
    return " ".join("".join(_SYMBOL_OF_PART[part] for part in parts if part is not None) for parts in layers)


def pattern_symbols(layers: Sequence[LayerParts]) -> str:
    """Return --hybrid-override-pattern in Megatron's symbols, one per layer: ``M-M*-``."""
    return format_layers(layers).replace(" ", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantConfig(Config, in_args=False):
    """Which layers have linear attention instead of attention."""

    experimental_attention_variant: str | None = flag(
        None,
        choices=(*LINEAR_ATTENTION, SPARSE_ATTENTION),
        not_built=("dsv4_hybrid",),
        role="shape",
        seen_as="has_sparse_attention",
    )
    """Linear attention instead of attention in the layers of --linear-attention-freq: gated delta-net, as Qwen3-Next
    has, or Kimi Delta Attention (KDA), as Kimi Linear has; or DeepSeek sparse attention (dsa) in all layers."""
    linear_attention_freq: str | None = flag(None, metavar="N", role="shape", needs=_VARIANT, seen_as="hybrid_layers")
    """Layers with linear attention: all but every Nth, or a list with 1 for such layers, else 0: ([1]*3+[0])*4."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternConfig(Config, in_args=False):
    """Which parts each layer has."""

    hybrid_override_pattern: str | None = flag(None, metavar="PATTERN", role="shape", seen_as="hybrid_layers")
    """Kind of every layer, each with its own norm and residual: M Mamba-2, * attention, G gated delta-net, K KDA, P
    attention and Mamba-2 in parallel, - MLP, E experts, such as M-M*-; or a list of names:
    ([mamba,mlp]*3+[attention,mlp])*2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(MambaConfig, PatternConfig, LinearAttentionConfig, VariantConfig, in_args=False):
    """Linear attention and state-space layers; without ``experimental_attention_variant`` or a pattern there are none.

    Flags are listed from the last base to the first, and those of this class at the end. The classes of
    `RECURRENT_KINDS` name the papers.
    """

    parallel_attention_multiplier: float = flag(1.0, role="meaning", bounds=POSITIVE, needs=_PATTERN)
    """Multiplier of the output of attention in parallel with Mamba-2."""
    parallel_mamba_multiplier: float = flag(1.0, role="meaning", bounds=POSITIVE, needs=_PATTERN)
    """Multiplier of the output of Mamba-2 in parallel with attention."""

    @property
    def is_hybrid(self) -> bool:
        return self.has_linear_attention or self.hybrid_override_pattern is not None

    @property
    def has_linear_attention(self) -> bool:
        """Return whether --experimental-attention-variant is a linear attention."""
        return self.experimental_attention_variant in LINEAR_ATTENTION

    def projection_rows(self, mixer: str, hidden_size: int) -> tuple[int, ...]:
        """Return the rows of each tensor that the input projection of a recurrent layer stacks."""
        return RECURRENT_KINDS[mixer].projection_rows(self, hidden_size)

    def inner_size(self, mixer: str, hidden_size: int) -> int:
        """Return the width of the input of the output projection of a recurrent layer."""
        return RECURRENT_KINDS[mixer].inner_size(self, hidden_size)


# Cached because a search for the fastest layout evaluates the same patterns thousands of times.
@functools.lru_cache(maxsize=64)
def parse_hybrid_pattern(text: str) -> tuple[LayerParts, ...]:
    """Return the parts of every layer of --hybrid-override-pattern, in symbols or in names.

    Raises:
        ValueError: the text is neither; the message gives the reason.
    """
    stripped = text.strip()
    if stripped[:1] not in ("[", "("):
        kinds = ", ".join(f"{symbol} ({parts.mixer or parts.feed_forward})" for symbol, parts in SYMBOLS.items())
        if not stripped:
            raise ValueError(f"the pattern is empty; use {kinds}")
        if unknown := sorted(set(stripped) - SYMBOLS.keys()):
            raise ValueError(f"{''.join(unknown)} is no kind of layer; use {kinds}")
        return tuple(SYMBOLS[symbol] for symbol in stripped)
    expected = "symbols such as M-M*-, or a list such as [mamba,mlp]*3+[attention,mlp], are expected"
    try:
        found = evaluate_pattern(stripped)
    except ValueError as error:
        raise ValueError(expected) from error
    if not isinstance(found, list):
        raise ValueError(expected)
    if others := [name for name in found if name not in NAMES]:
        raise ValueError(f"{others[0]} is no kind of layer; use {', '.join(NAMES)}")
    return tuple(NAMES[str(name)] for name in found)


# Cached because a search for the fastest layout evaluates the same patterns thousands of times.
@functools.lru_cache(maxsize=256)
def layer_parts(hybrid: HybridConfig, num_layers: int, has_experts: tuple[bool, ...]) -> tuple[LayerParts, ...]:
    """Return the parts of every layer; without a pattern ``has_experts`` says which feed-forwards are experts.

    Raises:
        ValueError: --hybrid-override-pattern or --linear-attention-freq is invalid; the message gives the reason.
    """
    if hybrid.hybrid_override_pattern is not None:
        parts = parse_hybrid_pattern(hybrid.hybrid_override_pattern)
        if len(parts) != num_layers:
            raise ValueError(f"the pattern has {len(parts)} layers; use --num-layers {len(parts)}")
        return parts
    is_linear = (False,) * num_layers
    if hybrid.has_linear_attention:
        is_linear = parse_layer_pattern(hybrid.linear_attention_freq or "0", num_layers)
    return tuple(
        LayerParts(hybrid.experimental_attention_variant if linear else ATTENTION, MOE if has else MLP)
        for linear, has in zip(is_linear, has_experts, strict=True)
    )
