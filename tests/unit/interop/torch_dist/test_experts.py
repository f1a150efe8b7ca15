"""Models with experts, latent attention and further tokens in Megatron's torch_dist files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from tests.harness.torch_loader import read_with_torch
from tests.unit.interop.megatron_torch.memory_source import MemorySource
from tests.unit.interop.megatron_torch.test_experts import EXPERTS, LATENT, PLAIN
from tests.unit.interop.megatron_torch.test_megatron_torch_writer import same


@pytest.mark.default(3)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("model", [EXPERTS, PLAIN, LATENT], ids=["all", "plain", "latent"])
def test_experts_that_are_written_read_back(model: Any, distributed: bool, tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    config = dataclasses.replace(model, **layout)
    source = MemorySource(config, distributed=distributed)
    read = TorchDistSource(write_torch_dist(source, tmp_path, 12))
    same(read, source)
    assert read.model == config


def test_keys_and_axes_are_those_of_megatron_core(tmp_path: Path) -> None:
    source = MemorySource(LATENT)
    folder = write_torch_dist(source, tmp_path, 12)
    values = read_with_torch(folder)
    layer = "decoder.layers.1."
    fc1 = values[f"{layer}mlp.experts.experts.linear_fc1.weight"]
    assert torch.equal(fc1, source.read(f"model.{layer}mlp.experts.linear_fc1.weight"))
    assert fc1.shape == (4, 32, 24)
    # A norm is in the linear layer behind it, but for those that no linear layer follows.
    for norm in ("self_attention.linear_q_up_proj.layer_norm_weight", "input_layernorm.weight"):
        assert values[f"mtp.layers.1.transformer_layer.{norm}"].shape == ((12,) if "up_proj" in norm else (24,))
    assert {f"{layer}pre_mlp_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"} <= values.keys()
    objects = TorchDistSource(folder).metadata.objects
    for place in ("0_4", "3_4"):
        assert f"mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2._extra_state/shard_{place}" in objects
    assert "decoder.layers.0.self_attention.linear_kv_up_proj._extra_state/shard_0_1" in objects
