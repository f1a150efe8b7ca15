"""LoRA targets: the linear layers that low-rank adapters are attached to, by their command-line names.

A fused layer (query, key and value; gate and up) has either one adapter for all of its rows or one adapter per part.
Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron.core.transformer.hybrid_config import LayerParts

ADAPTERS = ".adapters."
"""Part of the name of every adapter tensor: ``<linear layer>.adapters.<part>.lora_A`` or ``lora_B``."""
WHOLE = "all"
"""Name of the part that consists of all rows of a linear layer."""
QUERY_KEY_VALUE = ("q", "k", "v")
GATE_UP = ("gate", "up")
OF_ATTENTION = ("linear_qkv", "linear_proj")
OF_RECURRENCE = ("in_proj", "out_proj")
OF_FEED_FORWARD = ("linear_fc1", "linear_fc2")
LINEAR_LAYERS = (*OF_ATTENTION, *OF_FEED_FORWARD, *OF_RECURRENCE)
"""The linear layers of all kinds of transformer layers."""
TRANSFORMER_LAYERS = (*OF_ATTENTION, *OF_FEED_FORWARD)
"""The linear layers of a model without recurrent layers."""
PART_OF: Mapping[str, tuple[str, ...]] = {"linear_qkv": QUERY_KEY_VALUE, "linear_fc1": GATE_UP}
"""Parts of the fused linear layers, in the order of their rows."""

FOUR_BIT_BLOCK = 64
"""Input features that share one scale in a weight of 4 bits; `megatron.core.ops` has the quantization itself."""

_EVERYWHERE = {
    **{name: ((name, WHOLE),) for name in LINEAR_LAYERS},
    **{f"{part}_proj": (("linear_qkv", part),) for part in QUERY_KEY_VALUE},
    "o_proj": (("linear_proj", WHOLE),),
}
_GATED = {
    **{f"{part}_proj": (("linear_fc1", part),) for part in GATE_UP},
    "down_proj": (("linear_fc2", WHOLE),),
}
_PLAIN = {
    "c_attn": (("linear_qkv", WHOLE),),
    "c_proj": (("linear_proj", WHOLE), ("linear_fc2", WHOLE)),
    "c_fc": (("linear_fc1", WHOLE),),
}


def linear_layers_of(layers: Iterable[LayerParts]) -> tuple[str, ...]:
    """Return the names of the linear layers of a model whose layers have these parts.

    Of MLA's layers none are among them, and of recurrent layers only the input and output projections.
    """
    kinds = tuple(layers)
    return (
        *(OF_ATTENTION if any(parts.has_attention for parts in kinds) else ()),
        *(OF_FEED_FORWARD if any(parts.feed_forward for parts in kinds) else ()),
        *(OF_RECURRENCE if any(parts.recurrence for parts in kinds) else ()),
    )


def names_of_targets(
    is_gated: bool, linear_layers: Collection[str] = TRANSFORMER_LAYERS
) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return the (linear layer, part) pairs of each target name, both Megatron's and Hugging Face's names.

    ``linear_layers`` are the linear layers of the model.
    """
    known = {**_EVERYWHERE, **(_GATED if is_gated else _PLAIN)}
    own = {name: tuple(pair for pair in pairs if pair[0] in linear_layers) for name, pairs in known.items()}
    return {name: pairs for name, pairs in own.items() if pairs}


def adapted_parts(
    names: Iterable[str], is_gated: bool, linear_layers: Collection[str] = TRANSFORMER_LAYERS
) -> dict[str, tuple[str, ...]]:
    """Return the parts of each linear layer that have an adapter; without names each layer has one for all rows.

    ``linear_layers`` are the linear layers of the model.

    Raises:
        ValueError: a name is unknown for such a model, or some rows would have two adapters; the message gives the
            name.
    """
    known = names_of_targets(is_gated, linear_layers)
    chosen: dict[str, set[str]] = {}
    for name in names or linear_layers:
        if name not in known:
            raise ValueError(f"{name} is not a linear layer of this model; its linear layers are {' '.join(known)}")
        for linear, part in known[name]:
            chosen.setdefault(linear, set()).add(part)
    for linear, parts in chosen.items():
        if WHOLE in parts and len(parts) > 1:
            others = " ".join(f"{part}_proj" for part in PART_OF[linear] if part in parts)
            raise ValueError(
                f"the LoRA targets overlap: the adapter of {linear} already covers {others}; omit one of them"
            )
    return {
        linear: tuple(part for part in (WHOLE, *PART_OF.get(linear, ())) if part in chosen[linear])
        for linear in LINEAR_LAYERS
        if linear in chosen
    }


def plain_names(parts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the shortest list of names that selects these parts in any model that has them."""
    return tuple(
        linear if part == WHOLE else f"{part}_proj" for linear, own_parts in parts.items() for part in own_parts
    )
