"""megatron-core's routers, which return weights and routing maps and attach auxiliary losses to the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from megatron.core.layer_output import MoEAuxLossAutoScaler
from megatron.core.model_parallel_config import reject_unsupported
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.load_balancing import LOSS_NAMES, Z_LOSS
from megatron.core.transformer.moe.moe_utils import (
    apply_random_logits,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_default_pg_collection,
    get_tokens_per_expert_and_token_count,
    router_gating_linear,
    save_to_aux_losses_tracker,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)
from megatron.core.transformer.moe.routing import ROUTER_DTYPES, sinkhorn


class Router(ABC, nn.Module):
    """A linear layer from hidden states to a logit per expert, and the choice of experts, which a subclass defines."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__()
        assert config.num_moe_experts is not None
        self.config = config
        self.num_experts = config.num_moe_experts
        self.layer_number: int | None = None
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.tp_group, self.cp_group, self.tp_cp_group = groups.tp, groups.cp, groups.tp_cp
        self.tp_dp_cp_group = groups.tp_dp_cp
        self.calculate_per_token_loss = config.calculate_per_token_loss
        self.weight = nn.Parameter(torch.empty((self.num_experts, config.hidden_size), dtype=torch.float32))
        self.bias: nn.Parameter | None = None
        if config.add_bias_linear:
            self.bias = nn.Parameter(torch.empty(self.num_experts, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight and the bias from ``config.init_method``, and convert them to ``config.params_dtype``."""
        for parameter in (self.weight, self.bias):
            if parameter is None:
                continue
            if self.config.perform_initialization:
                assert self.config.init_method is not None
                self.config.init_method(parameter)
            parameter.data = parameter.data.to(self.config.params_dtype)
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits, in ``config.moe_router_dtype`` if it is set. Shapes: ``[..., h] -> [..., experts]``."""
        for parameter in (self.weight, self.bias):
            if parameter is not None and parameter.device != input.device:
                parameter.data = parameter.data.to(input.device)
        name = self.config.moe_router_dtype
        return router_gating_linear(input, self.weight, self.bias, input.dtype if name is None else ROUTER_DTYPES[name])

    @abstractmethod
    def routing(self, logits: torch.Tensor) -> Any:
        """Return the weights and the routing map of the logits."""

    @abstractmethod
    def forward(self, input: torch.Tensor) -> Any:
        """Return the weights and the routing map of hidden states."""

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number, from 1, under which auxiliary losses are tracked."""
        self.layer_number = layer_number


class TopKRouter(Router):
    """Send each token to the ``config.moe_router_topk`` experts with the best scores.

    In training, backward passes through the weights also start from the auxiliary losses of the configuration, which
    are tracked for the log. With an expert bias ``local_tokens_per_expert`` counts the choices until the bias is
    updated.

    Raises:
        ConfigurationError: replay of routing decisions, or an option that megatron-core has removed, is configured.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        reject_unsupported(config, "moe_enable_routing_replay", "moe_router_topk_limited_devices", "moe_token_dropping")
        self.topk = config.moe_router_topk
        self.routing_type = config.moe_router_load_balancing_type
        self.score_function = config.moe_router_score_function
        self.enable_expert_bias = config.moe_router_enable_expert_bias
        self.local_tokens_per_expert: torch.Tensor | None = None
        self.expert_bias: torch.Tensor | None = None
        self.global_tokens_per_expert: torch.Tensor | None = None
        self.ga_steps: torch.Tensor | None = None
        if self.enable_expert_bias:
            zeros = torch.zeros(self.num_experts, dtype=torch.float32)
            del self.local_tokens_per_expert, self.expert_bias
            self.register_buffer("local_tokens_per_expert", zeros, persistent=False)
            self.register_buffer("expert_bias", zeros.clone())
        if self.get_aux_loss_coeff("global_aux_loss") > 0:
            del self.global_tokens_per_expert, self.ga_steps
            self.register_buffer("global_tokens_per_expert", torch.zeros(self.num_experts), persistent=False)
            self.register_buffer("ga_steps", torch.tensor(0.0), persistent=False)

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return the coefficient of an auxiliary loss, such as ``seq_aux_loss``; 0 if it is not configured."""
        kinds, coefficients = self.routing_type, self.config.moe_aux_loss_coeff
        if isinstance(kinds, str):
            assert not isinstance(coefficients, list), f"one routing type has {coefficients} as moe_aux_loss_coeff"
            return coefficients if kinds == aux_loss_type else 0.0
        assert isinstance(coefficients, list), "moe_aux_loss_coeff must be a list, as moe_router_load_balancing_type is"
        return dict(zip(kinds, coefficients)).get(aux_loss_type, 0.0)

    def is_aux_loss_enabled(self) -> bool:
        """Return whether a load-balancing loss has a coefficient above 0."""
        return any(self.get_aux_loss_coeff(kind) > 0 for kind in LOSS_NAMES)

    def sinkhorn_load_balancing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and routing map; in training the choices are balanced by Sinkhorn's algorithm.

        Shapes: ``[n, experts] -> [n, experts]``, twice.
        """
        assert self.config.moe_aux_loss_coeff == 0, "Sinkhorn routing does not support auxiliary losses"
        scores = logits.sigmoid() if self.topk == 1 else logits.softmax(dim=-1, dtype=torch.float32).type_as(logits)
        with torch.no_grad():
            ranked = sinkhorn(logits.float()) if self.training else scores
            indices = ranked.topk(self.topk, dim=1).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
        return scores * routing_map, routing_map

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, from which backward passes in training also start the router's z-loss.

        Shapes: ``logits: [n, experts]``, ``padding_mask: [n]``.
        """
        if self.config.moe_z_loss_coeff is None or not (self.training and torch.is_grad_enabled()):
            return logits
        coefficient = self.config.moe_z_loss_coeff / self.tp_cp_group.size()
        loss = z_loss_func(logits, coefficient, padding_mask)
        num_tokens = logits.shape[0] if padding_mask is None else (~padding_mask).sum()
        self._track(Z_LOSS, loss / coefficient if coefficient else loss)
        return self._attach(logits, loss, num_tokens)

    def apply_input_jitter(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input times uniform noise within ``config.moe_input_jitter_eps`` of 1, if it is set."""
        eps = self.config.moe_input_jitter_eps
        return input if eps is None else input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: Any,
        reduce_group_has_dp: bool = False,
        valid_token_count: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Track a loss without its coefficient, and return the activation with the loss attached."""
        self._track(aux_loss_name, aux_loss / aux_loss_coeff, reduce_group, reduce_group_has_dp)
        return self._attach(
            activation, aux_loss, activation.shape[0] if valid_token_count is None else valid_token_count
        )

    def _track(self, name: str, loss: torch.Tensor, reduce_group: Any = None, has_dp: bool = False) -> None:
        num_layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        save_to_aux_losses_tracker(
            name, loss, self.layer_number, num_layers, reduce_group=reduce_group, reduce_group_has_dp=has_dp
        )

    def _attach(self, activation: torch.Tensor, loss: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
        # The caller divides the gradients by the number of tokens.
        loss = loss * num_tokens if self.calculate_per_token_loss else loss
        result: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, loss)  # type: ignore[no-untyped-call]
        return result

    def _balance(
        self,
        kind: str,
        probs: torch.Tensor,
        scores: torch.Tensor,
        routing_map: torch.Tensor,
        batch_size: int,
        pads: bool,
    ) -> torch.Tensor:
        """Attach one load-balancing loss, if it has a coefficient, to the weights."""
        coefficient = self.get_aux_loss_coeff(kind)
        if not coefficient:
            return probs
        is_global, topk = kind == "global_aux_loss", self.topk
        group = self.tp_dp_cp_group if is_global else self.tp_cp_group
        if kind == "seq_aux_loss":
            # The experts of each sequence are counted apart; every position has topk choices in each of them.
            scores, routing_map = (each.reshape(len(each) // batch_size, -1) for each in (scores, routing_map))
            topk *= batch_size
        tokens, num_local, num_tokens = get_tokens_per_expert_and_token_count(routing_map, group, topk, pads)
        if is_global:
            assert self.global_tokens_per_expert is not None
            assert self.ga_steps is not None
            self.global_tokens_per_expert += tokens
            self.ga_steps += 1
            tokens = self.global_tokens_per_expert / self.ga_steps
        loss = switch_load_balancing_loss_func(scores, tokens, num_tokens, self.topk, self.num_experts, coefficient)
        if kind == "seq_aux_loss":
            loss = loss / batch_size
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, LOSS_NAMES[kind], group, is_global, valid_token_count=num_local
        )

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's weights and the routing map.

        Padding, where ``padding_mask`` is True, is excluded from losses and counts.

        Shapes: ``logits: [s, b, experts]``, ``padding_mask: [s, b] -> [s * b, experts]``, twice.
        """
        config, batch_size = self.config, logits.shape[1]
        logits = logits.reshape(-1, self.num_experts)
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask)
        if self.routing_type == "sinkhorn":
            probs, routing_map = self.sinkhorn_load_balancing(logits)
        else:
            probs, routing_map = topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                scaling_factor=config.moe_router_topk_scaling_factor,
                score_function=self.score_function,
                expert_bias=self.expert_bias,
            )
        if config.moe_expert_capacity_factor is not None:
            probs, routing_map = apply_router_token_dropping(
                probs,
                routing_map,
                router_topk=self.topk,
                capacity_factor=config.moe_expert_capacity_factor,
                drop_policy=config.moe_token_drop_policy,
                pad_to_capacity=config.moe_pad_expert_input_to_capacity,
            )
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            counted, scores = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function, padding_mask=padding_mask
            )
            for kind in LOSS_NAMES:
                probs = self._balance(kind, probs, scores, counted, batch_size, padding_mask is not None)
        if self.enable_expert_bias and torch.is_grad_enabled():
            assert self.local_tokens_per_expert is not None
            real = routing_map if padding_mask is None else routing_map & ~padding_mask.unsqueeze(-1)
            self.local_tokens_per_expert += real.sum(dim=0)
        return probs, routing_map

    def reset_global_aux_loss_tracker(self) -> None:
        """Reset the counts of the global load-balancing loss; call it after each step."""
        if self.global_tokens_per_expert is not None and self.ga_steps is not None:
            self.global_tokens_per_expert.zero_()
            self.ga_steps.zero_()

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's weights and the routing map.

        Shapes: ``input: [s, b, h]``, ``padding_mask: [s, b] -> [s * b, experts]``, twice.
        """
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            # A conversion of the whole model would round the small updates away.
            self.expert_bias.data = self.expert_bias.data.float()
        logits = self.gating(self.apply_input_jitter(input))
        if self.config.moe_router_force_load_balancing:
            logits = apply_random_logits(logits)
        return self.routing(logits, padding_mask)
