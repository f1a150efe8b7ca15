"""What delayed scaling remembers: for every operand of every linear layer a scale, and the amax of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.core.collectives import all_reduce
from megatron.core.float8_config import Float8Config
from megatron.core.kernels.float8.quantised import scale_of
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.float8_recipe import OPERANDS, Float8Recipe

LINEAR_LAYERS = 4
"""Number of linear layers in a transformer layer."""


class Float8State:
    """Hold the scales and the histories of the whole model, the same on every rank of any layout.

    A rank writes the amax of what it quantises into ``amax``. `update` takes the largest of all ranks, in one
    collective a step, and makes the scales of the next step from it. Memory stays where it is, as CUDA graphs need it.

    Shapes: ``amax, scale: [layers, 4, 3]``, ``history: [layers, 4, 3, length]``, the newest first; all float32.
    """

    def __init__(self, config: Float8Config, num_layers: int, device: torch.device | str) -> None:
        self._config = config
        recipe = Float8Recipe.of(config)
        shape = (num_layers, LINEAR_LAYERS, len(OPERANDS))
        self.amax = torch.zeros(shape, device=device)
        self.scale = torch.ones(shape, device=device)
        self.history = torch.zeros(*shape, config.fp8_amax_history_len, device=device)
        self._dtypes = [recipe.dtype(operand) for operand in OPERANDS]
        self.has_history = False

    @torch.no_grad()
    def update(self, world: Group, iteration: int) -> None:
        """Take the amax of a step, which was the iteration of this number, and set the scales of the next; collective.

        An amax that is not finite counts for nothing.
        """
        all_reduce(self.amax, world, "max")
        amax = torch.where(self.amax.isfinite(), self.amax, 0.0)
        self.history.copy_(torch.cat((amax.unsqueeze(-1), self.history[..., :-1]), dim=-1))
        if iteration % self._config.fp8_interval == 0 or not self.has_history:
            expected = self.history.amax(-1) if self._config.fp8_amax_compute_algo == "max" else self.history[..., 0]
            margin = self._config.fp8_margin
            scales = [scale_of(expected[..., i], dtype, margin) for i, dtype in enumerate(self._dtypes)]
            # An operand that nothing was seen of keeps its scale.
            self.scale.copy_(torch.where(expected > 0, torch.stack(scales, dim=-1), self.scale))
        self.amax.zero_()
        self.has_history = True

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return by name what a checkpoint keeps; filling them in place loads them."""
        return {"scale": self.scale, "amax_history": self.history}

    def loaded(self) -> None:
        """Note that `tensors` were filled."""
        self.has_history = bool(self.history.any())
