"""Hybrid models in Megatron's torch and torch_dist files: names, shapes, order and arguments, at any layout.

The names and the order are those of megatron-core 0.16.1: `MambaModel` with ``mamba_stack_spec``, and a GPT model with
``experimental_attention_variant``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_dist_metadata import read_metadata
from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from megatron.core.config_base import with_fields
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt import GPTConfig, flags_without_argument
from tests.harness.torch_loader import read_with_torch
from tests.unit.checkpoint.formats.megatron.memory_source import SMALL, MemorySource
from tests.unit.checkpoint.formats.megatron.test_rank_files import same

MAMBA = with_fields(
    SMALL,
    hybrid_override_pattern="M-*M",
    mamba_state_dim=6,
    mamba_head_dim=8,
    mamba_num_groups=2,
    mamba_num_heads=4,
    position_embedding_type="none",
    normalization="RMSNorm",
    add_bias_linear=False,
)
BIASED = with_fields(MAMBA, normalization="LayerNorm", add_bias_linear=True, swiglu=False, bf16=True)
EXPERTS = with_fields(
    MAMBA,
    hybrid_override_pattern="ME*-",
    num_experts=4,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=12,
    moe_latent_size=10,
    moe_aux_loss_coeff=(1e-2,),
)
DELTA = with_fields(
    SMALL,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="2",
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    position_embedding_type="rope",
    normalization="RMSNorm",
    add_bias_linear=False,
    attention_output_gate=True,
    qk_layernorm=True,
    apply_layernorm_1p=True,
    num_experts=4,
    moe_ffn_hidden_size=16,
    moe_layer_freq="[0, 1, 1, 1]",
    moe_aux_loss_coeff=(1e-2,),
)
MODELS = {"mamba": MAMBA, "biased": BIASED, "experts": EXPERTS, "delta": DELTA}
TWO_BY_TWO = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
INNER, STATES, HEADS = 32, 12, 4
FURTHER = (
    *(("biased", "torch", False), ("biased", "torch_dist", False), ("biased", "torch_dist", True)),
    *(("experts", "torch", True), ("experts", "torch_dist", False), ("experts", "torch_dist", True)),
    *(("delta", "torch", False), ("delta", "torch_dist", False)),
)


def write(source: MemorySource, folder: Path, kind: str) -> Path:
    writer = write_megatron_torch if kind == "torch" else write_torch_dist
    return writer(source, folder, 12)


def read(folder: Path, kind: str) -> MegatronTorchSource | TorchDistSource:
    return MegatronTorchSource(folder) if kind == "torch" else TorchDistSource(folder)


def shapes_in(folder: Path, rank: str) -> dict[str, tuple[int, ...] | None]:
    model = torch.load(folder / f"mp_rank_{rank}" / "model_optim_rng.pt", weights_only=False)["model"]
    return {name: None if value is None else tuple(value.shape) for name, value in model.items()}


@pytest.mark.parametrize(
    ("model", "kind", "distributed"),
    [
        *(("mamba", kind, distributed) for kind in ("torch", "torch_dist") for distributed in (False, True)),
        *(
            ("biased", "torch", True),
            ("experts", "torch", False),
            ("delta", "torch", True),
            ("delta", "torch_dist", True),
        ),
        *(pytest.param(*each, marks=pytest.mark.long) for each in FURTHER),
    ],
)
def test_what_is_written_at_tp2_pp2_reads_back_whole(model: str, kind: str, distributed: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(MODELS[model], **TWO_BY_TWO)
    source = MemorySource(config, distributed=distributed, overlap=distributed)
    folder = write(source, tmp_path / "sharded", kind)
    found = read(folder, kind)
    same(found, source)
    assert found.model == config
    # The files of one rank hold the same tensors, and so do those written from the files.
    one = MemorySource(MODELS[model], distributed=distributed)
    whole = read(write(one, tmp_path / "whole", kind), kind)
    assert {name: tuple(info.global_shape) for name, info in whole.tensors.items()} == {
        name: tuple(info.global_shape) for name, info in found.tensors.items()
    }
    for name in whole.tensors:
        assert torch.equal(whole.read(name), found.read(name)), name
    found.close()
    whole.close()


@pytest.mark.parametrize("model", ["experts", pytest.param("delta", marks=pytest.mark.long)])
def test_one_format_follows_the_other_without_a_loss(model: str, tmp_path: Path) -> None:
    source = MemorySource(dataclasses.replace(MODELS[model], **TWO_BY_TWO), distributed=True)
    first = read(write(source, tmp_path / "1", "torch"), "torch")
    second = read(write_torch_dist(first, tmp_path / "2", 12), "torch_dist")
    last = read(write_megatron_torch(second, tmp_path / "3", 12), "torch")
    same(last, source)
    assert last.model == first.model
    for opened in (first, second, last):
        opened.close()


def test_a_rank_has_the_names_and_shapes_of_mamba_model(tmp_path: Path) -> None:
    source = MemorySource(dataclasses.replace(MAMBA, **TWO_BY_TWO), has_optimizer=False)
    folder = write(source, tmp_path, "torch")
    mixer = "decoder.layers.{}.mixer."
    of_mixer: dict[str, tuple[int, ...] | None] = {
        "dt_bias": (HEADS // 2,),
        "A_log": (HEADS // 2,),
        "D": (HEADS // 2,),
        "in_proj.layer_norm_weight": (24,),
        "in_proj.weight": ((2 * INNER + 2 * STATES + HEADS) // 2, 24),
        "in_proj._extra_state": None,
        "conv1d.weight": ((INNER + 2 * STATES) // 2, 1, 4),
        "conv1d.bias": ((INNER + 2 * STATES) // 2,),
        "norm.weight": (INNER // 2,),
        "out_proj.weight": (24, INNER // 2),
        "out_proj._extra_state": None,
    }
    first = shapes_in(folder, "01_000")
    assert first == {
        "embedding.word_embeddings.weight": (32, 24),
        **{mixer.format(0) + name: shape for name, shape in of_mixer.items()},
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": (24,),
        "decoder.layers.1.mlp.linear_fc1.weight": (40, 24),
        "decoder.layers.1.mlp.linear_fc1._extra_state": None,
        "decoder.layers.1.mlp.linear_fc2.weight": (24, 20),
        "decoder.layers.1.mlp.linear_fc2._extra_state": None,
    }
    order = [name.removeprefix("decoder.layers.0.mixer.") for name in first if "layers.0." in name]
    assert order == list(of_mixer)
    assert shapes_in(folder, "01_001") == {
        "decoder.layers.0.self_attention.linear_proj.weight": (24, 12),
        "decoder.layers.0.self_attention.linear_proj._extra_state": None,
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (24,),
        "decoder.layers.0.self_attention.linear_qkv.weight": (24, 24),
        "decoder.layers.0.self_attention.linear_qkv._extra_state": None,
        **{mixer.format(1) + name: shape for name, shape in of_mixer.items()},
        "decoder.final_norm.weight": (24,),
        "output_layer.weight": (32, 24),
        "output_layer._extra_state": None,
    }


def test_latent_projections_have_the_names_places_and_shapes_of_megatron_core(tmp_path: Path) -> None:
    """They follow the router, and every tensor-parallel rank holds them whole."""
    source = MemorySource(dataclasses.replace(EXPERTS, **TWO_BY_TWO), has_optimizer=False)
    found = shapes_in(write(source, tmp_path / "1", "torch"), "01_000")
    prefix = "decoder.layers.1."
    layer = {name.removeprefix(prefix): shape for name, shape in found.items() if name.startswith(prefix)}
    assert list(itertools.islice(layer.items(), 6)) == [
        ("pre_mlp_layernorm.weight", (24,)),
        ("mlp.router.weight", (4, 24)),
        ("mlp.fc1_latent_proj.weight", (10, 24)),
        ("mlp.fc1_latent_proj._extra_state", None),
        ("mlp.fc2_latent_proj.weight", (24, 10)),
        ("mlp.fc2_latent_proj._extra_state", None),
    ]
    assert (layer["mlp.experts.linear_fc1.weight3"], layer["mlp.experts.linear_fc2.weight3"]) == ((16, 10), (10, 8))
    (path, *_) = (tmp_path / "1").rglob("mp_rank_01_000/model_optim_rng.pt")
    arguments = torch.load(path, weights_only=False)["args"]
    assert arguments.moe_latent_size == 10
    folder = write(MemorySource(EXPERTS), tmp_path / "2", "torch_dist")
    assert read_with_torch(folder)["decoder.layers.1.mlp.fc1_latent_proj.weight"].shape == (10, 24)
    objects = {key for key in read_metadata(folder).objects if "_latent_proj" in key}
    assert objects == {f"decoder.layers.1.mlp.fc{n}_latent_proj._extra_state/shard_0_1" for n in (1, 2)}


def test_a_rank_has_its_own_rows_of_every_stacked_tensor(tmp_path: Path) -> None:
    source = MemorySource(dataclasses.replace(MAMBA, tensor_model_parallel_size=2), has_optimizer=False)
    folder = write(source, tmp_path, "torch")
    name = "decoder.layers.0.mixer.in_proj.weight"
    z, x, b, c, dt = source.values[f"model.{name}"].split([INNER, INNER, STATES, STATES, HEADS])
    for rank in (0, 1):
        stored = torch.load(folder / f"mp_rank_0{rank}" / "model_optim_rng.pt", weights_only=False)["model"]
        own = torch.cat([part.chunk(2)[rank] for part in (z, x, b, c, dt)])
        assert torch.equal(stored[name], own)


def test_a_gated_delta_net_has_the_names_and_shapes_of_megatron_core(tmp_path: Path) -> None:
    source = MemorySource(dataclasses.replace(DELTA, **TWO_BY_TWO), has_optimizer=False)
    found = shapes_in(write(source, tmp_path, "torch"), "00_000")
    prefix = "decoder.layers.0."
    assert {name.removeprefix(prefix): shape for name, shape in found.items() if name.startswith(prefix)} == {
        "self_attention.dt_bias": (2,),
        "self_attention.A_log": (2,),
        "self_attention.in_proj.layer_norm_weight": (24,),
        "self_attention.in_proj.weight": ((2 * 12 + 2 * 40 + 2 * 4) // 2, 24),
        "self_attention.in_proj._extra_state": None,
        "self_attention.conv1d.weight": ((2 * 12 + 40) // 2, 1, 4),
        "self_attention.out_norm.weight": (10,),
        "self_attention.out_proj.weight": (24, 20),
        "self_attention.out_proj._extra_state": None,
        "mlp.linear_fc1.layer_norm_weight": (24,),
        "mlp.linear_fc1.weight": (40, 24),
        "mlp.linear_fc1._extra_state": None,
        "mlp.linear_fc2.weight": (24, 20),
        "mlp.linear_fc2._extra_state": None,
    }
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in found
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in found


def test_torch_dist_has_one_tensor_for_each_part_of_a_projection(tmp_path: Path) -> None:
    source = MemorySource(dataclasses.replace(MAMBA, **TWO_BY_TWO), distributed=True)
    folder = write(source, tmp_path / "mamba", "torch_dist")
    stored = read_with_torch(folder)
    layer = "decoder.layers.3.mixer."
    name = f"model.{layer}"
    parts = dict(zip(("z", "x", "B", "C", "dt"), (INNER, INNER, STATES, STATES, HEADS)))
    rows = source.values[f"{name}in_proj.weight"].split(list(parts.values()))
    moments = source.values[f"optimizer.exp_avg.{layer}in_proj.weight"].split(list(parts.values()))
    for part, values, moment in zip(parts, rows, moments):
        assert torch.equal(stored[f"{layer}in_proj.weight.{part}"], values)
        assert torch.equal(stored[f"optimizer.state.exp_avg.{layer}in_proj.weight.{part}"], moment)
    found = {key.removeprefix(layer) for key in stored if key.startswith(layer)}
    assert found == {
        *(f"in_proj.weight.{part}" for part in parts),
        *(f"conv1d.{kind}.{part}" for kind in ("weight", "bias") for part in ("x", "B", "C")),
        *("A_log", "D", "dt_bias", "in_proj.layer_norm_weight", "norm.weight", "out_proj.weight"),
    }
    objects = {key.removeprefix(layer) for key in read_metadata(folder).objects if key.startswith(layer)}
    assert objects == {f"{module}._extra_state/shard_0_1" for module in ("in_proj", "out_proj")}
    assert {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.final_norm.weight"} <= stored.keys()

    stored = read_with_torch(write(MemorySource(DELTA), tmp_path / "delta", "torch_dist"))
    layer = "decoder.layers.0.self_attention."
    assert {key.removeprefix(layer): tuple(stored[key].shape) for key in stored if key.startswith(f"{layer}in")} == {
        "in_proj.layer_norm_weight": (24,),
        **{f"in_proj.weight.{part}": (12, 24) for part in ("query", "key")},
        **{f"in_proj.weight.{part}": (40, 24) for part in ("value", "z")},
        **{f"in_proj.weight.{part}": (4, 24) for part in ("beta", "alpha")},
    }
    assert tuple(stored[f"{layer}conv1d.weight.value"].shape) == (40, 1, 4)


def test_arguments_have_megatrons_names(tmp_path: Path) -> None:
    config = with_fields(MAMBA, hybrid_override_pattern="[mamba, mlp, attention, mamba]")
    folder = write(MemorySource(config, has_optimizer=False), tmp_path / "mamba", "torch")
    arguments = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["args"]
    names = ["state_dim", "head_dim", "num_groups", "num_heads"]
    assert [getattr(arguments, f"mamba_{name}") for name in names] == [6, 8, 2, 4]
    assert (arguments.hybrid_override_pattern, arguments.is_hybrid_model) == ("M-*M", True)
    assert arguments.spec == ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    assert read(folder, "torch").model == MAMBA

    folder = write(MemorySource(DELTA, has_optimizer=False), tmp_path / "delta", "torch")
    arguments = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["args"]
    assert (arguments.experimental_attention_variant, arguments.linear_attention_freq) == ("gated_delta_net", 2)
    assert (arguments.linear_num_key_heads, arguments.linear_value_head_dim) == (2, 10)


def change(folder: Path, how: Callable[[Any], None]) -> None:
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    how(content["args"])
    torch.save(content, path)


def test_a_model_of_mamba_layers_only_needs_no_pattern(tmp_path: Path) -> None:
    config = with_fields(MAMBA, hybrid_override_pattern="MMMM")
    folder = write(MemorySource(config, has_optimizer=False), tmp_path, "torch")
    change(folder, lambda arguments: setattr(arguments, "hybrid_override_pattern", None))
    assert read(folder, "torch").model == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M-*"}, "args.hybrid_override_pattern is 'M-\\*': the pattern has 3 layers"),
        ({"hybrid_override_pattern": "M-*X"}, "'M-\\*X': X is no kind of layer"),
        ({"hybrid_override_pattern": "M-*G"}, "hybrid model that is not supported: G in --hybrid-override-pattern"),
        ({"hybrid_override_pattern": "MM*M"}, "missing: decoder.layers.1.mixer"),
        (
            {"hybrid_override_pattern": None, "hybrid_attention_ratio": 0.25},
            "args have hybrid_attention_ratio 0.25, which needs a hybrid_override_pattern",
        ),
        ({"hybrid_layer_pattern": "M-*M"}, "not supported: hybrid_layer_pattern M-\\*M"),
        ({"experimental_attention_variant": "dsa"}, "not supported: experimental_attention_variant dsa"),
        ({"norm_epsilon": 1e-6, "layernorm_epsilon": 1e-6}, "not supported: --norm-epsilon 1e-06"),
        ({"mamba_state_dim": "6"}, "args.mamba_state_dim is '6'; a value of type int is expected"),
        ({"mamba_state_dim": 3}, r"mixer.in_proj.weight: shape \[92, 24\] in the file"),
    ],
)
def test_other_hybrid_models_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(MemorySource(MAMBA, has_optimizer=False), tmp_path, "torch")
    change(folder, lambda arguments: vars(arguments).update(changes))
    with pytest.raises(CheckpointError, match=message):
        read(folder, "torch")


@pytest.mark.parametrize(
    ("model", "fields", "flags"),
    [
        (MAMBA, {}, []),
        (DELTA, {}, []),
        (EXPERTS, {}, []),
        (
            with_fields(SMALL, normalization="RMSNorm"),
            {"hybrid_override_pattern": "G-*-"},
            ["G in --hybrid-override-pattern G-*-"],
        ),
        (MAMBA, {"hybrid_override_pattern": "P-KM"}, ["K, P in --hybrid-override-pattern P-KM"]),
        (MAMBA, {"mamba_conv_bias": False}, ["--disable-mamba-conv-bias"]),
        (MAMBA, {"mamba_norm": "none"}, ["--mamba-norm none"]),
        (
            DELTA,
            {"experimental_attention_variant": "kimi_delta_attention"},
            ["--experimental-attention-variant kimi_delta_attention"],
        ),
        (MAMBA, {"norm_epsilon": 1e-6}, ["--norm-epsilon 1e-06"]),
        (MAMBA, {"qk_layernorm": True}, ["--qk-layernorm"]),
        (MAMBA, {"mtp_num_layers": 1}, ["--mtp-num-layers 1"]),
        (
            MAMBA,
            {"mamba_num_groups": 1, "tensor_model_parallel_size": 2},
            ["--mamba-num-groups 1 at --tensor-model-parallel-size 2"],
        ),
        (
            MAMBA,
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
            ["--num-layers-per-virtual-pipeline-stage 1"],
        ),
        (DELTA, {"normalization": "LayerNorm"}, ["--normalization LayerNorm"]),
        (
            DELTA,
            {"swiglu": False},
            ["gated delta-net without --swiglu"],
        ),
    ],
)
def test_hybrid_models_that_megatron_does_not_have_are_not_written(
    model: GPTConfig, fields: dict[str, Any], flags: list[str], tmp_path: Path
) -> None:
    config = with_fields(model, **fields)
    assert flags_without_argument(config) == flags
    for kind in ("torch", "torch_dist") if flags else ():
        with pytest.raises(ConfigurationError) as rejected:
            write(MemorySource(config, has_optimizer=False), tmp_path / kind, kind)
        assert str(rejected.value) == f"Megatron has no arguments for {flags[0]}; use the native format"
