"""Make reference numbers with megatron-core on a CPU; run by an interpreter that has the package.

Arguments: a JSON file with a list of models, and a folder. A model has a ``name``, a ``seed``, and the arguments of
megatron-core's TransformerConfig (``transformer_config``) and GPTModel (``gpt_model``); it becomes NAME.npz with
weights (``w/``), a batch, hidden states (``h/``), logits, losses, gradients (``g/``), ten steps of AdamW (``train/``),
and ``config``, in which all of this is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VOCABULARY, BATCH, LENGTH, NUM_STEPS = 128, 2, 32, 10
ADAM = {"lr": 0.01, "min_lr": 0.001, "wd": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "clip": 1.0}
SCHEDULE = {"warmup": 3, "decay": NUM_STEPS, "style": "cosine"}
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "squared_relu": squared_relu, "quick_gelu": quick_gelu}


class NoStream:
    """Stand for a CUDA stream or event: work on a CPU is done in order."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **settings: self


class CenteredNorm(torch.nn.Module):
    """Normalize with a weight that is stored as its difference from one, which torch's own norms are not."""

    def __init__(self, config: Any, width: int, epsilon: float) -> None:
        super().__init__()
        self.shape, self.epsilon = (width,), epsilon
        self.weight = torch.nn.Parameter(torch.zeros(width))
        self.bias = torch.nn.Parameter(torch.zeros(width)) if config.normalization == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.shape, 1 + self.weight, self.epsilon)
        return F.layer_norm(x, self.shape, 1 + self.weight, self.bias, self.epsilon)


class PlainAttention(torch.nn.Module):
    """Attend causally with keys and values of unequal widths, for which megatron-core itself has no torch kernel."""

    def __init__(self, *args: Any, softmax_scale: float | None = None, k_channels: int | None = None, **others: Any):
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or 1)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> torch.Tensor:
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        weights = scores.masked_fill(attention_mask, -math.inf).softmax(dim=-1)
        return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def window_mask(num_queries: int, num_keys: int, window: tuple[int, int]) -> torch.Tensor:
    """Return what a query does not see: megatron-core's own is made on a GPU."""
    distance = torch.arange(num_queries)[:, None] + (num_keys - num_queries) - torch.arange(num_keys)
    return (distance > window[0]) | (-distance > window[1])


def without_cuda() -> None:
    """Let megatron-core compute on the CPU what it computes on a GPU without asking."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.Event = lambda *args, **settings: NoStream()
    torch.cuda.current_stream = lambda *args: NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda *args: None
    CudaRNGStatesTracker.fork = lambda *args: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    fused_softmax.get_sliding_window_causal_mask = window_mask
    # Experts add their biases in place to what this returns, which autograd does not take of a view.
    layers.reduce_from_tensor_model_parallel_region = lambda x, group=None: x.clone()
    make_norm = WrappedTorchNorm.__new__

    def make(kind: Any, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> Any:
        if config.layernorm_zero_centered_gamma:
            return CenteredNorm(config, hidden_size, eps)
        return make_norm(kind, config, hidden_size, eps, **others)

    WrappedTorchNorm.__new__ = make


def build(shape: dict[str, Any], model: dict[str, Any]) -> GPTModel:
    """Return a model of megatron-core."""
    settings = {"q_lora_rank": None} if shape.get("multi_latent_attention") else {}
    settings |= shape | {"activation_func": ACTIVATIONS[shape.get("activation_func", "gelu")]}
    if "window_size" in settings:
        settings["window_size"] = tuple(settings["window_size"])
    kind = MLATransformerConfig if shape.get("multi_latent_attention") else TransformerConfig
    config = kind(
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.06, **settings
    )
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    if config.multi_latent_attention:
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, mtp_block_spec=further, **model)


def draw_weights(model: GPTModel) -> None:
    """Move what begins alike, part what the router scores, and round all to half precision, as files hold it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            elif name.endswith("router.weight"):
                parameter *= 3
            parameter.copy_(parameter.half())


class Trainer:
    """Compute losses and gradients, and take steps of AdamW; the experts' bias moves after each."""

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self.routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self.decays = {name: float(weight.dim() > 1) for name, weight in model.named_parameters()}
        groups = [
            {
                "params": [p for n, p in model.named_parameters() if self.decays[n] == decays],
                "weight_decay": decays * 0.1,
            }
            for decays in (1.0, 0.0)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=ADAM["lr"], betas=tuple(ADAM["betas"]), eps=ADAM["eps"])

    def forward(self, tokens: np.ndarray, labels: np.ndarray | None) -> torch.Tensor:
        """Return the loss of every token, or logits."""
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(LENGTH).expand(len(tokens), LENGTH)
        expected = None if labels is None else torch.from_numpy(labels.copy())
        return self.model(torch.from_numpy(tokens.copy()), positions.clone(), hidden, labels=expected)

    def step(self, tokens: np.ndarray, labels: np.ndarray, rate: float) -> tuple[float, float]:
        """Return the loss and the norm of its gradient, before clipping."""
        self.optimizer.zero_grad()
        loss = self.forward(tokens, labels).mean()
        loss.backward()
        weights = list(self.model.parameters())
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        norm = math.sqrt(sum(float(weight.grad.double().square().sum()) for weight in weights))
        for weight in weights:
            weight.grad *= min(1.0, ADAM["clip"] / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for router in self.routers:
            if router.enable_expert_bias:
                given = router.local_tokens_per_expert
                router.expert_bias += (given.mean() - given).sign() * router.config.moe_router_bias_update_rate
                given.zero_()
            router.reset_global_aux_loss_tracker()
        return loss.item(), norm


def watch(model: GPTModel, kept: dict[str, np.ndarray]) -> Iterator[Any]:
    """Keep the hidden states ``[b, s, h]`` after the embedding, every layer and the final norm; yield handles."""
    layers = {f"layer{number}": layer for number, layer in enumerate(model.decoder.layers)}
    for name, module in {"embedding": model.embedding, **layers, "final": model.decoder.final_layernorm}.items():

        def hook(module: Any, inputs: Any, output: Any, key: str = f"h/{name}") -> None:
            states = output[0] if isinstance(output, tuple) else output
            kept.setdefault(key, states.detach().transpose(0, 1).numpy().copy())

        yield module.register_forward_hook(hook)


def rates() -> Iterator[float]:
    """Yield the learning rate of each step: a warm-up from zero, and a cosine."""
    for step in range(NUM_STEPS):
        warm, span = SCHEDULE["warmup"], SCHEDULE["decay"] - SCHEDULE["warmup"]
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / span))
        yield ADAM["lr"] * step / warm if step <= warm else ADAM["min_lr"] + (ADAM["lr"] - ADAM["min_lr"]) * cosine


def make(case: dict[str, Any], folder: Path) -> None:
    """Write the numbers of one model."""
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    MTPLossLoggingHelper.tracker.clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    torch.manual_seed(case["seed"])
    generator = np.random.default_rng(case["seed"])
    shape = case["transformer_config"]
    model = build(shape, case["gpt_model"])
    draw_weights(model)
    trainer = Trainer(model)
    found = {f"w/{name}": weight.detach().numpy().astype(np.float16) for name, weight in model.named_parameters()}
    ids = generator.integers(0, VOCABULARY, (NUM_STEPS + 1, BATCH, LENGTH + 1))
    tokens, labels = ids[..., :-1], ids[..., 1:]
    mask = (generator.random((BATCH, LENGTH)) > 0.2).astype(np.float32)
    hidden: dict[str, np.ndarray] = {}
    handles = list(watch(model, hidden))
    with torch.no_grad():
        has_logits = not shape.get("mtp_num_layers")
        logits = trainer.forward(tokens[0], None).numpy() if has_logits else np.zeros(0, np.float32)
    losses = trainer.forward(tokens[0], labels[0])
    for handle in handles:
        handle.remove()
    loss = (losses * torch.from_numpy(mask)).sum() / mask.sum()
    loss.backward()
    for name, weight in model.named_parameters():
        found[f"g/{name}"] = np.zeros(weight.shape, np.float32) if weight.grad is None else weight.grad.numpy().copy()
    # The counts of this batch stay for the first step, as in the files that were made before this script.
    steps = [trainer.step(*batch) for batch in zip(tokens[1:], labels[1:], rates())]
    config = case | {"b": BATCH, "s": LENGTH, "vocab": VOCABULARY, "optimizer": ADAM | SCHEDULE}
    config["head_dim"] = shape.get("kv_channels", shape["hidden_size"] // shape["num_attention_heads"])
    found |= hidden | {
        "tokens": tokens[0],
        "labels": labels[0],
        "position_ids": np.tile(np.arange(LENGTH), (BATCH, 1)),
        "loss_mask": mask,
        "logits": logits,
        "per_token_loss": losses.detach().numpy(),
        "loss": np.float32(loss.item()),
        "config": np.array(json.dumps(config)),
        "train/loss": np.array([loss for loss, _ in steps]),
        "train/grad_norm": np.array([norm for _, norm in steps]),
        "train/lr": np.array(list(rates())),
        "train/tokens": tokens[1:].astype(np.int16),
        "train/labels": labels[1:].astype(np.int16),
    }
    np.savez_compressed(folder / f"{case['name']}.npz", **found)


def main(cases: str, folder: str) -> None:
    """Make the numbers of every model of the file."""
    logging.disable(logging.WARNING)
    without_cuda()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=True)
    for case in json.loads(Path(cases).read_text()):
        make(case, Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
