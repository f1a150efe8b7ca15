"""The widths of multi-head latent attention, and how YaRN stretches its positions."""

from __future__ import annotations

import dataclasses
import math

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag

_LATENT = "multi_latent_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(Config):
    """Hold the choices of latent attention; without ``multi_latent_attention`` YaRN alone counts."""

    multi_latent_attention: bool = flag(False, role="shape")
    """Make keys and values of one narrow latent vector a token, which all heads share (DeepSeek-V2)."""
    q_lora_rank: int | None = flag(None, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Width of the queries' own latent vector; by default queries are made of the hidden states."""
    kv_lora_rank: int = flag(32, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = flag(128, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Width of a head's query and key without their rotary part."""
    qk_pos_emb_head_dim: int = flag(64, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Width of the rotary part of queries and keys; that of the key is one for all heads."""
    v_head_dim: int = flag(128, role="shape", bounds=POSITIVE, needs=_LATENT)
    """Width of a head's value."""
    rope_type: str | None = flag(None, choices=("rope", "yarn"), role="meaning")
    """Kind of rotary positions: plain (rope), or stretched by --rotary-scaling-factor (yarn); yarn is the default of
    latent attention, rope that of any other."""
    rotary_scaling_factor: float = flag(1.0, role="meaning", bounds=POSITIVE)
    """YaRN: how many times as many positions as the model was first trained with."""
    original_max_position_embeddings: int = flag(4096, role="meaning", bounds=POSITIVE)
    """YaRN: number of positions that the model was first trained with."""
    beta_fast: float = flag(32.0, role="meaning", bounds=POSITIVE)
    """YaRN: frequencies that turn more often than this over the original positions are kept."""
    beta_slow: float = flag(1.0, role="meaning", bounds=POSITIVE)
    """YaRN: frequencies that turn less often than this over the original positions are divided by the factor."""
    yarn_correction_range_round_to_int: bool = flag(
        True, negative="--no-yarn-correction-range-round-to-int", role="meaning"
    )
    """YaRN: blend frequencies between whole channels. Off: blend frequencies between the exact places of --beta-fast
    and --beta-slow."""
    mscale: float = flag(1.0, role="meaning", bounds=NOT_NEGATIVE)
    """YaRN: how much the rotary part of queries and keys grows with the logarithm of the factor."""
    mscale_all_dim: float = flag(0.0, role="meaning", bounds=NOT_NEGATIVE)
    """YaRN: how much attention scores grow with the logarithm of the factor, in place of the rotary part."""

    @property
    def latent_query_width(self) -> int:
        """Return the width of a head's query and key with latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def latent_head_width(self) -> int:
        """Return the width that queries, keys and values of a head are padded to, as kernels want one for all."""
        return max(self.latent_query_width, self.v_head_dim)

    @property
    def stretches_positions(self) -> bool:
        """Tell whether positions are stretched by YaRN."""
        kind = self.rope_type or ("yarn" if self.multi_latent_attention else "rope")
        return kind == "yarn" and self.rotary_scaling_factor != 1.0

    @property
    def rotary_amplitude(self) -> float:
        """Return what YaRN multiplies the rotary part of queries and keys by."""
        if not self.stretches_positions:
            return 1.0
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def latent_score_factor(self) -> float:
        """Return what scores are multiplied by, which cores divide by the root of the padded width."""
        growth = self._growth(self.mscale_all_dim)
        return growth * growth * math.sqrt(self.latent_head_width / self.latent_query_width)

    @property
    def scales_latent_scores(self) -> bool:
        """Tell whether scores of latent attention grow with the scaling factor, beside plain positions too."""
        return self.multi_latent_attention and self._growth(self.mscale_all_dim) != 1.0

    def _growth(self, scale: float) -> float:
        factor = self.rotary_scaling_factor
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    @property
    def num_attention_maps(self) -> int:
        """Return the number of linear maps of an attention, latent or not."""
        if not self.multi_latent_attention:
            return 2
        return 4 if self.q_lora_rank is None else 5

    def latent_projections(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of weights of an attention's linear maps."""
        queries = num_heads * self.latent_query_width
        of_queries = hidden_size * queries
        if self.q_lora_rank is not None:
            of_queries = self.q_lora_rank * (hidden_size + queries)
        down = hidden_size * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
        up = self.kv_lora_rank * num_heads * (self.qk_head_dim + self.v_head_dim)
        return of_queries + down + up + num_heads * self.v_head_dim * hidden_size
