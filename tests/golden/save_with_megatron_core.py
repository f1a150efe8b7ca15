"""Write a small checkpoint of experts with megatron-core's own classes; run by torchrun where the package is installed.

Arguments: the folder, and what the model, its layout and its optimizer are, each as ``name=value`` (see `Case`). The
optimizer steps twice on random gradients. Both formats of Megatron are written, each in a folder of its own.
"""

from __future__ import annotations

import ast
import datetime
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil  # noqa: F401 without it the processes that megatron-core writes with fail, and it waits for them forever
import torch
import torch.distributed as dist
from load_with_megatron_core import without_cuda

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

ITERATION = 2


@dataclass
class Case:
    """Say what is written; the names are those of the command line."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    precision: str = "float32"
    distributed: bool = False
    sharding: str = "fully_reshardable"
    singleton: bool = False
    dense_layers: int = 0
    bias: bool = False
    latent: bool = False
    mtp: int = 0
    gate: bool = False


def config_of(case: Case) -> TransformerConfig:
    """Return megatron-core's configuration of a case."""
    is_half = case.precision == "bfloat16"
    dtype = torch.bfloat16 if is_half else torch.float32
    kind = MLATransformerConfig if case.latent else TransformerConfig
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "rope_type": "rope",
        "qk_layernorm": True,
    }
    return kind(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        kv_channels=4,
        use_cpu_initialization=True,
        perform_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=case.bias,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=is_half,
        sequence_parallel=False,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp or case.tp,
        num_moe_experts=4,
        moe_ffn_hidden_size=8,
        moe_layer_freq=[0] * case.dense_layers + [1] * (2 - case.dense_layers) if case.dense_layers else 1,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=True,
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=None if case.bias else 12,
        moe_shared_expert_gate=case.gate,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        mtp_num_layers=case.mtp or None,
        **(latent if case.latent else {}),
    )


def arguments_of(case: Case, config: TransformerConfig, world_size: int, kind: str) -> Namespace:
    """Return the ``args`` that Megatron-LM would have saved, those that matter."""
    dp = world_size // (case.tp * case.pp)
    values: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "add_bias_linear"),
            *("normalization", "layernorm_epsilon", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("sequence_parallel", "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_ffn_hidden_size"),
            *("moe_layer_freq", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
            *("moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
            *("moe_token_dispatcher_type", "moe_router_load_balancing_type", "mtp_num_layers", "params_dtype", "bf16"),
            "multi_latent_attention",
        )
    }
    if case.latent:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
        values |= {name: getattr(config, name) for name in (*names, "qk_layernorm", "rotary_scaling_factor")}
    values |= {
        "norm_epsilon": config.layernorm_epsilon,
        "num_experts": config.num_moe_experts,
        "swiglu": True,
        "fp16": False,
        "group_query_attention": False,
        "num_query_groups": 4,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "max_position_embeddings": 16,
        "seq_length": 16,
        "padded_vocab_size": 32,
        "make_vocab_size_divisible_by": 8,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 31,
        "world_size": world_size,
        "data_parallel_size": dp,
        "use_distributed_optimizer": case.distributed,
        "transformer_impl": "local",
        "moe_grouped_gemm": False,
        "ckpt_format": kind,
        "optimizer": "adam",
        "lr": 1e-2,
        "min_lr": 1e-2,
        "micro_batch_size": 1,
        "global_batch_size": dp,
        "train_iters": 10,
        "consumed_train_samples": ITERATION * dp,
        "consumed_valid_samples": 0,
        "add_position_embedding": True,
    }
    return Namespace(**values)


def chunk_of(case: Case, config: TransformerConfig) -> GPTModel:
    """Return this rank's part of the model."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if case.mtp else None
    return GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=further if parallel_state.is_pipeline_last_stage() else None,
    )


def train(case: Case, model: GPTModel, config: TransformerConfig) -> Any:
    """Return the optimizer after two steps on random gradients."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed, grad_reduce_in_fp32=case.precision == "bfloat16"
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-2,
        bf16=case.precision == "bfloat16",
        params_dtype=config.params_dtype,
        use_distributed_optimizer=case.distributed,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    of_copies = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    of_parts = torch.Generator().manual_seed(200 + dist.get_rank())
    for _ in range(ITERATION):
        wrapped.zero_grad_buffer()
        for parameter in wrapped.parameters():
            generator = of_parts if getattr(parameter, "tensor_model_parallel", False) else of_copies
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        wrapped.finish_grad_sync()
        optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]  # as the scheduler does
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.arange(4) / 8 - 0.1)
    return optimizer


def scheduler_state() -> dict[str, Any]:
    """Return the state of Megatron's scheduler."""
    return {
        "max_lr": 1e-2,
        "lr_warmup_steps": 0,
        "num_steps": ITERATION,
        "lr_decay_style": "constant",
        "lr_decay_steps": 10,
        "min_lr": 1e-2,
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }


def save_torch(folder: Path, case: Case, arguments: Namespace, model: GPTModel, optimizer: Any) -> None:
    """Write the files of Megatron's format ``torch``: one folder for each model-parallel rank."""
    place = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if case.pp > 1:
        place += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if case.ep > 1:
        place += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    target = folder / place
    target.mkdir(parents=True, exist_ok=True)
    if case.distributed:
        optimizer.save_parameter_state(str(target / "distrib_optim.pt"))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        state = {
            "args": arguments,
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": scheduler_state(),
            "num_floating_point_operations_so_far": 0.0,
        }
        torch.save(state, target / "model_optim_rng.pt")


def save_torch_dist(folder: Path, case: Case, arguments: Namespace, model: GPTModel, optimizer: Any) -> None:
    """Write the files of Megatron's format ``torch_dist``."""
    metadata: dict[str, Any] = {"singleton_local_shards": case.singleton, "chained_optim_avoid_prefix": True}
    if case.distributed:
        metadata["distrib_optim_sharding_type"] = case.sharding
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = model.sharded_state_dict(metadata={**metadata, **groups})
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata={**metadata, **groups}),
        "opt_param_scheduler": scheduler_state(),
        "num_floating_point_operations_so_far": 0.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1), content_metadata=metadata)


def let_latent_attention_be_built() -> None:
    """Let the local layers of megatron-core have latent attention; nothing is computed with it."""
    plain = DotProductAttention.__init__

    def without_widths(self: Any, *values: Any, k_channels: Any = None, v_channels: Any = None, **more: Any) -> None:
        plain(self, *values, **more)

    DotProductAttention.__init__ = without_widths
    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        setattr(multi_latent_attention, name, type(name, (), {}))


def case_of(words: Sequence[str]) -> Case:
    """Return the case that ``name=value`` words describe."""
    kinds = {field.name: field.type for field in fields(Case)}
    given = dict(word.split("=") for word in words)
    return Case(**{name: text if kinds[name] == "str" else ast.literal_eval(text) for name, text in given.items()})


def main(folder: str, *words: str) -> None:
    """Write the case that the words describe, in both formats."""
    without_cuda()
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    case = case_of(words)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp or case.tp,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(7)
    config = config_of(case)
    if case.latent:
        let_latent_attention_be_built()
    model = chunk_of(case, config)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    if case.precision == "bfloat16":
        model = model.bfloat16()
        for buffer in biases:
            buffer.data = buffer.data.float()
    optimizer = train(case, model, config)
    for kind, save in (("torch", save_torch), ("torch_dist", save_torch_dist)):
        arguments = arguments_of(case, config, int(os.environ["WORLD_SIZE"]), kind)
        save(Path(folder) / kind / f"iter_{ITERATION:07d}", case, arguments, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
