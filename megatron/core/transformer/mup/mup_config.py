"""Maximal update parametrization: how a model and its learning rates scale with its width.

Yang et al. 2022, https://arxiv.org/abs/2203.03466.
"""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import POSITIVE, Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupConfig(Config):
    """Hold the multipliers of a model that is scaled from a narrower one; without ``use_mup`` there are none."""

    use_mup: bool = flag(False, role="meaning", in_args=False)
    """Scale initial values, learning rates and logits with the width, so that the best learning rate of a narrow model
    is that of a wide one."""
    mup_base_hidden_size: int | None = flag(
        None,
        role="meaning",
        bounds=POSITIVE,
        where=("use_mup", True),
        needs="use_mup",
        seen_as="width_multiplier",
        in_args=False,
    )
    """Width of the model whose learning rates and --init-method-std are given."""
    mup_width_mult: float | None = flag(
        None,
        role="meaning",
        bounds=POSITIVE,
        where=("use_mup", True),
        needs="use_mup",
        seen_as="width_multiplier",
        in_args=False,
        excludes=("mup_base_hidden_size",),
    )
    """How many times wider the model is; by default --hidden-size / --mup-base-hidden-size."""
    mup_embedding_mult: float = flag(
        1.0, role="meaning", bounds=POSITIVE, where=("use_mup", True), needs="use_mup", in_args=False
    )
    """Multiplier of the embeddings."""
    mup_output_mult: float = flag(
        1.0, role="meaning", bounds=POSITIVE, where=("use_mup", True), needs="use_mup", in_args=False
    )
    """Multiplier of the logits, which are divided by the width's multiplier too."""
    mup_base_head_dim: float | None = flag(
        None,
        role="meaning",
        excludes=("query_pre_attn_scalar",),
        bounds=POSITIVE,
        where=("use_mup", True),
        needs="use_mup",
        in_args=False,
    )
    """Width of the base model's heads, where it is another: attention scores are then divided by a power of the heads'
    width, and at this width by its root."""
    mup_attn_scale_power: float = flag(
        1.0, role="meaning", bounds=POSITIVE, where=("use_mup", True), needs="mup_base_head_dim", in_args=False
    )
    """Power of the heads' width by which attention scores are divided with --mup-base-head-dim."""

    def width_multiplier_of(self, hidden_size: int) -> float:
        """Return how many times wider a model of this width is than its base."""
        if not self.use_mup:
            return 1.0
        if self.mup_width_mult is not None:
            return self.mup_width_mult
        return hidden_size / (self.mup_base_hidden_size or hidden_size)
