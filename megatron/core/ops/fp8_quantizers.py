"""FP8 recipes and quantizers: how a linear layer's input, weight and output gradient are quantized.

Delayed scaling stores a scale and an amax history for every operand of every linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_reduce
from megatron.core.ops.fp8_groups import QuantizedGroups, quantize_weights
from megatron.core.ops.fp8_tensor import (
    E4M3,
    E5M2,
    ROWS,
    SEGMENTS_OF_16,
    SEGMENTS_OF_32,
    SEGMENTS_OF_128,
    SQUARES_OF_16,
    SQUARES_OF_128,
    WHOLE,
    Blocks,
    Quantized,
    amax_of,
    quantize,
    quantize_both,
    quantize_whole,
    scale_of,
)
from megatron.core.parallel_config import Fp8Config, Fp8TensorIndex
from megatron.core.process_group import Group

OPERANDS = ("input", "weight", "grad")
"""Operands of the three GEMMs of a linear layer; ``grad`` is the gradient of the output."""

NVFP4 = "nvfp4"
_BLOCKS: Mapping[str, Blocks] = {
    "delayed": WHOLE,
    "tensorwise": WHOLE,
    "rowwise": ROWS,
    "blockwise": SEGMENTS_OF_128,
    "mxfp8": SEGMENTS_OF_32,
    NVFP4: SEGMENTS_OF_16,
}
_SQUARES: Mapping[Blocks, Blocks] = {SEGMENTS_OF_128: SQUARES_OF_128, SEGMENTS_OF_16: SQUARES_OF_16}
"""Blocks of weights, by the blocks of inputs and gradients, if they differ."""
_GRAD_DTYPES = {"e4m3": E4M3, "hybrid": E5M2}


@dataclass(frozen=True)
class Float8Recipe:
    """Recipe of FP8 or NVFP4: which elements share a scale, the format of gradients, and which GEMMs are quantized.

    ``is_delayed`` means that scales come from earlier steps. Without ``has_weight_gradients`` weight gradients are
    computed in the model's own precision.
    """

    blocks: Blocks
    weight_blocks: Blocks
    grad_dtype: torch.dtype
    is_delayed: bool
    has_weight_gradients: bool

    @classmethod
    def of(cls, config: Fp8Config) -> Float8Recipe:
        """Return the configured recipe."""
        recipe = config.fp8_recipe if config.fp4_format is None else NVFP4
        blocks = _BLOCKS[recipe]
        return cls(
            blocks=blocks,
            weight_blocks=_SQUARES.get(blocks, blocks),
            grad_dtype=_GRAD_DTYPES[config.fp8_format or "e4m3"],
            is_delayed=recipe == "delayed",
            has_weight_gradients=config.fp8_wgrad,
        )

    def dtype(self, operand: str) -> torch.dtype:
        """Return the FP8 format of an operand."""
        return self.grad_dtype if operand == "grad" else E4M3


_SCALE_STRIDE = 4
"""Stride between scales in elements: cuBLAS requires scales to be aligned to 16 bytes."""


class Float8State:
    """Scales and amax histories of the whole model for delayed scaling, identical on every rank in any layout.

    A rank writes the amax of each tensor that it quantizes into ``amax``. `update` reduces it to the maximum over all
    ranks, in one collective per step, and computes the scales of the next step. Memory addresses never change, as CUDA
    graphs require.

    The saved state does not depend on the layout either: ``num_averaged`` is the number of ranks over which gradients
    are averaged after the backward pass. During the backward pass gradients are larger by this factor.

    An expert may receive no tokens for many steps. Until its first tokens, it uses the scale of the layer's other
    experts.

    Shapes: ``amax, scale, expected: [layers, places, 3]``, ``history: [layers, places, 3, length]``, the newest first;
    all float32. The stride between scales is 16 bytes.
    """

    def __init__(
        self, config: Fp8Config, places: Fp8TensorIndex, device: torch.device | str, num_averaged: int = 1
    ) -> None:
        self._config, self._places = config, places
        recipe = Float8Recipe.of(config)
        shape = (places.num_layers, places.num_places, len(OPERANDS))
        self.amax = torch.zeros(shape, device=device)
        self.scale = torch.ones(*shape, _SCALE_STRIDE, device=device)[..., 0]
        self.expected = torch.zeros(shape, device=device)
        self.history = torch.zeros(*shape, config.fp8_amax_history_len, device=device)
        self._dtypes = [recipe.dtype(operand) for operand in OPERANDS]
        times = [float(num_averaged) if operand == "grad" else 1.0 for operand in OPERANDS]
        self._times = torch.tensor(times, device=device)
        self.has_history = False

    @torch.no_grad()
    def update(self, world: Group, iteration: int) -> None:
        """Record the amax of the step with this iteration number, and set the scales of the next step; collective.

        Non-finite amax values are ignored.
        """
        all_reduce(self.amax, world, "max")
        amax = torch.where(self.amax.isfinite(), self.amax, 0.0) / self._times
        self.history.copy_(torch.cat((amax.unsqueeze(-1), self.history[..., :-1]), dim=-1))
        if iteration % self._config.fp8_interval == 0 or not self.has_history:
            expected = self.history.amax(-1) if self._config.fp8_amax_compute_algo == "max" else self.history[..., 0]
            # An operand without an observed amax keeps its scale.
            self.expected.copy_(torch.where(expected > 0, expected, self.expected))
            self._set_scales()
        self.amax.zero_()
        self.has_history = True

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the checkpointed tensors by name; copying into them in place loads a checkpoint."""
        return {"expected_amax": self.expected, "amax_history": self.history}

    def loaded(self) -> None:
        """Update the scales after `tensors` were loaded."""
        self.has_history = bool(self.history.any())
        self._set_scales()

    def snapshot(self) -> tuple[torch.Tensor, ...]:
        """Return a copy of all state that a step changes, for `restore`, without synchronizing with the device."""
        return tuple(each.clone() for each in (self.amax, self.scale, self.expected, self.history))

    def restore(self, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Restore a snapshot of this state."""
        for each, values in zip((self.amax, self.scale, self.expected, self.history), snapshot, strict=True):
            each.copy_(values)

    def _set_scales(self) -> None:
        amax, margin = self._expected_of_all() * self._times, self._config.fp8_margin
        scales = [scale_of(amax[..., i], dtype, margin) for i, dtype in enumerate(self._dtypes)]
        self.scale.copy_(torch.stack(scales, dim=-1))

    def _expected_of_all(self) -> torch.Tensor:
        """Return the amax for each operand's scale; unseen experts use the maximum of the layer's other experts.

        Shapes: ``-> [layers, places, 3]``.
        """
        if not self._places.num_experts:
            return self.expected
        shared = self.expected[:, : self._places.num_shared]
        experts = self.expected[:, self._places.num_shared :].reshape(
            len(self.expected), self._places.num_experts, -1, len(OPERANDS)
        )
        experts = torch.where(experts > 0, experts, experts.amax(1, keepdim=True))
        return torch.cat((shared, experts.flatten(1, 2)), dim=1)


class Fp8Quantizers:
    """Quantize the operands of one linear layer by a recipe; ``place`` is the layer's index in the state.

    A GEMM sums along the rows of its operands, so each operand is quantized along its own rows: with non-square blocks,
    a matrix and its transpose are rounded differently.
    """

    def __init__(self, recipe: Float8Recipe, state: Float8State | None = None, place: tuple[int, int] = (0, 0)) -> None:
        self.recipe = recipe
        self.input_is_recomputed = False
        """Whether the saved input of the layer is recomputed in the backward pass, if it is saved unquantized."""
        self._state = state
        self._place = place
        # By whether it is the transpose; None while nothing is kept.
        self._kept_weight: dict[bool, Quantized] | None = None
        self._kept_groups: QuantizedGroups | None = None

    def keep_weight(self) -> None:
        """Quantize the weight only once, together with its transpose, until `forget_weight` is called."""
        self._kept_weight = {}

    def forget_weight(self) -> None:
        """Quantize the weight for every GEMM again, because its values may change."""
        self._kept_weight = self._kept_groups = None

    def of_microbatch(self) -> Fp8Quantizers:
        """Return the quantizers of the micro-batch whose forward pass begins, for both of its passes."""
        return self

    @property
    def turns(self) -> bool:
        """Return whether the transpose of a quantized input or gradient equals the quantized transpose."""
        return self.recipe.blocks == WHOLE

    @property
    def gathers_gradients(self) -> bool:
        """Return whether a gradient that is sharded over ranks is all-gathered in FP8.

        If its transpose is quantized separately, both together have as many bytes as the 16-bit gradient.
        """
        return self.turns and self.recipe.has_weight_gradients

    @property
    def keeps_weight_scale(self) -> bool:
        return self.recipe.weight_blocks in (WHOLE, SQUARES_OF_128)

    @property
    def knows_scales(self) -> bool:
        """Return whether the scales of all operands are known before their values, and all GEMMs are in FP8."""
        return self._state is not None and self._state.has_history and self.recipe.has_weight_gradients

    def matrix(
        self, operand: str, x: torch.Tensor, *, transpose: bool, records: bool, group: Group | None = None
    ) -> tuple[Quantized, Quantized | None]:
        """Return an input or gradient quantized along its rows, and with ``transpose`` also along its columns.

        ``records`` lets delayed scaling record the amax. The ranks of ``group`` hold row shards of one matrix, and
        compute the same scales if a scale covers several shards.

        Shapes: ``x: [n, m] -> [n, m], [m, n]``.
        """
        dtype, blocks = self.recipe.dtype(operand), self.recipe.blocks
        if blocks == WHOLE:
            scale, amax = self._scale(operand, x, group, records)
            plain, turned = quantize_whole(x, dtype, scale, amax, transpose=transpose)
            assert plain is not None
            return plain, turned
        plain, turned = quantize_both(x, dtype, blocks, transpose=transpose, share=_maximum_over(group))
        assert plain is not None
        return plain, turned

    def columns(self, operand: str, x: torch.Tensor, group: Group | None = None) -> Quantized:
        """Return the transpose of an input or gradient, quantized along its rows.

        Shapes: ``x: [n, m] -> [m, n]``.
        """
        dtype, blocks = self.recipe.dtype(operand), self.recipe.blocks
        if blocks == WHOLE:
            return quantize(x.t(), dtype, blocks, scale_of(_shared_amax(x, blocks, group), dtype))
        _, turned = quantize_both(x, dtype, blocks, plain=False, transpose=True, share=_maximum_over(group))
        assert turned is not None
        return turned

    def activated(self, x: torch.Tensor, kind: str, *, records: bool) -> Quantized:
        """Return a gated activation as a quantized input. It needs Triton and `knows_scales`.

        Shapes: ``x: [n, 2 m] -> [n, m]``.
        """
        from megatron.core.ops.triton import cast_gated_with_scale

        scale, amax = self._scale("input", x, None, records)
        return Quantized(cast_gated_with_scale(x, kind, scale, amax), scale, WHOLE)

    def activation_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, kind: str, following: Fp8Quantizers, *, records: bool
    ) -> tuple[Quantized, Quantized, Quantized]:
        """Return the gradient of a gated activation's input as a quantized output gradient, and its transpose.

        The third result is the transpose of the activation, quantized as the input of the layer of the ``following``
        quantizers. It needs Triton and `knows_scales`.

        Shapes: ``grad: [n, m]``, ``x: [n, 2 m] -> [n, 2 m], [2 m, n], [m, n]``.
        """
        from megatron.core.ops.triton import cast_gated_gradient_with_scale

        scale, amax = self._scale("grad", x, None, records)
        scales = scale, scale, following._scale("input", x, None, False)[0]
        dtype = self.recipe.dtype("grad")
        matrices = cast_gated_gradient_with_scale(grad, x, kind, dtype, scale, amax, scales[2])
        plain, turned, activated = (Quantized(data, by, WHOLE) for data, by in zip(matrices, scales, strict=True))
        return plain, turned, activated

    def input_again(
        self, x: torch.Tensor, scale: torch.Tensor | None, transpose: bool, group: Group | None
    ) -> Quantized:
        """Return an input, or with ``transpose`` its transpose, quantized like in `matrix`.

        ``scale`` is the scale of the first quantization if there is one per tensor. Without it the transpose is
        returned.

        Shapes: ``x: [n, m] -> [n, m]``, transposed ``[m, n]``.
        """
        if scale is None:
            return self.columns("input", x, group)
        dtype = self.recipe.dtype("input")
        plain, turned = quantize_whole(x, dtype, scale, None, plain=not transpose, transpose=transpose)
        quantized = turned if plain is None else plain
        assert quantized is not None
        return quantized

    def weight(self, x: torch.Tensor, *, transpose: bool, records: bool, scale: torch.Tensor | None) -> Quantized:
        """Return a weight, or its transpose, quantized along its rows.

        ``scale`` is the scale of an earlier quantization, if known.

        Shapes: ``x: [n, m] -> [n, m]``, transposed ``[m, n]``.
        """
        if self._kept_weight is not None:
            if not self._kept_weight:
                # The first pass of recomputed layers does not record, but a pass that does may find the kept weight.
                both = self._weight(x, None, plain=True, transpose=True, records=True)
                # In place, since the quantizers of micro-batches share it.
                self._kept_weight.update({False: both[0], True: both[1]})
            return self._kept_weight[transpose]
        return self._weight(x, scale, plain=not transpose, transpose=transpose, records=records)[0]

    def weight_of_groups(self, weight: torch.Tensor, *, transpose: bool) -> QuantizedGroups:
        """Return the weights of all groups, or their transposes, quantized along their rows; if kept, both.

        Shapes: ``[groups, out, in]``.
        """
        if self._kept_weight is None:
            return quantize_weights(weight, plain=not transpose, transpose=transpose)
        if self._kept_groups is None:
            self._kept_groups = quantize_weights(weight, plain=True, transpose=True)
        return self._kept_groups

    def _weight(
        self, x: torch.Tensor, scale: torch.Tensor | None, *, plain: bool, transpose: bool, records: bool
    ) -> list[Quantized]:
        """Return a quantized weight (``plain``), its quantized transpose, or both."""
        dtype, blocks = self.recipe.dtype("weight"), self.recipe.weight_blocks
        if blocks == WHOLE:
            amax = None
            if scale is None:
                scale, amax = self._scale("weight", x, None, records)
            parts = quantize_whole(x, dtype, scale, amax, plain=plain, transpose=transpose)
        else:
            parts = quantize_both(x, dtype, blocks, plain=plain, transpose=transpose, scale=scale)
        return [part for part in parts if part is not None]

    def _scale(
        self, operand: str, x: torch.Tensor, group: Group | None, records: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale of a whole matrix, and the tensor that records its amax."""
        state, index = self._state, (*self._place, OPERANDS.index(operand))
        seen = state.amax[index] if state is not None and records else None
        if state is not None and state.has_history:
            return state.scale[index].view(1, 1), seen
        # The first step has no history and uses the current amax.
        return scale_of(_shared_amax(x, WHOLE, group), self.recipe.dtype(operand)), seen


@contextmanager
def weights_kept(quantizers: Sequence[Fp8Quantizers]) -> Iterator[None]:
    """Quantize each weight only once inside the context, in which no weight may change."""
    for each in quantizers:
        each.keep_weight()
    try:
        yield
    finally:
        for each in quantizers:
            each.forget_weight()


def _maximum_over(group: Group | None) -> Callable[[torch.Tensor], object] | None:
    """Return a function that reduces amaxes to their maximum over a group's ranks."""
    return None if group is None else lambda amax: all_reduce(amax, group, "max")


def _shared_amax(x: torch.Tensor, blocks: Blocks, group: Group | None) -> torch.Tensor:
    amax = amax_of(x, blocks)
    if group is not None:
        all_reduce(amax, group, "max")
    return amax
