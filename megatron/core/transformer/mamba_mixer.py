"""Mamba-2: a state-space layer whose decay, inputs and outputs depend on the position.

Dao and Gu 2024, https://arxiv.org/abs/2405.21060.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.context_parallel import StackedHeads, copies_of_key_value_heads
from megatron.core.ops.linear_attention import selective_scan
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, even_shards
from megatron.core.tensor_parallel import make_parameter
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.hybrid_config import MAMBA
from megatron.core.transformer.recurrent_mixer import RecurrentMixer, StackedConvolution

_CONVOLUTION_WIDTH = 4


class GroupNorm(torch.nn.Module):
    """RMSNorm over the channels of each group of heads, after the gate. Groups are sharded over tensor parallelism.

    Shapes: ``x, gate: [..., inner/tp] -> [..., inner/tp]``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        inner: int,
        num_groups: int,
        tp: Group,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.epsilon, self.group_width = config.norm_epsilon, inner // num_groups
        spec = ParamSpec("weight", (inner,), even_shards((inner,), 0, tp.rank, tp.size), init_mean=1.0)
        self.weight = make_parameter((inner // tp.size,), spec, dtype, device)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = arithmetic_dtype(x.dtype)
        gated = (x.to(wide) * F.silu(gate.to(wide))).reshape(*x.shape[:-1], -1, self.group_width)
        scale = torch.rsqrt(gated.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return (gated * scale).view(x.shape).to(x.dtype) * self.weight


class MambaMixer(RecurrentMixer):
    """Mamba-2 with a convolution over x, B and C, and a gated norm of its output.

    The rows of the input projection are the gate z, x, B, C and the step sizes dt.
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
        num_heads, self.head_dim = hybrid.mamba_heads(config.hidden_size), hybrid.mamba_head_dim
        inner, self.state_dim = hybrid.inner_size(MAMBA, config.hidden_size), hybrid.mamba_state_dim
        self.rows = hybrid.projection_rows(MAMBA, config.hidden_size)
        own_heads, own_groups = num_heads // tp.size, hybrid.mamba_num_groups // tp.size
        copies = copies_of_key_value_heads(own_heads, own_groups, self.cp.size)
        assert copies is not None, f"{own_heads} heads in {own_groups} groups cannot be shared by {self.cp.size} ranks"
        of_states = StackedHeads(own_groups, self.state_dim, copies)
        of_conv = (StackedHeads(own_heads, self.head_dim), of_states, of_states)
        self.stacked = (of_conv, (StackedHeads(own_heads),))
        self.conv1d = StackedConvolution(
            of_conv, _CONVOLUTION_WIDTH, tp, self.cp, has_bias=True, dtype=self.dtype, device=device
        )
        self._add_decay(num_heads)
        self.D = self._per_head("D", num_heads, init_mean=1.0)
        self.norm = GroupNorm(config, inner, hybrid.mamba_num_groups, tp, self.dtype, device)
        self._add_projections(config, inner)

    def mix(
        self,
        mixed: torch.Tensor,
        starts: torch.Tensor | None,
        states: tuple[torch.Tensor, ...] | None = None,
        padding: torch.Tensor | None = None,
        *,
        return_states: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        inner, _, width, _, heads = (rows // self.tp.size for rows in self.rows)
        z, xbc, dt = mixed.transpose(0, 1).split_with_sizes((inner, inner + 2 * width, heads), dim=-1)
        xbc, dt = self.to_heads((xbc, dt), self.stacked)
        of_conv, of_scan = (None, None) if states is None else states
        xbc, conv_state = self.conv1d(xbc, of_conv, starts, padding, return_state=return_states)
        shares = [heads.rows_of_rank(self.cp.size) for heads in self.stacked[0]]
        x, to_state, from_state = xbc.split_with_sizes(shares, dim=-1)
        y, scan_state = selective_scan(
            x.unflatten(-1, (-1, self.head_dim)),
            self.steps(dt, padding),
            self.decay_rates(),
            to_state.unflatten(-1, (-1, self.state_dim)),
            from_state.unflatten(-1, (-1, self.state_dim)),
            self.own_heads(self.D),
            of_scan,
            starts,
            return_state=return_states,
        )
        output = self.norm(self.to_sequence(y).flatten(2), z).transpose(0, 1).contiguous()
        if conv_state is None or scan_state is None:
            return output, ()
        return output, (conv_state, scan_state)
