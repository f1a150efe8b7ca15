"""Mamba-2: a state-space layer whose decay, inputs and outputs depend on the position.

Dao and Gu 2024, https://arxiv.org/abs/2405.21060.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.context_parallel import StackedHeads, copies_of_key_value_heads
from megatron.core.ops import runs_on_triton
from megatron.core.ops.linear_attention import selective_scan, selective_scan_of_segments
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, even_shards
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    make_parameter,
    sum_over_tensor_model_parallel_region,
)
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.mamba_kind import MAMBA
from megatron.core.transformer.recurrent_mixer import RecurrentMixer, StackedConvolution, without_padding


class GatedNorm(torch.nn.Module):
    """RMSNorm over the channels of each group of heads after or before the gate, or the gate alone.

    Groups are sharded over tensor parallelism. If there are fewer groups than tensor-parallel ranks, several ranks
    share a group. Forward and backward: an all-reduce of one number per token and group.

    Shapes: ``x, gate: [b, s, inner/tp] -> [b, s, inner/tp]``.
    """

    def __init__(
        self, config: DecoderConfig, inner: int, tp: Group, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.kind, self.num_groups = config.hybrid.mamba_norm, config.hybrid.mamba_num_groups
        self.tp, self.epsilon = tp, config.norm_epsilon
        self.ranks_per_group = max(tp.size // self.num_groups, 1)
        self.own_width = inner // self.num_groups // self.ranks_per_group
        self.weight: torch.nn.Parameter | None = None
        if self.kind != "none":
            spec = ParamSpec("weight", (inner,), even_shards((inner,), 0, tp.rank, tp.size), init_mean=1.0)
            self.weight = make_parameter((inner // tp.size,), spec, dtype, device)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self._is_on_triton(x, gate):
            from megatron.core.ops.triton import gate_and_normalize

            num_groups = x.shape[-1] // self.own_width
            return gate_and_normalize(
                x, gate, self.weight, num_groups, self.epsilon, gate_first=self.kind != "before-gate"
            )
        wide = arithmetic_dtype(x.dtype)
        opened, gated = F.silu(gate.to(wide)), x.to(wide)
        if self.kind != "before-gate":
            gated = gated * opened
        if self.weight is None:
            return gated.to(x.dtype)
        gated = gated.reshape(*x.shape[:-1], -1, self.own_width)
        mean = gated.square().mean(dim=-1, keepdim=True)
        if self.ranks_per_group > 1:
            mean = self._mean_of_group(mean)
        normalized = (gated * torch.rsqrt(mean + self.epsilon)).view(x.shape).to(x.dtype) * self.weight
        return normalized if self.kind == "after-gate" else (normalized * opened).to(x.dtype)

    def _is_on_triton(self, x: torch.Tensor, gate: torch.Tensor) -> bool:
        if self.ranks_per_group > 1 or not runs_on_triton(x, gate, *self.parameters()):
            return False
        from megatron.core.ops.triton import MAX_GROUP_WIDTH

        return self.own_width <= MAX_GROUP_WIDTH

    def _mean_of_group(self, own: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks that share this rank's group. Shapes: ``[..., 1, 1] -> [..., 1, 1]``."""
        group = self.tp.rank // self.ranks_per_group
        by_group = F.pad(own, (group, self.num_groups - 1 - group))
        sums = sum_over_tensor_model_parallel_region(by_group, self.tp)
        return sums[..., group : group + 1] / self.ranks_per_group


class MambaMixer(RecurrentMixer):
    """Mamba-2 with a convolution over x, B and C, and a gated norm of its output.

    The rows of the input projection are the gate z, x, B, C and the step sizes dt. If there are fewer groups of heads
    than tensor-parallel ranks, the state dimensions of B and C are sharded, and all-gathered before the scan.
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
        self.ranks_per_group = max(tp.size // hybrid.mamba_num_groups, 1)
        own_heads, own_groups = num_heads // tp.size, max(hybrid.mamba_num_groups // tp.size, 1)
        num_ranks = self.head_ranks.size
        copies = copies_of_key_value_heads(own_heads, own_groups, num_ranks)
        assert copies is not None, f"{own_heads} heads in {own_groups} groups cannot be shared by {num_ranks} ranks"
        # Ranks that share a group convolve their share of its state dimensions.
        of_states = StackedHeads(own_groups, self.rows[2] // tp.size // own_groups, copies)
        of_conv = (StackedHeads(own_heads, self.head_dim), of_states, of_states)
        self.stacked = (of_conv, (StackedHeads(own_heads),))
        self.conv1d = StackedConvolution(
            of_conv,
            hybrid.mamba_conv_kernel_dim,
            tp,
            self.head_ranks,
            has_bias=hybrid.mamba_conv_bias,
            dtype=self.dtype,
            device=device,
        )
        self.multipliers = hybrid.mamba_multipliers
        self.dt_limits = hybrid.mamba_dt_lower_limit, hybrid.mamba_dt_upper_limit
        self._add_decay(num_heads)
        self.D = self._per_head("D", num_heads, init_mean=1.0)
        self.norm = GatedNorm(config, inner, tp, self.dtype, device)
        self._add_projections(config, inner, has_bias=hybrid.mamba_proj_bias)

    def mix(
        self,
        mixed: torch.Tensor,
        starts: torch.Tensor | None,
        states: tuple[torch.Tensor, ...] | None = None,
        padding: torch.Tensor | None = None,
        *,
        return_states: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        rows = [count // self.tp.size for count in self.rows]
        inner, _, width, _, heads = rows
        if set(self.multipliers) != {1.0}:
            mixed = mixed * torch.cat([mixed.new_full((count,), x) for count, x in zip(rows, self.multipliers)])
        z, xbc, dt = mixed.transpose(0, 1).split_with_sizes((inner, inner + 2 * width, heads), dim=-1)
        xbc, dt = self.to_heads((xbc, dt), self.stacked)
        of_conv, of_scan = (None, None) if states is None else states
        xbc, conv_state = self.convolve(xbc, of_conv, starts, padding, return_state=return_states)
        shares = [heads.rows_of_rank(self.head_ranks.size) for heads in self.stacked[0]]
        x, to_state, from_state = xbc.split_with_sizes(shares, dim=-1)
        if self.ranks_per_group > 1:
            to_state, from_state = self._own_groups(xbc[..., shares[0] :])
        inputs = (
            *(torch.unflatten(x, -1, (-1, self.head_dim)), self.steps(dt, padding), self.decay_rates()),
            torch.unflatten(to_state, -1, (-1, self.state_dim)),
            torch.unflatten(from_state, -1, (-1, self.state_dim)),
            self.own_heads(self.D),
        )
        scan_state = None
        if self.passes_states:
            y = selective_scan_of_segments(*inputs, starts, self.states_before)
        else:
            y, scan_state = selective_scan(*inputs, of_scan, starts, return_state=return_states)
        output = self.norm(self.to_sequence(y).flatten(2), z).transpose(0, 1).contiguous()
        if conv_state is None or scan_state is None:
            return output, ()
        return output, (conv_state, scan_state)

    def _own_groups(self, of_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return B and C of the group that this rank shares with others.

        Shapes: ``[b, s, 2 * groups * d_state/tp] -> [b, s, d_state]`` twice.
        """
        gathered = all_gather_last_dim_from_tensor_parallel_region(of_states, self.tp)
        both = torch.unflatten(gathered, -1, (self.tp.size, 2, -1)).movedim(-2, 0).flatten(-2)
        first = self.tp.rank // self.ranks_per_group * self.state_dim
        to_state, from_state = both[..., first : first + self.state_dim].unbind()
        return to_state, from_state

    def steps(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return the step sizes as `RecurrentMixer` does, within their limits."""
        steps = super().steps(x, None)
        lower, upper = self.dt_limits
        if lower > 0 or upper is not None:
            steps = steps.clamp(lower, upper)
        return without_padding(steps, padding)
