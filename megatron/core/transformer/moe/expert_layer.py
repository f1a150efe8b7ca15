"""The MoE layer: each token is routed to its top-k experts, and every token to the shared expert, if there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.layer_output import LayerOutput
from megatron.core.ops import Groups, RowCounts, RowOrder
from megatron.core.parallel_state import ExpertGroups, ParallelState
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import make_parameter, replicated_spec, scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer import DecoderConfig, FeedForward, ReplicatedLinear, make_norm
from megatron.core.transformer.moe.deepep import deepep_dispatcher
from megatron.core.transformer.moe.expert_dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Experts,
    LateGradients,
    TokenDispatcher,
    gather_copies,
    run_in_order,
)
from megatron.core.transformer.moe.expert_router import ExpertRouter
from megatron.core.transformer.moe.grouped_experts import GroupedExperts
from megatron.core.transformer.moe.load_balancing import ExpertLoads
from megatron.core.transformer.moe.routing import TokenRows, expert_capacity


class SharedExperts(FeedForward):
    """The shared expert: a dense feed-forward layer that every token passes, with an optional gate.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        width = config.moe.moe_shared_expert_intermediate_size
        assert width is not None
        super().__init__(dataclasses.replace(config, ffn_hidden_size=width), tp, device)
        self.gate_weight: nn.Parameter | None = None
        if config.moe.moe_shared_expert_gate:
            shape = (1, config.hidden_size)
            spec = replicated_spec("gate_weight", shape, tp, config.sequence_parallel, std=config.init_method_std)
            self.gate_weight = make_parameter(shape, spec, dtype_from_name(config.params_dtype), device)

    def forward(self, x: torch.Tensor) -> LayerOutput:
        output = super().forward(x).hidden
        return LayerOutput(output if self.gate_weight is None else output * F.linear(x, self.gate_weight).sigmoid())


class ExpertLayer(nn.Module):
    """Route each token to its top-k experts, and sum their weighted outputs and the shared expert's output.

    With ``moe_expert_norms`` the router reads the residual stream, and the experts its norm. Their summed output is
    normalized, and so is the shared expert's, before both are added.

    With ``moe_latent_size`` the experts read a projection of their input to that width. A second projection maps their
    weighted sum back to the hidden size (LatentMoE, Elango et al. 2026).

    Each tensor-parallel rank routes a part of the tokens, with or without sequence parallelism.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(self, config: DecoderConfig, groups: ExpertGroups, device: torch.device | str) -> None:
        super().__init__()
        assert config.moe.num_experts is not None
        self.config, self.groups = config, groups
        self.router = ExpertRouter(config, groups, device)
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        if config.moe.moe_latent_size is not None:
            # A tensor-parallel rank projects the tokens that it routes.
            make = partial(ReplicatedLinear, is_split=True, has_bias=config.add_bias_linear)
            hidden, latent, output_std = config.hidden_size, config.moe.moe_latent_size, config.output_init_method_std
            self.fc1_latent_proj = make(config, hidden, latent, groups.tp, device)
            self.fc2_latent_proj = make(config, latent, hidden, groups.tp, device, init_std=output_std)
        self.experts = GroupedExperts(config, groups, device)
        has_shared = config.moe.moe_shared_expert_intermediate_size is not None
        self.shared_experts = SharedExperts(config, groups.tp, device) if has_shared else None
        self.has_norms = config.moe.moe_expert_norms
        if self.has_norms:
            # A tensor-parallel rank normalizes the tokens that it routes, and the shared expert's output.
            self.pre_experts_layernorm = make_norm(config, groups.tp, device, partial_gradient=True)
            self.post_experts_layernorm = make_norm(config, groups.tp, device, partial_gradient=True)
            self.post_shared_experts_layernorm = make_norm(config, groups.tp, device)
        self.recomputes_shared = "shared_experts" in config.recomputed_modules
        deepep = deepep_dispatcher(config, groups, device) if config.moe.asks_for_deepep else None
        kind = AllGatherDispatcher if config.moe.moe_token_dispatcher_type == "allgather" else AllToAllDispatcher
        self.dispatch: TokenDispatcher = deepep or kind(config.moe.num_experts, groups)

    def forward(
        self, x: torch.Tensor, padding_mask: torch.Tensor | None = None, stream: torch.Tensor | None = None
    ) -> LayerOutput:
        """Return the sum of the experts' outputs, and the router's auxiliary losses.

        Padding, where ``padding_mask`` is True, is not routed, uses no capacity, and is excluded from losses and
        counts. It still passes the shared expert. Experts with norms read ``stream``, the residual stream.

        Shapes: ``padding_mask: [b, s]`` of the whole sequences, ``stream`` as ``x``.
        """
        tp, is_cut = self.groups.tp, self.config.sequence_parallel
        routed = x
        if self.has_norms:
            assert stream is not None, "experts with norms read the residual stream"
            routed = stream
        flat, batch_size = routed.reshape(-1, x.shape[-1]), x.shape[1]
        if is_cut or tp.size == 1:
            rows = TokenRows(len(flat), len(flat) * tp.size, batch_size, tp.rank * len(flat), padding_mask)
            own = flat
        else:
            num_rows = -(-len(flat) // tp.size)
            rows = TokenRows(num_rows, len(flat), batch_size, tp.rank * num_rows, padding_mask)
            num_empty = num_rows * tp.size - len(flat)
            whole = F.pad(flat, (0, 0, 0, num_empty)) if num_empty else flat
            own = scatter_to_sequence_parallel_region(whole, tp)
        routing = self.router(own, rows)
        if self.has_norms:
            own = self.pre_experts_layernorm(own)
        if self.fc1_latent_proj is not None:
            own = self.fc1_latent_proj(own)
        shared: list[torch.Tensor] = []

        def meanwhile() -> None:
            if self.shared_experts is not None:
                with torch.set_grad_enabled(grad_enabled):
                    is_again = self.recomputes_shared and self.training
                    shared.append((recompute(self.shared_experts, x) if is_again else self.shared_experts(x)).hidden)

        grad_enabled = torch.is_grad_enabled()
        overlaps = self.config.moe.moe_shared_expert_overlap
        late: LateGradients | None = [] if self.dispatch.exchanges_rows else None
        capacity, most = self._padding(rows)
        experts = partial(self.experts, late=late)
        output = self.dispatch(
            *(own, routing, experts if most is None else partial(self._run_padded, most, experts)),
            meanwhile if overlaps else _nothing,
            capacity=capacity,
            takes_row_ends=most is None and self.experts.takes_row_ends(own),
            late=late,
        )
        if not overlaps:
            meanwhile()
        if self.fc2_latent_proj is not None:
            output = self.fc2_latent_proj(output)
        if self.has_norms:
            output = self.post_experts_layernorm(output)
            shared[0] = self.post_shared_experts_layernorm(shared[0])
        if not (is_cut or tp.size == 1):
            output = gather_copies(output, tp)[: len(flat)]
        output = output.view_as(x)
        return LayerOutput(output + shared[0] if shared else output, routing.losses)

    def _padding(self, rows: TokenRows) -> tuple[int | None, int | None]:
        """Return the rows that each rank sends to each expert, or the rows to which each expert pads what it receives.

        Both are None without padding. TP and CP ranks share the capacity, so sending rows of padding would multiply
        their communication, and in an evaluation ranks may have different numbers of tokens.
        """
        if not self.config.moe.moe_pad_expert_input_to_capacity:
            return None, None
        capacity = expert_capacity(rows.num_tokens * self.groups.cp.size, self.config.moe)
        assert capacity is not None
        capacity, size = min(capacity, rows.num_rows), self.groups.model.size
        is_of_one_rank = self.groups.tensor_size * self.groups.tp.size * self.groups.cp.size == 1
        sends_padding = self.dispatch.sends_padding and is_of_one_rank and self.training
        if capacity and (size == 1 or sends_padding):
            return capacity, None
        return None, size * capacity

    def _run_padded(
        self,
        most: int,
        experts: Experts,
        x: torch.Tensor,
        counts: Groups,
        order: RowOrder | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(counts, RowCounts), "the dispatcher reads the counts"
        times = counts.on_device
        assert times is not None
        # Offset of each expert's rows in the padded tensor relative to the packed tensor.
        moved = most * torch.arange(len(counts), device=x.device) + times - times.cumsum(0)
        filled = RowCounts([most] * len(counts), torch.full_like(times, most), are_equal=True)

        def run(rows: torch.Tensor) -> torch.Tensor:
            places = torch.arange(len(rows), device=x.device) + moved.repeat_interleave(times, output_size=len(rows))
            padded = rows.new_zeros(most * len(counts), rows.shape[1]).index_copy(0, places, rows)
            return experts(padded, filled).index_select(0, places)

        return run_in_order(run, x, order, weights)


def _nothing() -> None:
    """Do nothing while tokens are in transit."""


def loads_of(models: Sequence[nn.Module], config: DecoderConfig, state: ParallelState) -> ExpertLoads | None:
    """Return the load counter of a model's experts, of which this rank has a part; None without MoE layers."""
    numbers = range(config.num_layers + config.mtp.mtp_depth)
    layers = [number for number in numbers if config.has_experts(number)]
    if not layers:
        return None
    routers = {
        int(name.split(".")[name.split(".").index("layers") + 1])
        + (config.num_layers if "mtp" in name.split(".") else 0): module.router
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, ExpertLayer)
    }
    return ExpertLoads(dict(routers), layers, config.moe, state)
