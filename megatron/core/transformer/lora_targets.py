"""LoRA targets: the linear layers that low-rank adapters are attached to, by their command-line names.

A fused layer (query, key and value; gate and up) has either one adapter for all of its rows or one adapter per part.
Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

ADAPTERS = ".adapters."
"""Part of the name of every adapter tensor: ``<linear layer>.adapters.<part>.lora_A`` or ``lora_B``."""
WHOLE = "all"
"""Name of the part that consists of all rows of a linear layer."""
QUERY_KEY_VALUE = ("q", "k", "v")
GATE_UP = ("gate", "up")
LINEAR_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linear layers of a transformer layer."""
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


def names_of_targets(is_gated: bool) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return the (linear layer, part) pairs of each target name, both Megatron's names and those of Hugging Face."""
    return {**_EVERYWHERE, **(_GATED if is_gated else _PLAIN)}


def adapted_parts(names: Iterable[str], is_gated: bool) -> dict[str, tuple[str, ...]]:
    """Return the parts of each linear layer that have an adapter; without names each layer has one for all rows.

    Raises:
        ValueError: a name is unknown for such a model, or some rows would have two adapters; the message gives the
            name.
    """
    known = names_of_targets(is_gated)
    chosen: dict[str, set[str]] = {}
    for name in names or LINEAR_LAYERS:
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
