"""Run measured steps of megatron-core 0.16.1 on CPU: its GPT model, data-parallel wrapper, schedule and optimizer.

megatron-core asks for CUDA by name in a few places. Those names are directed to the CPU before it is imported; what it
computes is unchanged. It runs as its users have it without transformer-engine and apex: the local layer specification,
fusions that torch.compile provides, torch's AdamW (plain, or fused with ``--fused-adam``).
"""

from __future__ import annotations

# mypy: ignore-errors
# It runs against another package of the same name.
import argparse
import contextlib
import functools
import os
import re
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stopwatch import Stopwatch
from workload import Workload, add_workload_arguments, workload_of


def direct_cuda_to_cpu() -> None:
    """Let the names of CUDA devices and tensor types that megatron-core uses mean the CPU."""

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make

    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")
    # One stream, which is the current one: what is done beside it is done in its turn.
    event = types.SimpleNamespace(synchronize=lambda: None)
    stream = types.SimpleNamespace(synchronize=lambda: None, record_event=lambda: event)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args: stream
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_name


def expert_settings(workload: Workload) -> dict[str, Any]:
    """Return the settings of experts that are computed one after the other (SequentialMLP)."""
    return {
        "num_moe_experts": workload.num_experts,
        "moe_router_topk": workload.router_topk,
        "moe_ffn_hidden_size": workload.expert_width,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
    }


def build_model(workload: Workload) -> torch.nn.Module:
    """Return megatron-core's GPT with the workload's sizes."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Dropout is 0: the random streams, which exist on CUDA only, would not be drawn from.
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    is_bf16 = workload.dtype == "bfloat16"
    config = TransformerConfig(
        num_layers=workload.num_layers,
        hidden_size=workload.hidden_size,
        num_attention_heads=workload.num_attention_heads,
        tensor_model_parallel_size=workload.tensor_model_parallel_size,
        sequence_parallel=workload.sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=is_bf16,
        params_dtype=getattr(torch, workload.dtype),
        pipeline_dtype=getattr(torch, workload.dtype),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        ffn_hidden_size=workload.active_width,
        gated_linear_unit=workload.is_gated,
        activation_func=torch.nn.functional.silu if workload.is_gated else torch.nn.functional.gelu,
        add_bias_linear=not workload.is_gated,
        **(expert_settings(workload) if workload.num_experts else {}),
    )
    if workload.num_experts:
        from megatron.core.transformer.moe import moe_utils

        # Without transformer-engine this name is asked for and missing.
        moe_utils.te_general_gemm = None
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=workload.num_experts or None, moe_grouped_gemm=False, normalization="LayerNorm"
        ),
        vocab_size=workload.padded_vocab_size,
        max_sequence_length=workload.seq_length,
        share_embeddings_and_output_weights=True,
        parallel_output=True,
    )
    if is_bf16:
        from megatron.core.transformer.module import Float16Module

        return Float16Module(config, model)
    return model


def load_weights(model: torch.nn.Module, path: Path, tp_rank: int, tp_size: int) -> None:
    """Fill the model from whole weights under megatron-core's names, cut for this rank."""
    with np.load(path) as weights, torch.no_grad():
        for name, parameter in model.named_parameters():
            name, *expert = re.split(r"local_experts\.(\d+)\.", name.removeprefix("module."))
            whole = torch.from_numpy(weights[name + expert[1]][int(expert[0])] if expert else weights[name])
            if whole.shape != parameter.shape:
                dim = next(i for i in range(whole.dim()) if whole.shape[i] != parameter.shape[i])
                whole = whole.chunk(tp_size, dim=dim)[tp_rank]
            parameter.copy_(whole)


def batches(workload: Workload, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and labels of every step. Shapes: ``[b, s]`` each."""
    size = workload.micro_batch_size
    for step in range(count):
        samples = torch.from_numpy(np.stack([workload.sample(step * size + i) for i in range(size)]))
        yield samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def run(workload: Workload, num_warmup: int, num_steps: int, weights: Path, output: Path) -> None:
    """Train and write what was measured; every rank writes its own file."""
    direct_cuda_to_cpu()
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    else:
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=workload.tensor_model_parallel_size)

    model = build_model(workload)
    load_weights(model, weights, parallel_state.get_tensor_model_parallel_rank(), world_size)
    config = model.config
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=True)
    model = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    if workload.fused_adam:
        torch.optim.AdamW = functools.partial(torch.optim.AdamW, fused=True)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=workload.learning_rate,
            min_lr=workload.learning_rate,
            weight_decay=workload.weight_decay,
            adam_beta1=workload.adam_beta1,
            adam_beta2=workload.adam_beta2,
            adam_eps=workload.adam_eps,
            clip_grad=workload.clip_grad,
            bf16=workload.dtype == "bfloat16",
            params_dtype=getattr(torch, workload.dtype),
        ),
        [model],
    )

    stopwatch, losses = Stopwatch(), []
    moments: dict[str, float] = {}
    positions = torch.arange(workload.seq_length).expand(workload.micro_batch_size, -1).contiguous()
    mask = torch.ones(workload.micro_batch_size, workload.seq_length)

    def loss_function(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss_sum, count = (per_token.view(-1).float() * mask.view(-1)).sum(), mask.sum().to(torch.int)
        moments["forward_end"] = time.perf_counter()
        return loss_sum, count, {"lm loss": torch.stack((loss_sum.detach(), count.float()))}

    def forward_step(iterator: Iterator[Any], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens, labels = next(iterator)
        return chunk(tokens, positions, None, labels=labels), loss_function

    def finalize(*args: Any, **kwargs: Any) -> None:
        moments["backward_end"] = time.perf_counter()
        finalize_model_grads(*args, **kwargs)

    config.finalize_model_grads_func = finalize
    config.grad_scale_func = optimizer.scale_loss
    model.train()
    source = batches(workload, num_warmup + num_steps)
    for _ in range(num_warmup + num_steps):
        with stopwatch.step():
            model.zero_grad_buffer()
            optimizer.zero_grad()
            begin = time.perf_counter()
            stored = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=source,
                model=model,
                num_microbatches=1,
                seq_length=workload.seq_length,
                micro_batch_size=workload.micro_batch_size,
                decoder_seq_length=None,
                forward_only=False,
            )
            stopwatch.add("forward", moments["forward_end"] - begin)
            stopwatch.add("backward", moments["backward_end"] - moments["forward_end"])
            stopwatch.add("reduction", time.perf_counter() - moments["backward_end"])
            with stopwatch.part("optimizer"):
                optimizer.step()
        loss_sum, count = stored[0]["lm loss"].tolist()
        losses.append(loss_sum / count)
    versions = {
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "threads": str(torch.get_num_threads()),
    }
    stopwatch.write(output.with_suffix(f".{rank}.json"), num_warmup, losses, versions)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--num-warmup", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--initial-weights", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    run(
        workload_of(arguments),
        arguments.num_warmup,
        arguments.num_steps,
        arguments.initial_weights,
        arguments.output,
    )


if __name__ == "__main__":
    main()
