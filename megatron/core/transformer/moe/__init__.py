"""Mixture of experts (MoE): the router, token dispatchers, experts and load balancing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.transformer.moe.deepep import check_deepep, why_no_deepep
    from megatron.core.transformer.moe.expert_layer import ExpertLayer, loads_of
    from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
    from megatron.core.transformer.moe.grouped_experts import (
        GroupedExperts,
        GroupedLinear,
        expert_shards,
        grouped_linear,
    )
    from megatron.core.transformer.moe.load_balancing import ExpertLoads, LoadReport, auxiliary_loss_names
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

__getattr__ = lazy_exports(
    __name__,
    {
        "deepep": "check_deepep why_no_deepep",
        "experts": "GroupedMLP SequentialMLP",
        "grouped_experts": "GroupedExperts GroupedLinear expert_shards grouped_linear",
        "load_balancing": "ExpertLoads LoadReport auxiliary_loss_names",
        "moe_layer": "MoELayer MoESubmodules",
        "shared_experts": "SharedExpertMLP",
        "expert_layer": "ExpertLayer loads_of",
    },
)
