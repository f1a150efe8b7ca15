"""What a rank reduces and updates of a parameter: all of it, or the stretch that lies in the rank's shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.sharding import ParamSpec, flat_range_boxes, spec_of


@dataclass(frozen=True, eq=False)
class ParamPart:
    """Hold the elements ``[start, end)`` of a flattened parameter: their values and, once reduced, their gradient.

    Both are views: of the parameter's own memory and of where the gradients of an iteration end up.

    Shapes: ``values, gradient: [end - start]``.
    """

    parameter: torch.nn.Parameter
    start: int
    end: int
    values: torch.Tensor
    gradient: torch.Tensor

    @property
    def spec(self) -> ParamSpec:
        """Return the description of the whole local parameter."""
        return spec_of(self.parameter)

    def described(self, flat: torch.Tensor) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Cut a tensor of this part's length into views that are boxes of the local parameter, each described.

        Boxes that are padding only are left out.

        Shapes: ``flat: [end - start]``.
        """
        position = 0
        for box in flat_range_boxes(self.parameter.shape, self.start, self.end):
            view = flat[position : position + box.num_elements].view(box.shape)
            position += box.num_elements
            spec = self.spec.within(box)
            if spec.pieces:
                yield spec, view
