"""Gated delta-net: linear attention whose state is decayed and corrected by the delta rule.

Yang et al. 2024, https://arxiv.org/abs/2412.06464, in the form of Qwen3-Next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.context_parallel import StackedHeads, copies_of_key_value_heads
from megatron.core.ops.linear_attention import gated_delta_rule, gated_delta_rule_of_segments
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import make_parameter, replicated_spec
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.gated_delta_net_kind import GATED_DELTA_NET
from megatron.core.transformer.norm import normalize
from megatron.core.transformer.recurrent_mixer import RecurrentMixer, StackedConvolution, without_padding

_SQUARED_NORM_EPSILON = 1e-6


class HeadNorm(torch.nn.Module):
    """RMSNorm of each head, with one weight per channel that all heads share. The weight may be stored minus one.

    Shapes: ``[..., heads/tp, d] -> [..., heads/tp, d]``.
    """

    def __init__(
        self, config: DecoderConfig, width: int, tp: Group, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.offset = 1.0 if config.apply_layernorm_1p else 0.0
        spec = replicated_spec("weight", (width,), tp, partial_gradient=True, mean=1.0 - self.offset)
        self.weight = make_parameter((width,), spec, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight + self.offset, None, "RMSNorm", self.epsilon)


class GatedDeltaNet(RecurrentMixer):
    """Gated delta-net with a convolution over queries, keys and values, and a gated norm of its output.

    The input of `mix` is queries, keys, values, the gate of the output, beta and the input of the decays. Here they are
    the rows of the input projection.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
    ) -> None:
        super().__init__(config, layer_number, tp, device, cp)
        hybrid = config.hybrid
        num_heads = hybrid.linear_num_value_heads
        self.key_dim, self.value_dim = hybrid.linear_key_head_dim, hybrid.linear_value_head_dim
        own_heads, own_keys = num_heads // tp.size, hybrid.linear_num_key_heads // tp.size
        num_ranks = self.head_ranks.size
        copies = copies_of_key_value_heads(own_heads, own_keys, num_ranks)
        assert copies is not None, f"{own_heads} heads of {own_keys} keys cannot be shared by {num_ranks} ranks"
        of_keys = StackedHeads(own_keys, self.key_dim, copies)
        of_conv = (of_keys, of_keys, StackedHeads(own_heads, self.value_dim))
        self.values_per_key = own_heads // (own_keys * copies)
        self.conv1d = StackedConvolution(
            of_conv,
            hybrid.linear_conv_kernel_dim,
            tp,
            self.head_ranks,
            has_bias=False,
            dtype=self.dtype,
            device=device,
        )
        self._add_decays(config, copies)
        self.out_norm = HeadNorm(config, self.value_dim, tp, self.dtype, device)
        self.stacked = (of_conv, (StackedHeads(own_heads),), (self.heads_of_steps,))
        self._add_all_projections(config)

    def _add_decays(self, config: DecoderConfig, copies: int) -> None:
        self._add_decay(config.hybrid.linear_num_value_heads)

    def _add_all_projections(self, config: DecoderConfig) -> None:
        self.rows = config.hybrid.projection_rows(GATED_DELTA_NET, config.hidden_size)
        self._add_projections(config, config.hybrid.linear_value_size)

    def opening(self, gate: torch.Tensor) -> torch.Tensor:
        """Return the factors of the output. Shapes: ``[b, s, heads/tp, dv] -> [b, s, heads/tp, dv]``."""
        return F.silu(gate)

    def log_decay(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return the logarithm of the decay of each head, or of each channel of its keys.

        Shapes: ``[b, s, steps/tp] -> [b, s, heads/tp]`` or ``[b, s, heads/tp, dk]``.
        """
        return self.decay_rates() * self.steps(x, padding)

    def mix(
        self,
        mixed: torch.Tensor,
        starts: torch.Tensor | None,
        states: tuple[torch.Tensor, ...] | None = None,
        padding: torch.Tensor | None = None,
        *,
        return_states: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        convolved, beta_rows, step_rows = ([heads.num_rows for heads in own] for own in self.stacked)
        sizes = (sum(convolved), convolved[-1], *beta_rows, *step_rows)
        qkv, gate, b, a = mixed.transpose(0, 1).split_with_sizes(sizes, dim=-1)
        qkv, b, a = self.to_heads((qkv, b, a), self.stacked)
        of_conv, of_rule = (None, None) if states is None else states
        qkv, conv_state = self.convolve(qkv, of_conv, starts, padding, return_state=return_states)
        shares = [heads.rows_of_rank(self.head_ranks.size) for heads in self.stacked[0]]
        query, key, value = qkv.split_with_sizes(shares, dim=-1)
        query, key = (self._unit(torch.unflatten(each, -1, (-1, self.key_dim))) for each in (query, key))
        inputs = (
            *(query * self.key_dim**-0.5, key, torch.unflatten(value, -1, (-1, self.value_dim))),
            *(self.log_decay(a, padding), without_padding(b.sigmoid(), padding)),
        )
        rule_state = None
        if self.passes_states:
            context = gated_delta_rule_of_segments(*inputs, starts, self.states_before)
        else:
            context, rule_state = gated_delta_rule(*inputs, of_rule, starts, return_state=return_states)
        wide = arithmetic_dtype(mixed.dtype)
        opened = self.opening(gate.reshape(*gate.shape[:2], -1, self.value_dim).to(wide))
        gated = self.out_norm(self.to_sequence(context)) * opened
        output = gated.to(mixed.dtype).flatten(2).transpose(0, 1).contiguous()
        if conv_state is None or rule_state is None:
            return output, ()
        return output, (conv_state, rule_state)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Divide each head by its norm, and repeat it for the value heads that share it.

        Shapes: ``[b, s, key heads of rank, dk] -> [b, s, heads of rank, dk]``.
        """
        wide = x.to(arithmetic_dtype(x.dtype))
        unit = wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + _SQUARED_NORM_EPSILON)
        return unit.to(x.dtype).repeat_interleave(self.values_per_key, dim=2)
