"""What delayed scaling remembers: for every operand of every linear layer a scale, and the amax of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.core.collectives import all_reduce
from megatron.core.fp8.float8_config import Float8Config
from megatron.core.fp8.float8_places import Float8Places
from megatron.core.fp8.float8_recipe import OPERANDS, Float8Recipe
from megatron.core.kernels.float8.quantised import scale_of
from megatron.core.process_group import Group

_SCALE_STRIDE = 4
"""Elements from one scale to the next: cuBLAS requires the address of a scale to be a multiple of 16 bytes."""


class Float8State:
    """Hold the scales and the histories of the whole model, the same on every rank of any layout.

    A rank writes the amax of what it quantises into ``amax``. `update` takes the largest of all ranks, in one
    collective a step, and makes the scales of the next step from it. Memory stays where it is, as CUDA graphs need it.

    What is kept does not depend on the layout either: ``num_averaged`` is over how many ranks gradients are averaged
    after the backward pass, in which they are as many times as large.

    An expert may be given no tokens for many steps. As long as none was seen, it is scaled as the layer's others are.

    Shapes: ``amax, scale, expected: [layers, places, 3]``, ``history: [layers, places, 3, length]``, the newest first;
    all float32. Scales lie 16 bytes apart.
    """

    def __init__(
        self, config: Float8Config, places: Float8Places, device: torch.device | str, num_averaged: int = 1
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
        """Take the amax of a step, which was the iteration of this number, and set the scales of the next; collective.

        An amax that is not finite counts for nothing.
        """
        all_reduce(self.amax, world, "max")
        amax = torch.where(self.amax.isfinite(), self.amax, 0.0) / self._times
        self.history.copy_(torch.cat((amax.unsqueeze(-1), self.history[..., :-1]), dim=-1))
        if iteration % self._config.fp8_interval == 0 or not self.has_history:
            expected = self.history.amax(-1) if self._config.fp8_amax_compute_algo == "max" else self.history[..., 0]
            # An operand that nothing was seen of keeps its scale.
            self.expected.copy_(torch.where(expected > 0, expected, self.expected))
            self._set_scales()
        self.amax.zero_()
        self.has_history = True

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return by name what a checkpoint keeps; filling them in place loads them."""
        return {"expected_amax": self.expected, "amax_history": self.history}

    def loaded(self) -> None:
        """Note that `tensors` were filled."""
        self.has_history = bool(self.history.any())
        self._set_scales()

    def snapshot(self) -> tuple[torch.Tensor, ...]:
        """Return a copy of all that a step changes, for `restore`; nothing waits for the device."""
        return tuple(each.clone() for each in (self.amax, self.scale, self.expected, self.history))

    def restore(self, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Go back to a snapshot of this state."""
        for each, values in zip((self.amax, self.scale, self.expected, self.history), snapshot, strict=True):
            each.copy_(values)

    def _set_scales(self) -> None:
        amax, margin = self._expected_of_all() * self._times, self._config.fp8_margin
        scales = [scale_of(amax[..., i], dtype, margin) for i, dtype in enumerate(self._dtypes)]
        self.scale.copy_(torch.stack(scales, dim=-1))

    def _expected_of_all(self) -> torch.Tensor:
        """Return the amax that each operand is scaled by: of experts not seen yet, the largest of the layer's others.

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
