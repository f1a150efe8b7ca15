"""What low-rank adapters send over the tensor-parallel group, and where frozen layers send nothing beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.tensor_parallel.comm_overlap_config import ROW_PARALLEL, LinearName

if TYPE_CHECKING:
    from megatron.core.transformer.decoder_config import DecoderConfig

Add = Callable[[str, int, int], None]
"""Add so many communications over the tensor-parallel group: operation, bytes, count."""

IN_ORDER: tuple[LinearName, ...] = ("qkv", "proj", "fc1", "fc2")
"""The linear layers of a layer in the order in which it computes them."""


def add_adapters(
    add: Add,
    model: DecoderConfig,
    narrow_bytes: int,
    forward: int,
    backward: int,
    names: tuple[LinearName, ...] = IN_ORDER,
) -> None:
    """Add what the adapters of so many layers send, of the linear layers with these names.

    ``narrow_bytes`` are those of the product of all tokens with ``A``.
    """
    for name in names:
        count, is_row = len(model.adapted_parts.get(f"linear_{name}", ())), name in ROW_PARALLEL
        if not model.sequence_parallel:
            # A sum either way: of a row-parallel layer's columns, and of what the other's rows give back.
            add("all_reduce", narrow_bytes, count * (forward if is_row else backward))
        elif is_row:
            add("reduce_scatter", narrow_bytes, count * forward)
            add("all_gather", narrow_bytes, count * backward)
        else:
            add("all_gather", narrow_bytes, count * (forward + backward))
            add("reduce_scatter", narrow_bytes, count * backward)


def idle_in_first_layer(model: DecoderConfig) -> tuple[LinearName, ...]:
    """Return the linear layers of the first layer whose input wants no gradient: behind a frozen embedding.

    They are those up to the first that has an adapter.
    """
    first = next(place for place, name in enumerate(IN_ORDER) if f"linear_{name}" in model.adapted_parts)
    return IN_ORDER[: first + 1]
