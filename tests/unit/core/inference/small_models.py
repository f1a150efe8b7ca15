"""Small models in float64, whole or cut over tensor-parallel ranks, that the tests of generation share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from megatron.core.config_base import from_fields
from megatron.core.device import Device
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ParallelSizes
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.process_group import Group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.random import RngStreams

GOLDEN_FOLDER = Path(__file__).resolve().parents[3] / "golden" / "model"


def build(config: GPTConfig, tp: Group, seed: int | None = 11, contents: StageContents | None = None) -> GPTModel:
    """Build a model, or the part of one that ``contents`` names, for inference on this rank."""
    if contents is None:
        contents = StageContents(tuple(range(config.num_layers)), has_embedding=True, has_loss=True)
    config = dataclasses.replace(config, tensor_model_parallel_size=tp.size, hidden_dropout=0.0, attention_dropout=0.0)
    rng = RngStreams(Device("cpu"), 1, ParallelSizes(tp=tp.size).place(tp.rank))
    model = GPTModel(
        config,
        tp,
        rng,
        seed=seed,
        layer_numbers=contents.layer_numbers,
        pre_process=contents.has_embedding,
        post_process=contents.has_loss,
    )
    return model.eval()


def odd_config(**changes: object) -> GPTConfig:
    """Describe a model whose sizes all differ and whose vocabulary of 101 is padded."""
    values: dict[str, object] = {
        "num_layers": 3,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 44,
        "vocab_size": 101,
        "make_vocab_size_divisible_by": 8,
        "max_position_embeddings": 37,
        "init_method_std": 0.3,
        "params_dtype": "float64",
    }
    return from_fields(GPTConfig, **(values | changes))


def golden_model(name: str, tp: Group, contents: StageContents | None = None) -> GPTModel:
    """Build one of the golden models, or a stage of it, with this rank's part of its weights."""
    config, weights = _read_golden(name)
    built = build(config, tp, seed=None, contents=contents)
    fill(built, weights)
    return built


def golden_config(name: str) -> GPTConfig:
    """Describe one of the golden models."""
    return _read_golden(name)[0]


def _read_golden(name: str) -> tuple[GPTConfig, dict[str, np.ndarray]]:
    with np.load(GOLDEN_FOLDER / f"{name}.npz") as arrays:
        description = json.loads(str(arrays["config"]))
        weights = {key[2:]: arrays[key] for key in arrays.files if key.startswith("w/")}
    shape, model = description["transformer_config"], description["gpt_model"]
    config = GPTConfig(
        num_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape.get("num_query_groups", 0),
        ffn_hidden_size=shape["ffn_hidden_size"],
        normalization=shape.get("normalization", "LayerNorm"),
        norm_epsilon=shape["layernorm_epsilon"],
        swiglu=shape.get("gated_linear_unit", False),
        bias_gelu_fusion=False,
        add_bias_linear=shape.get("add_bias_linear", True),
        add_qkv_bias=shape.get("add_qkv_bias", False),
        vocab_size=description["vocab"],
        make_vocab_size_divisible_by=1,
        max_position_embeddings=description["s"],
        position_embedding_type=model.get("position_embedding_type", "learned_absolute"),
        rotary_base=model.get("rotary_base", 10000),
        untie_embeddings_and_output_weights="output_layer.weight" in weights,
        params_dtype="float64",
    )
    return config, weights


def fill(model: GPTModel, weights: Mapping[str, np.ndarray]) -> None:
    """Give every parameter its boxes of the global weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            spec = spec_of(parameter)
            for shard in spec.shards:
                values = torch.from_numpy(weights[spec.name][shard.global_box.slices])
                parameter[shard.local_box.slices] = values.to(parameter.dtype)


def whole_logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the logits of every position without a cache.

    Shapes: ``[b, s] -> [s, b, v]``.
    """
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    with torch.no_grad():
        return model(tokens, positions)
