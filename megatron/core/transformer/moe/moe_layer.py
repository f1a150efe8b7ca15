"""megatron-core's MoE layer, made of a router, a token dispatcher and experts, which specifications choose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.model_parallel_config import reject_unsupported
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_state import resolve_group
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer import ModuleSpec, TransformerConfig, build_module
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS, MoETokenDispatcher


@dataclass
class MoESubmodules:
    """Classes or specifications of the parts of an MoE layer; there may be no shared experts."""

    experts: ModuleSpec | type | None = None
    shared_experts: ModuleSpec | type | None = None
    router: Any = TopKRouter


class BaseMoELayer(ABC, nn.Module):
    """An MoE layer's groups and the numbers of this rank's experts.

    Raises:
        AssertionError: the experts cannot be distributed evenly.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        assert config.num_moe_experts is not None
        self.config, self.layer_number = config, layer_number
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.ep_group, self.attn_tp_group = groups.ep, groups.tp
        ep = resolve_group(groups.ep, "ep")
        assert config.num_moe_experts % ep.size == 0, (
            f"num_moe_experts {config.num_moe_experts} is not divisible by the expert-parallel size {ep.size}"
        )
        self.num_local_experts = config.num_moe_experts // ep.size
        first = ep.rank * self.num_local_experts
        self.local_expert_indices = list(range(first, first + self.num_local_experts))
        self.use_shared_expert = config.moe_shared_expert_intermediate_size is not None
        self.shared_expert_overlap = config.moe_shared_expert_overlap
        self.router: Any = None
        self.experts: Any = None
        self.shared_experts: Any = None
        self.token_dispatcher: MoETokenDispatcher

    @abstractmethod
    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Return the layer's output."""

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number, from 1, under which auxiliary losses are tracked."""
        self.layer_number = layer_number
        self.router.set_layer_number(layer_number)


class MoELayer(BaseMoELayer):
    """Route each token to its top-k experts, and sum their weighted outputs and the shared experts' output.

    With tensor parallelism each rank's tokens are a part of the sequence (sequence parallelism).

    Shapes: ``[s, b, h] -> [s, b, h]``, and None: the layer has no bias of its own.

    Raises:
        ValueError: ``config.moe_token_dispatcher_type`` is unknown; at forward, training with tensor parallelism but
            without sequence parallelism.
        ConfigurationError: projections to a latent size or offloading of activations are configured.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, layer_number, groups)
        assert submodules is not None, "an MoE layer needs submodules; take them from get_gpt_layer_local_spec"
        assert submodules.experts is not None, "the submodules have no experts"
        reject_unsupported(config, "moe_latent_size", "fine_grained_activation_offloading")
        self.submodules = submodules
        self.moe_layer_recompute = "moe" in config.recomputed_modules
        self.shared_experts_recompute = "shared_experts" in config.recomputed_modules
        self.router = submodules.router(config=config, pg_collection=groups)
        if layer_number is not None:
            self.router.set_layer_number(layer_number)
        kind = config.moe_token_dispatcher_type
        if kind not in DISPATCHERS:
            raise ValueError(f"Unsupported token dispatcher type: {kind}; use one of {', '.join(DISPATCHERS)}")
        self.token_dispatcher = DISPATCHERS[kind](self.num_local_experts, self.local_expert_indices, config, groups)
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        if self.use_shared_expert:
            assert submodules.shared_experts is not None, "the submodules have no shared_experts"
            self.shared_experts = build_module(
                submodules.shared_experts, config=config, pg_collection=groups, gate=config.moe_shared_expert_gate
            )
            if self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the routing map of the tokens."""
        probs, routing_map = self.router(hidden_states, padding_mask)
        return probs, routing_map

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows to dispatch, their weights, and the layer's input, which the shared experts process."""
        rows, weights = self.token_dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)
        return rows, weights, hidden_states

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the rows to the ranks of their experts."""
        return self.token_dispatcher.token_dispatch(hidden_states, probs)

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the shared experts' output; None without them, or if the dispatcher runs them."""
        if self.shared_experts is None or self.shared_expert_overlap:
            return None
        if self.shared_experts_recompute:
            output: torch.Tensor = checkpoint(self.shared_experts, False, hidden_states)
        else:
            output = self.shared_experts(hidden_states)
        return output

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run this rank's experts, and return their outputs in the order in which they are sent back."""
        rows, counts, weights = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        output, bias = self.experts(rows, counts, weights)
        assert bias is None, "the experts add their biases"
        return self.token_dispatcher.combine_preprocess(output), bias

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Send the outputs back, and return the sum of each token's outputs."""
        return self.token_dispatcher.combine_postprocess(self.token_dispatcher.token_combine(output))

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Add the shared experts' output."""
        return output if shared_expert_output is None else output + shared_expert_output

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the sum of the experts' outputs, and no bias.

        Padding, where ``padding_mask`` is True, is excluded from auxiliary losses and counts.

        Shapes: ``hidden_states: [s, b, h]``, ``padding_mask: [b, s]``.
        """
        assert intermediate_tensors is None, "CUDA graphs of a part of the layer are not supported"
        if self.training and resolve_group(self.attn_tp_group).size > 1 and not self.config.sequence_parallel:
            raise ValueError(
                "sequence_parallel is False with tensor parallelism in training; set it to True, because each rank "
                "must route its own tokens"
            )
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()

        def compute(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            shared = self.shared_experts_compute(x)
            probs, routing_map = self.route(x, mask)
            rows, weights, _ = self.preprocess(x, probs, routing_map)
            output, _ = self.routed_experts_compute(*self.dispatch(rows, weights))
            return self.postprocess(self.combine(output), shared)

        if self.moe_layer_recompute:
            output: torch.Tensor = checkpoint(compute, False, hidden_states, padding_mask)
        else:
            output = compute(hidden_states, padding_mask)
        return output, None

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Do nothing: weight gradients are computed in the backward pass."""
