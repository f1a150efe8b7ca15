"""Models with experts and latent attention in Megatron's torch and torch_dist files, at any layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from megatron.core.config_base import with_fields
from megatron.core.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from tests.harness.torch_loader import read_with_torch
from tests.unit.checkpoint.formats.megatron.memory_source import SMALL, MemorySource
from tests.unit.checkpoint.formats.megatron.test_rank_files import same

EXPERTS = with_fields(
    SMALL,
    num_experts=4,
    moe_ffn_hidden_size=16,
    moe_layer_freq="[1, 0, 1, 1]",
    moe_shared_expert_intermediate_size=12,
    moe_shared_expert_gate=True,
    moe_router_topk=3,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type=("seq_aux_loss", "aux_loss"),
    moe_aux_loss_coeff=(1e-2, 1e-3),
)
PLAIN = with_fields(
    SMALL, num_experts=4, moe_ffn_hidden_size=16, add_bias_linear=False, bf16=True, moe_aux_loss_coeff=(1e-2,)
)
LATENT = with_fields(
    PLAIN,
    group_query_attention=False,
    num_query_groups=4,
    position_embedding_type="rope",
    multi_latent_attention=True,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=5,
    qk_layernorm=True,
    rotary_scaling_factor=2.0,
    mtp_num_layers=2,
    moe_layer_freq="[0, 1, 1, 1]",
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
)
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-pp2-ep4": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
    },
    "tp2-ep4-etp1": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    },
}


def write(config: Any, folder: Path, **of_optimizer: bool) -> tuple[MemorySource, Path]:
    source = MemorySource(config, **{"has_optimizer": False, **of_optimizer})
    return source, write_megatron_torch(source, folder, 12)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.default(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("model", "distributed"),
    [
        *((EXPERTS, False), (PLAIN, True)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((PLAIN, False), (EXPERTS, True), (LATENT, False))),
        (LATENT, True),
    ],
)
def test_experts_and_their_optimizer_read_back(model: Any, distributed: bool, layout: str, tmp_path: Path) -> None:
    config = dataclasses.replace(model, **LAYOUTS[layout])
    source, folder = write(config, tmp_path, has_optimizer=True, distributed=distributed, overlap=distributed)
    read = MegatronTorchSource(folder)
    assert any(name.startswith("optimizer.exp_avg_sq.decoder.layers.2.mlp.experts.") for name in read.tensors)
    same(read, source)
    assert read.model == config
    read.close()


def test_experts_cut_unlike_other_layers_have_the_folders_of_their_ranks(tmp_path: Path) -> None:
    config = dataclasses.replace(EXPERTS, **LAYOUTS["tp2-ep4-etp1"])
    _, folder = write(config, tmp_path, has_optimizer=True, distributed=True)
    assert names(folder) == {"mp_rank_00_000", "mp_rank_01_001", "mp_rank_00_002", "mp_rank_01_003"}
    # The first of each tensor rank has the state of all that is no expert.
    for name, has_all in (("00_000", True), ("01_001", True), ("00_002", False), ("01_003", False)):
        flat = torch.load(folder / f"mp_rank_{name}" / "distrib_optim.pt", weights_only=False)
        assert [part is not None for part in flat] == [has_all, True]


def test_every_rank_of_expert_parallelism_has_a_folder(tmp_path: Path) -> None:
    _, folder = write(dataclasses.replace(EXPERTS, **LAYOUTS["tp2-pp2-ep4"]), tmp_path / "a")
    assert names(folder) == {f"mp_rank_0{t}_00{p}_00{e}" for t in (0, 1) for p in (0, 1) for e in range(4)}
    _, folder = write(dataclasses.replace(EXPERTS, **LAYOUTS["ep2"]), tmp_path / "b")
    assert names(folder) == {"mp_rank_00_000", "mp_rank_00_001"}


def test_a_rank_has_the_keys_of_megatron_core_and_its_arguments(tmp_path: Path) -> None:
    _, folder = write(dataclasses.replace(EXPERTS, **LAYOUTS["ep2"]), tmp_path)
    content = torch.load(folder / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False)
    layer = "decoder.layers.0.mlp."
    found = {
        name.removeprefix(layer): tuple(value.shape)
        for name, value in content["model"].items()
        if name.startswith(layer) and value is not None
    }
    expert = {"linear_fc1.weight": (32, 24), "linear_fc1.bias": (32,), "linear_fc2.weight": (24, 16)}
    expert["linear_fc2.bias"] = (24,)
    assert found == {
        "router.weight": (4, 24),
        "router.bias": (4,),
        "router.expert_bias": (4,),
        **{f"experts.local_experts.{n}.{name}": shape for n in (0, 1) for name, shape in expert.items()},
        "shared_experts.linear_fc1.weight": (24, 24),
        "shared_experts.linear_fc1.bias": (24,),
        "shared_experts.linear_fc2.weight": (24, 12),
        "shared_experts.linear_fc2.bias": (24,),
        "shared_experts.gate_weight": (1, 24),
    }
    arguments = content["args"]
    assert (arguments.num_experts, arguments.expert_model_parallel_size, arguments.moe_router_topk) == (4, 2, 3)
    assert arguments.moe_layer_freq == [1, 0, 1, 1]
    assert arguments.moe_router_load_balancing_type == ["seq_aux_loss", "aux_loss"]
    assert not arguments.moe_grouped_gemm


def rename(folder: Path, change: Any) -> None:
    """Change the model, and the arguments, of every rank's file."""
    for path in folder.glob("*/model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["model"] = change(content["model"], content["args"])
        torch.save(content, path)


def group(state: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Name the experts as transformer-engine's grouped layers do."""
    arguments.moe_grouped_gemm = True
    found = {}
    for name, value in state.items():
        before, within, rest = name.partition(".local_experts.")
        number, _, linear = rest.partition(".")
        found[f"{before}.{linear}{number}" if within and "_extra" not in name else name] = value
    return found


def fuse(state: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Put all experts of a file into two tensors, as the grouped GEMM of older releases has them."""
    found = {name: value for name, value in state.items() if ".local_experts." not in name}
    for layer in range(4):
        prefix = f"decoder.layers.{layer}.mlp.experts."
        for number, linear in (("1", "linear_fc1"), ("2", "linear_fc2")):
            experts = [state.get(f"{prefix}local_experts.{n}.{linear}.weight") for n in range(2)]
            if experts[0] is not None:
                stacked = torch.stack([weight.t().contiguous() for weight in experts])
                shape = (24, -1) if number == "1" else (-1, 24)
                found[f"{prefix}weight{number}"] = stacked.reshape(shape).clone()
    return found


@pytest.mark.parametrize("change", [group, fuse])
def test_grouped_experts_are_read(change: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, expert_model_parallel_size=2, tensor_model_parallel_size=2)
    source, folder = write(config, tmp_path)
    rename(folder, change)
    same(MegatronTorchSource(folder), source)


def test_experts_in_one_tensor_are_read_without_their_optimizer(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, expert_model_parallel_size=2, tensor_model_parallel_size=2)
    source, folder = write(config, tmp_path, has_optimizer=True)
    rename(folder, fuse)
    read = MegatronTorchSource(folder)
    assert not read.has_optimizer
    assert set(read.tensors) == {name for name in source.tensors if name.startswith("model.")}


@pytest.mark.parametrize("distributed", [False, True])
def test_the_optimizer_of_grouped_experts_goes_by_linear_layer(distributed: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, expert_model_parallel_size=2)
    _, grouped = write(config, tmp_path / "a")
    rename(grouped, group)
    source = MemorySource(config, distributed=distributed)
    source.folder = grouped
    read = MegatronTorchSource(write_megatron_torch(source, tmp_path / "b", 12))
    same(read, source)
    keys = [key for key in read.ranks[0, 0].chunks[0] if ".layers.0.mlp.experts." in key]
    experts = "decoder.layers.0.mlp.experts.local_experts"
    assert keys == [f"{experts}.{n}.linear_fc{layer}.weight" for layer in (1, 2) for n in (0, 1)]


def test_grouped_experts_are_written_as_they_came(tmp_path: Path) -> None:
    source, folder = write(PLAIN, tmp_path / "a")
    rename(folder, group)
    grouped = MegatronTorchSource(folder)
    again = write_megatron_torch(grouped, tmp_path / "b", 12)
    keys = torch.load(again / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
    assert "decoder.layers.3.mlp.experts.linear_fc2.weight3" in keys
    assert not any("local_experts" in key for key in keys)
    same(MegatronTorchSource(again), source)


def test_what_files_of_experts_cannot_hold_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    with pytest.raises(ConfigurationError, match="--expert-tensor-parallel-size 1 with --tensor-model-parallel-size 2"):
        write(config, tmp_path / "a")
    fits = dataclasses.replace(config, expert_model_parallel_size=2)
    write(fits, tmp_path / "b")
    larger = dataclasses.replace(fits, tensor_model_parallel_size=1, expert_tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="or an expert-tensor-parallel size of 1"):
        write(larger, tmp_path / "c")


def test_a_missing_rank_and_other_experts_are_named(tmp_path: Path) -> None:
    _, folder = write(dataclasses.replace(EXPERTS, **LAYOUTS["tp2-pp2-ep4"]), tmp_path / "a")
    (folder / "mp_rank_01_000_002" / "model_optim_rng.pt").unlink()
    (folder / "mp_rank_01_000_002").rmdir()
    with pytest.raises(DamagedCheckpointError, match="mp_rank_01_000_002 is missing"):
        MegatronTorchSource(folder)

    def jitter(state: dict[str, Any], arguments: Any) -> dict[str, Any]:
        arguments.moe_input_jitter_eps = 0.1
        return state

    _, folder = write(PLAIN, tmp_path / "b")
    rename(folder, jitter)
    with pytest.raises(CheckpointError, match=r"not supported: moe_input_jitter_eps 0\.1"):
        MegatronTorchSource(folder)


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
