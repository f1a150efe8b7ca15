"""The model against reference numbers made with NVIDIA's own code, at several tensor-parallel layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_last_dim
from megatron.core.layer_output import LayerOutput
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group import Group
from megatron.core.sharding import spec_of
from tests.harness.closeness import assert_gradients_close, assert_tensors_close
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import (
    Fragment,
    fragments,
    load_global_weights,
    make_model,
    reassemble,
    summed_gradients,
    tensor_parallel_group,
)

FOLDER = Path(__file__).parent / "model"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class RankResult:
    logits: np.ndarray
    per_token_loss: np.ndarray
    loss: float
    hidden: dict[str, np.ndarray]
    gradients: list[Fragment]


ALIKE = ("qk_layernorm", "rotary_interleaved", "glu_linear_offset", "activation_func_clamp_value")
"""Fields of a reference's transformer whose names are ours."""


def model_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of our configuration that a reference model is of."""
    shape, model = config["transformer_config"], config["gpt_model"]
    settings = {name: shape[name] for name in ALIKE if name in shape}
    if "window_size" in shape:
        settings["window_size"] = ",".join(map(str, shape["window_size"]))
    if "window_attn_skip_freq" in shape:
        settings["window_attn_skip_freq"] = str(shape["window_attn_skip_freq"])
    if "softmax_scale" in shape:
        settings["query_pre_attn_scalar"] = round(shape["softmax_scale"] ** -2)
    activation = shape.get("activation_func")
    return settings | {
        "num_layers": shape["num_layers"],
        "hidden_size": shape["hidden_size"],
        "num_attention_heads": shape["num_attention_heads"],
        "num_query_groups": shape.get("num_query_groups", 0),
        "kv_channels": config["head_dim"],
        "ffn_hidden_size": shape["ffn_hidden_size"],
        "normalization": shape.get("normalization", "LayerNorm"),
        "norm_epsilon": shape["layernorm_epsilon"],
        "apply_layernorm_1p": shape.get("layernorm_zero_centered_gamma", False),
        "swiglu": shape.get("gated_linear_unit", False) and activation == "silu",
        "quick_geglu": activation == "quick_gelu",
        "squared_relu": activation == "squared_relu",
        "bias_gelu_fusion": False,
        "add_bias_linear": shape.get("add_bias_linear", True),
        "add_qkv_bias": shape.get("add_qkv_bias", False),
        "vocab_size": config["vocab"],
        "make_vocab_size_divisible_by": 1,
        "max_position_embeddings": config["s"],
        "position_embedding_type": model.get("position_embedding_type", "learned_absolute"),
        "rotary_base": model.get("rotary_base", 10000),
        "rotary_percent": model.get("rotary_percent", 1.0),
        "use_rope_scaling": model.get("rope_scaling", False),
        "rope_scaling_factor": model.get("rope_scaling_factor", 8.0),
        "untie_embeddings_and_output_weights": not model.get("share_embeddings_and_output_weights", False),
    }


def watch_hidden_states(model: GPTModel, tp: Group, kept: dict[str, np.ndarray]) -> None:
    """Keep the whole hidden states ``[b, s, h]`` after the embedding, every layer and the final norm."""

    def watch(name: str, module: torch.nn.Module) -> None:
        def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor | LayerOutput) -> None:
            states = (output.hidden if isinstance(output, LayerOutput) else output).detach()
            whole = all_gather_first_dim(states, tp) if model.config.sequence_parallel else states
            kept[name] = whole.transpose(0, 1).numpy().copy()

        module.register_forward_hook(hook)

    assert model.embedding is not None
    assert model.decoder.final_layernorm is not None
    watch("embedding", model.embedding)
    for number, layer in model.decoder.layers.items():
        watch(f"layer{number}", layer)
    watch("final", model.decoder.final_layernorm)


def run_model(name: str, sequence_parallel: bool) -> RankResult:
    reference = np.load(FOLDER / f"{name}.npz")
    settings = model_settings(json.loads(str(reference["config"])))
    tp = tensor_parallel_group()
    model = make_model(tp, sequence_parallel=sequence_parallel, **settings)
    names = {spec_of(parameter).name for parameter in model.parameters()}
    assert names == {key[2:] for key in reference.files if key.startswith("w/")}
    load_global_weights(model, lambda spec: reference[f"w/{spec.name}"])
    tokens, labels, positions, mask = (
        torch.from_numpy(reference[key]) for key in ("tokens", "labels", "position_ids", "loss_mask")
    )
    hidden: dict[str, np.ndarray] = {}
    watch_hidden_states(model, tp, hidden)
    with torch.no_grad():
        logits = all_gather_last_dim(model(tokens, positions), tp).transpose(0, 1).numpy().copy()
    losses = model(tokens, positions, labels=labels)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    return RankResult(
        logits, losses.detach().numpy().copy(), loss.item(), hidden, fragments(summed_gradients(model, tp))
    )


@pytest.mark.default
@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen", "windowed"])
def test_model_meets_reference_numbers(name: str, tp_size: int, sequence_parallel: bool) -> None:
    if tp_size == 1:
        results = [run_model(name, sequence_parallel)]
    else:
        results = run_distributed(tp_size, run_model, name, sequence_parallel)
    reference = np.load(FOLDER / f"{name}.npz")
    for result in results:
        assert_tensors_close(result.logits, reference["logits"], TOLERANCE, "logits")
        assert_tensors_close(result.per_token_loss, reference["per_token_loss"], TOLERANCE, "per-token loss")
        assert result.loss == pytest.approx(float(reference["loss"]), rel=TOLERANCE, abs=0.0)
        states = {key[2:]: reference[key] for key in reference.files if key.startswith("h/")}
        assert set(result.hidden) == set(states)
        for key, state in states.items():
            assert_tensors_close(result.hidden[key], state, TOLERANCE, f"hidden state {key}")
    expected = {key[2:]: reference[key] for key in reference.files if key.startswith("g/")}
    gradients = reassemble((result.gradients for result in results), copy_tolerance=1e-6)
    assert_gradients_close(gradients, expected, TOLERANCE)
