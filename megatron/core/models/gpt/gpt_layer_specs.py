"""megatron-core's specifications of GPT layers, of which the MLP and the MoE layer can be built.

The framework's own models (`GPTModel`, `GPT.build`) are not built of specifications.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLP, MLPSubmodules, ModuleSpec
from megatron.core.transformer.moe import GroupedMLP, MoELayer, MoESubmodules, SequentialMLP, SharedExpertMLP


@dataclass
class LayerSubmodules:
    """Specifications of a layer's parts."""

    mlp: ModuleSpec


class LayerOfSpec(nn.Module):
    """A whole GPT layer, which cannot be built of a specification.

    Raises:
        RuntimeError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "a whole GPT layer cannot be built of a specification; build its part submodules.mlp, or a model with "
            "megatron.core.models.gpt.GPTModel"
        )


def get_mlp_module_spec(
    use_te: bool | None = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    use_te_op_fuser: bool | None = False,
) -> ModuleSpec:
    """Return the specification of an MLP, or with ``num_experts`` of an MoE layer.

    The linear layers are this framework's. ``moe_grouped_gemm`` selects `GroupedMLP` instead of `SequentialMLP`.

    Raises:
        RuntimeError: ``use_te`` is set: Transformer Engine's layers are not used.
    """
    if use_te:
        raise RuntimeError("specifications with Transformer Engine's layers are not supported; pass use_te=False")
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if num_experts is None:
        return ModuleSpec(module=MLP, submodules=linears)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    if moe_grouped_gemm:
        experts = ModuleSpec(module=GroupedMLP)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    use_kitchen: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
) -> ModuleSpec:
    """Return the specification of a layer, of which ``submodules.mlp`` can be built.

    Raises:
        RuntimeError: ``use_kitchen`` or ``use_kitchen_attention`` is set.
    """
    if use_kitchen or use_kitchen_attention:
        raise RuntimeError("use_kitchen and use_kitchen_attention are not supported; leave them at False")
    mlp = get_mlp_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm)
    return ModuleSpec(module=LayerOfSpec, submodules=LayerSubmodules(mlp=mlp))
