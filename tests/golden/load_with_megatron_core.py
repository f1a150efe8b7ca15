"""Load a checkpoint folder with megatron-core's own dist_checkpointing; run by an interpreter that has the package.

Arguments: the folder of an iteration, the file to write what was loaded into, and ``plain`` or ``distributed``. One
process on the CPU builds the model that ``args`` describe, asks megatron-core for its sharded state, and loads that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig


def without_cuda() -> None:
    """Let what megatron-core puts on the GPU without asking stay on the CPU."""
    tensor, kind = torch.tensor, torch.Tensor.type

    def on_cpu(*values: Any, **settings: Any) -> torch.Tensor:
        return tensor(*values, **{**settings, "device": "cpu"})

    def cuda_kind(self: torch.Tensor, *to: Any, **settings: Any) -> Any:
        found = kind(self, *to, **settings)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.tensor = on_cpu
    torch.Tensor.type = cuda_kind
    torch.cuda.current_device = lambda: "cpu"


def experts_of(args: Any) -> dict[str, Any]:
    """Return the settings of a model's experts; none where it has none."""
    if args.num_experts is None:
        return {}
    names = ("moe_router_topk", "moe_router_score_function", "moe_router_enable_expert_bias", "moe_layer_freq")
    return {
        "num_moe_experts": args.num_experts,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        **{name: getattr(args, name) for name in names},
    }


def main(folder: str, output: str, kind: str) -> None:
    """Load the folder and write weights and moments by their names in the model."""
    without_cuda()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=True)
    args = torch.load(Path(folder) / "common.pt", weights_only=False)["args"]
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        use_cpu_initialization=True,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        add_bias_linear=args.add_bias_linear,
        **experts_of(args),
    )
    spec = get_gpt_layer_local_spec(num_experts=args.num_experts)
    if args.num_experts is not None:
        # As transformer-engine's layers have it: a norm before a router is in no linear layer.
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    is_distributed = kind == "distributed"
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=is_distributed), model
    )
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=is_distributed)
    optimizer = get_megatron_optimizer(settings, [wrapped])
    inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    if is_distributed:
        inner._init_optimizer_states_with_dummy_values()
        fill = inner._set_main_param_and_optimizer_states

        def fill_all_but_step(weight: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
            # With torch's Adam the state has a step, which is loaded before and which this function then asks for.
            fill(weight, {"step": inner._get_main_param_and_optimizer_states(weight)["step"], **values})

        inner._set_main_param_and_optimizer_states = fill_all_but_step
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = {
        **dist_checkpointing.load_content_metadata(preloaded_state_dict=common),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = model.sharded_state_dict(metadata=metadata)
    sharded = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)}
    loaded = dist_checkpointing.load(sharded, folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    values: dict[str, Any] = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    values |= {f"model.{name}": bias for name, bias in model.named_buffers() if name.endswith("expert_bias")}
    for name, weight in model.named_parameters():
        state = inner._get_main_param_and_optimizer_states(weight) if is_distributed else inner.optimizer.state[weight]
        for moment in ("exp_avg", "exp_avg_sq"):
            values[f"optimizer.{moment}.{name}"] = state[moment].detach().reshape(weight.shape)
    first = inner.optimizer.param_groups[0]
    steps = first["step"] if is_distributed else next(iter(inner.optimizer.state.values()))["step"]
    torch.save({"values": values, "step": float(steps), "iteration": loaded["iteration"]}, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
