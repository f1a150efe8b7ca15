"""FP8 options: which GEMMs run in FP8, how operands are scaled, and the index of a layer's scaled tensors.

Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag

_DELAYED = ("fp8_recipe", "delayed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Config(Config, role="run", in_args=False):
    """Hold the choices of fp8; without ``fp8_format`` there is none. Every scale is a power of two."""

    fp8_format: str | None = flag(None, choices=("hybrid", "e4m3"))
    """Compute the linear layers' products in fp8, with --bf16 or --fp16: E4M3 throughout (e4m3), or E5M2 for the
    gradients of outputs (hybrid)."""
    fp8_hybrid: bool = flag(False, excludes=("fp8_e4m3",), seen_as="fp8_format")
    """Same as --fp8-format hybrid."""
    fp8_e4m3: bool = flag(False, seen_as="fp8_format")
    """Same as --fp8-format e4m3."""
    fp8_recipe: str = flag(
        "delayed", choices=("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"), not_built=("custom",)
    )
    """What shares a scale: a tensor, scaled by the amax of earlier steps (delayed) or by its own (tensorwise), a row,
    a block (1 x 128, of weights 128 x 128), or 32 numbers of a row (mxfp8)."""
    # E4M3 has 17 powers of two between its smallest number and its largest: with more, nothing would be left.
    fp8_margin: int = flag(0, bounds=NOT_NEGATIVE, most=17, where=_DELAYED)
    """Powers of two that delayed scaling leaves free above the largest value that it expects, 17 at most."""
    fp8_interval: int = flag(1, bounds=POSITIVE, where=_DELAYED)
    """Number of iterations after which delayed scaling takes new scales."""
    fp8_amax_history_len: int = flag(1, bounds=POSITIVE, most=2**20, where=_DELAYED)
    """Number of iterations whose amax (largest absolute value) delayed scaling remembers."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"), where=_DELAYED)
    """Which amax of the history delayed scaling expects: the last, or the largest."""
    fp8_wgrad: bool = flag(True, negative="--no-fp8-wgrad")
    """Compute weight gradients in fp8. Off: compute weight gradients in the model's own precision."""
    fp8_param_gather: bool = flag(False, needs="fp8_format")
    """Let weights of fp8 products travel in fp8 when the distributed optimizer gathers them."""
    first_last_layers_bf16: bool = flag(False, needs="fp8_format")
    """Keep the first and the last layers in the model's own precision."""
    num_layers_at_start_in_bf16: int = flag(1, bounds=NOT_NEGATIVE, where=("first_last_layers_bf16", True))
    """Number of layers at the start that stay in the model's own precision."""
    num_layers_at_end_in_bf16: int = flag(1, bounds=NOT_NEGATIVE, where=("first_last_layers_bf16", True))
    """Number of layers at the end that stay in the model's own precision."""

    def __post_init__(self) -> None:
        """Fill in the format that the older flags stand for."""
        if self.fp8_format is None and (self.fp8_hybrid or self.fp8_e4m3):
            object.__setattr__(self, "fp8_format", "hybrid" if self.fp8_hybrid else "e4m3")

    def float8_layers(self, num_layers: int) -> range:
        """Return the numbers of the layers whose products are in fp8."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)

    def is_in_float8(self, layer_number: int, num_layers: int) -> bool:
        """Return whether a layer's products are in fp8; those behind the model's are whenever there is fp8."""
        if layer_number >= num_layers:
            return self.fp8_format is not None
        return layer_number in self.float8_layers(num_layers)


_EXPERT_LAYERS = 2


@dataclass(frozen=True)
class Fp8TensorIndex:
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
        return self.num_linear + self.has_join

    @property
    def num_places(self) -> int:
        return self.num_shared + _EXPERT_LAYERS * self.num_experts

    def of_expert(self, number: int, which: int) -> int:
        """Return the place of an expert's first (0) or second (1) product; ``number`` is that of the whole model."""
        assert number < self.num_experts
        return self.num_shared + _EXPERT_LAYERS * number + which
