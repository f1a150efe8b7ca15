"""Print the parameters of megatron-core's Mamba-2, gated delta-net and latent experts as JSON, and sharded tensors.

Run with torchrun under an interpreter that has megatron-core 0.16.1; the last rank prints. The kernels and norms that
need a GPU are replaced, since only names and shapes are wanted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


class GroupNorm(nn.Module):
    """Stand for the norm of mamba-ssm, which is sharded."""

    sharded_axes: Mapping[str, int] = {"weight": 0}

    def __init__(self, width: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return mamba_mixer.make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.sharded_axes,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class HeadNorm(GroupNorm):
    """Stand for Transformer Engine's norm of a head, which all ranks have."""

    sharded_axes: Mapping[str, int] = {}

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size)


class DuplicatedLinear(nn.Module):
    """Stand for Transformer Engine's linear layer that all ranks have."""

    def __init__(self, input_size: int, output_size: int, *, parallel_mode: str, bias: bool, **_: Any) -> None:
        super().__init__()
        assert (parallel_mode, bias) == ("duplicated", False)
        self.weight = nn.Parameter(torch.ones(output_size, input_size))


class Tracker:
    @contextmanager
    def fork(self, *_: Any) -> Iterator[None]:
        yield


def described(module: nn.Module) -> dict[str, Any]:
    """Return (name, shape) of the parameters in order, and the key, global shape and offset of sharded tensors."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded = {}
    for value in module.sharded_state_dict(prefix="", metadata=metadata).values():
        for each in value.build() if isinstance(value, ShardedTensorFactory) else [value]:
            if isinstance(each, ShardedTensor):
                sharded[each.key] = [list(each.global_shape), list(each.global_offset)]
    return {"parameters": [[name, list(p.shape)] for name, p in module.named_parameters()], "sharded": sharded}


def latent_experts(config: TransformerConfig, linears: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Return (name, shape) of the parameters of an MoE layer with latent experts and a shared expert, in order."""
    experts = replace(
        config,
        num_moe_experts=4,
        moe_ffn_hidden_size=16,
        moe_latent_size=10,
        moe_shared_expert_intermediate_size=12,
        moe_router_load_balancing_type="none",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        sequence_parallel=True,
    )
    moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear
    of_mlp = MLPSubmodules(linear_fc1=linears["in_proj"], linear_fc2=linears["out_proj"])
    submodules = moe_layer.MoESubmodules(
        experts=ModuleSpec(SequentialMLP, submodules=of_mlp),
        shared_experts=ModuleSpec(SharedExpertMLP, submodules=of_mlp),
    )
    layer = moe_layer.MoELayer(experts, submodules, layer_number=1)
    return [(name, list(parameter.shape)) for name, parameter in layer.named_parameters()]


def main() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    for module in (mamba_mixer, gated_delta_net):
        module.get_cuda_rng_tracker = Tracker
    mamba_mixer.ExtendedRMSNorm = mamba_mixer.RMSNormGated = GroupNorm
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = gated_delta_net.HAVE_FLA = True
    torch.distributed.init_process_group("gloo")
    size = int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=24,
        num_attention_heads=4,
        mamba_state_dim=6,
        mamba_head_dim=8,
        mamba_num_groups=2,
        mamba_num_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        normalization="RMSNorm",
        tensor_model_parallel_size=size,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    groups = ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(), cp=parallel_state.get_context_parallel_group()
    )
    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    mamba = mamba_mixer.MambaMixer(
        config, mamba_mixer.MambaMixerSubmodules(**linears), d_model=24, layer_number=1, pg_collection=groups
    )
    submodules = gated_delta_net.GatedDeltaNetSubmodules(**linears, out_norm=HeadNorm)
    delta = gated_delta_net.GatedDeltaNet(config, submodules, layer_number=1, pg_collection=groups)
    found = {"mamba": described(mamba), "delta": described(delta), "experts": latent_experts(config, linears)}
    if torch.distributed.get_rank() == size - 1:
        print(json.dumps(found))


main()
