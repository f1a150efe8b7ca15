"""The router: expert scores from hidden states, top-k choices, capacity and auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.collectives import all_gather_first_dim
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.ops import DropoutKeys
from megatron.core.parallel_state import ExpertGroups
from megatron.core.precision import dtype_from_name
from megatron.core.sharding import ParamSpec, full_shards
from megatron.core.tensor_parallel import make_parameter, replicated_spec
from megatron.core.transformer import DecoderConfig, Norm, make_norm, require_keys
from megatron.core.transformer.moe.load_balancing import BiasedRouter, ExpertTokenCounts, router_losses
from megatron.core.transformer.moe.routing import (
    ROUTER_DTYPES,
    TokenRows,
    choose_experts,
    expert_capacity,
    kept_choices,
)


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts of each token and their weights; a dropped choice has the index ``num_experts`` and the weight 0.

    The weights have the dtype of the hidden states, or the dtype of the scores if --moe-router-dtype is given.
    ``may_drop`` is False only if no choice is dropped.

    Shapes: ``indices, weights: [n, k]``.
    """

    indices: torch.Tensor
    weights: torch.Tensor
    losses: tuple[AuxiliaryLoss, ...]
    may_drop: bool = True


class ExpertRouter(BiasedRouter):
    """Choose the experts of each token and count the choices; in training also compute the auxiliary losses.

    The weight is replicated. Each rank has the gradient of its own tokens. Scores are computed in at least float32. The
    expert bias has no gradient: it is updated after each step. If configured, the input is normalized and multiplied by
    ``input_scale``, and the weights of the choices by ``expert_scale``.

    With random routing in training, ``keys`` and ``layer_number`` determine the random numbers, and their gradient is
    passed to the logits (straight-through).
    """

    def __init__(self, config: DecoderConfig, groups: ExpertGroups, device: torch.device | str) -> None:
        super().__init__()
        assert config.moe.num_experts is not None
        self.config, self.groups, self.num_experts = config, groups, config.moe.num_experts
        self.tally = ExpertTokenCounts()
        self.keys: DropoutKeys | None = None
        self.layer_number = 0
        dtype = dtype_from_name(config.params_dtype)
        self.product_dtype = (
            dtype if config.moe.moe_router_dtype is None else ROUTER_DTYPES[config.moe.moe_router_dtype]
        )
        self.product_dtype = torch.promote_types(self.product_dtype, dtype)
        shape = (self.num_experts, config.hidden_size)
        spec = replicated_spec("weight", shape, groups.tp, partial_gradient=True, std=config.init_method_std)
        self.weight = make_parameter(shape, spec, dtype, device)
        self.bias: nn.Parameter | None = None
        if config.add_bias_linear:
            # Initialized like the weight, as in Megatron.
            of_bias = replicated_spec("bias", shape[:1], groups.tp, partial_gradient=True, std=config.init_method_std)
            self.bias = make_parameter(shape[:1], of_bias, dtype, device)
        self.norm: Norm | None = None
        self.input_scale = self.expert_scale = None
        if config.moe.moe_router_norm:
            of_scale = replicated_spec("input_scale", shape[1:], groups.tp, partial_gradient=True, mean=1.0)
            self.input_scale = make_parameter(shape[1:], of_scale, dtype, device)
            self.norm = make_norm(config, groups.tp, device, parameters=())
        if config.moe.moe_router_expert_scale:
            of_experts = replicated_spec("expert_scale", shape[:1], groups.tp, partial_gradient=True, mean=1.0)
            self.expert_scale = make_parameter(shape[:1], of_experts, dtype, device)
        self.expert_bias = None
        if config.moe.moe_router_enable_expert_bias:
            copies = ParamSpec(
                "expert_bias",
                shape[:1],
                full_shards(shape[:1]),
                replicated_axes=("tp",) if groups.tp.size > 1 else (),
                replica_index=groups.tp.rank,
                num_replicas=groups.tp.size,
            )
            self.expert_bias = make_parameter(shape[:1], copies, torch.promote_types(dtype, torch.float32), device)
            self.expert_bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, rows: TokenRows) -> Routing:
        """Return the choices of this rank's rows; empty rows and padding have none.

        Shapes: ``x: [n, h]``.

        Raises:
            ConfigurationError: random routing is configured, and ``keys`` is None.
        """
        dtype = self.product_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        num_empty = rows.num_rows - rows.num_real
        # The gradient of a slice is a copy.
        x = x[: rows.num_real] if num_empty else x
        if self.norm is not None and self.input_scale is not None:
            x = self.norm(x) * self.input_scale * x.shape[-1] ** -0.5
        logits = F.linear(x.to(dtype), self.weight.to(dtype), bias)
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        if self.config.routes_at_random and self.training:
            tokens = slice(rows.first, rows.first + rows.num_real)
            drawn = require_keys(self.keys).of_router(self.layer_number, self.num_experts, tokens)
            logits = drawn + (logits - logits.detach())
        indices, weights = choose_experts(logits, self.config.moe, self.expert_bias)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale.to(weights.dtype)[indices]
        local_padding_mask = rows.local_padding_mask(self.groups.cp, x.device)
        if local_padding_mask is not None:
            indices = indices.masked_fill(local_padding_mask.unsqueeze(1), self.num_experts)
            weights = weights.masked_fill(local_padding_mask.unsqueeze(1), 0.0)
        if num_empty:
            indices = F.pad(indices, (0, 0, 0, num_empty), value=self.num_experts)
            weights = F.pad(weights, (0, 0, 0, num_empty))
        capacity = expert_capacity(rows.num_tokens * self.groups.cp.size, self.config.moe)
        if capacity is not None:
            is_kept = self._kept(indices, weights, rows, capacity)
            indices, weights = indices.masked_fill(~is_kept, self.num_experts), weights * is_kept
        losses: tuple[AuxiliaryLoss, ...] = ()
        if self.training and torch.is_grad_enabled():
            self.tally.add(indices[: rows.num_real], self.num_experts, local_padding_mask)
            losses = router_losses(logits, rows, local_padding_mask, self.config.moe, self.groups, self.tally)
        if self.config.moe.moe_router_dtype is None:
            weights = weights.to(x.dtype)
        may_drop = capacity is not None or local_padding_mask is not None or num_empty > 0
        return Routing(indices, weights, losses, may_drop)

    @torch.no_grad()
    def _kept(self, indices: torch.Tensor, weights: torch.Tensor, rows: TokenRows, capacity: int) -> torch.Tensor:
        """Return which choices of this rank fit the capacity, which applies to the whole micro-batch."""
        positions = F.pad(rows.positions(self.groups.cp, indices.device), (0, rows.num_rows - rows.num_real), value=-1)
        for group in (self.groups.tp, self.groups.cp):
            indices, weights, positions = (
                all_gather_first_dim(tensor, group) for tensor in (indices, weights, positions)
            )
        policy = self.config.moe.moe_token_drop_policy
        is_kept = kept_choices(indices, weights, positions, self.num_experts + 1, capacity, policy)
        first = (self.groups.cp.rank * self.groups.tp.size + self.groups.tp.rank) * rows.num_rows
        return is_kept[first : first + rows.num_rows]
