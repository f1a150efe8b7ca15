"""Where delayed scaling keeps what it remembers of the products of a layer."""

from __future__ import annotations

from dataclasses import dataclass

_EXPERT_LAYERS = 2


@dataclass(frozen=True)
class Float8Places:
    """Number a layer's products: ``num_linear`` linear layers in the order of the model, then two for each expert.

    With ``has_join``, the product in front of layers that predict further tokens has a place between these. All layers
    have as many, whether or not they use them, so that a place means the same at any layout.
    """

    num_layers: int
    num_linear: int = 4
    num_experts: int = 0
    has_join: bool = False

    @property
    def join(self) -> int:
        """Return the place of the product in front of a layer."""
        assert self.has_join
        return self.num_linear

    @property
    def num_shared(self) -> int:
        """Return the number of places that are no expert's."""
        return self.num_linear + self.has_join

    @property
    def num_places(self) -> int:
        """Return the number of places of a layer."""
        return self.num_shared + _EXPERT_LAYERS * self.num_experts

    def of_expert(self, number: int, which: int) -> int:
        """Return the place of an expert's first (0) or second (1) product; ``number`` is that of the whole model."""
        assert number < self.num_experts
        return self.num_shared + _EXPERT_LAYERS * number + which
