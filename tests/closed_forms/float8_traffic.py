"""What layers in fp8 send under sequence parallelism, where it is not what layers in 16 bits do.

Numbers in fp8 are a byte each. A scale is a byte, too, and none travels where a whole matrix shares one: then the ranks
agree on its amax, unless earlier steps gave the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.decoder_config import DecoderConfig

Add = Callable[[str, int, int], None]
"""Add so many communications over the tensor-parallel group: operation, bytes, count."""

_SEGMENT = {"blockwise": 128, "mxfp8": 32}
"""Numbers along the sum that share a scale; in the other recipes all of them do."""


def scale_length(model: DecoderConfig) -> int:
    """Return how many numbers of a row share a scale, 0 for all."""
    return _SEGMENT.get(model.fp8.fp8_recipe, 0)


def fills_blocks(model: DecoderConfig, num_rows: int) -> bool:
    """Return whether so many tokens, which a rank has, are whole blocks of numbers that share a scale."""
    length = scale_length(model)
    return not length or num_rows % length == 0


def gathers_gradients(model: DecoderConfig) -> bool:
    """Return whether row-parallel layers scatter their outputs themselves, and gather gradients in fp8."""
    return model.fp8.fp8_recipe in ("delayed", "tensorwise") and model.fp8.fp8_wgrad


@dataclass(frozen=True)
class Float8LayerEnds:
    """Count what layers send where they enter and leave their two tensor-parallel regions.

    ``tokens`` are those of the whole group, ``hidden_bytes`` their hidden states' in the model's own precision.
    """

    model: DecoderConfig
    tokens: int
    hidden_bytes: int

    def add(self, add: Add, entered: int, left: int, backward: int) -> None:
        """Add what one of the two regions of so many layers sends that enter it, leave it, and run backward."""
        self._add_inputs(add, entered)
        add("reduce_scatter", self.hidden_bytes, entered if gathers_gradients(self.model) else left)
        self._add_inputs_again(add, backward)
        for is_column in (False, True):
            self.add_gradient(add, backward, is_column=is_column)

    def add_gradient(self, add: Add, count: int, *, is_column: bool) -> None:
        """Add what goes between ranks of the gradients of column-parallel layers' inputs, or of the others' outputs."""
        if is_column:
            add("reduce_scatter", self.hidden_bytes, count)
            return
        add("all_gather", self._rounded if gathers_gradients(self.model) else self.hidden_bytes, count)
        if gathers_gradients(self.model) and self.model.fp8.fp8_recipe == "tensorwise":
            add("all_reduce", 4, count)

    def add_feed_forwards(self, add: Add, count: int) -> None:
        """Add what so many feed-forwards send that run forward again, up to what the backward pass needs."""
        self._add_inputs(add, count)
        add("reduce_scatter", self.hidden_bytes, count if gathers_gradients(self.model) else 0)

    def add_latent(self, add: Add, entered: int, left: int, backward: int, again: int) -> None:
        """Add what so many latent attentions send; ``again`` widen their heads once more (see `add_latent`)."""
        model, element = self.model, self.hidden_bytes // self._rounded
        for width, is_narrow in (
            (model.mla.q_lora_rank or model.hidden_size, bool(model.mla.q_lora_rank)),
            (model.mla.kv_lora_rank, True),
        ):
            self._add_inputs(add, entered + again, width, is_remade=not is_narrow)
            self._add_inputs_again(add, backward, width, is_remade=not is_narrow)
            add("reduce_scatter", self.tokens * width * element, backward)
        rotary = self.tokens * model.mla.qk_pos_emb_head_dim * element
        add("all_gather", rotary, entered)
        add("reduce_scatter", rotary, backward)
        add("reduce_scatter", self.hidden_bytes, entered if gathers_gradients(model) else left)
        self.add_gradient(add, backward, is_column=False)

    def add_join(self, add: Add, entered: int, backward: int) -> None:
        """Add what so many products send that join states and embedded tokens, for their inputs."""
        width = 2 * self.model.hidden_size
        self._add_inputs(add, entered, width, is_remade=False)
        self._add_inputs_again(add, backward, width, is_remade=False)
        add("reduce_scatter", 2 * self.hidden_bytes, backward)

    def _add_inputs(self, add: Add, count: int, width: int | None = None, *, is_remade: bool = True) -> None:
        """Add what goes to the products of column-parallel layers.

        They take hidden states, or vectors of another ``width``, which recomputed norms make again or not.
        """
        model, width = self.model, width or self.model.hidden_size
        add("all_gather", self.tokens * width, count)
        if model.fp8.fp8_recipe == "tensorwise":
            add("all_reduce", 4, count)
        length = scale_length(model)
        if length or model.fp8.fp8_recipe == "rowwise":
            add("all_gather", self.tokens * (math.ceil(width / length) if length else 1), count)
        if not (is_remade and "layernorm" in model.recomputed_modules):
            self._add_row_amaxes(add, count, width)

    def _add_inputs_again(self, add: Add, count: int, width: int | None = None, *, is_remade: bool = True) -> None:
        """Add what goes to the products of these layers' weight gradients, which frozen weights do not have."""
        model, width = self.model, width or self.model.hidden_size
        if model.lora_rank:
            return
        if not (model.fp8.fp8_wgrad and fills_blocks(model, self.tokens // model.tensor_model_parallel_size)):
            add("all_gather", self.hidden_bytes * width // model.hidden_size, count)
            return
        add("all_gather", self.tokens * width, count)
        length = scale_length(model)
        if length:
            add("all_gather", width * self.tokens // length, count)
        if is_remade and "layernorm" in model.recomputed_modules:
            self._add_row_amaxes(add, count, width)

    def _add_row_amaxes(self, add: Add, count: int, width: int) -> None:
        """Add the amaxes of the rows of inputs' transposes, of which each rank has a part."""
        model = self.model
        if model.fp8.fp8_recipe == "rowwise" and model.fp8.fp8_wgrad and not model.lora_rank:
            add("all_reduce", 4 * width, count)

    @property
    def _rounded(self) -> int:
        return self.tokens * self.model.hidden_size
