"""What ``args`` of Megatron's files mean here, and which of them no model here can have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.arguments import arguments_of_config, stored_fields
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from megatron.config.arguments import resolve_arguments
from megatron.core.config_base import FieldSpec, with_fields
from megatron.core.errors import CheckpointError
from tests.unit.checkpoint.formats.megatron.memory_source import SMALL, MemorySource
from tests.unit.config.command_lines import MINIMAL

FROZEN = Path(__file__).with_name("frozen_arguments.json")


def kind_of(spec: FieldSpec) -> str:
    name = spec.item_type.__name__
    return f"{name}s" if spec.is_sequence else f"{name} or none" if spec.is_optional else name


def test_the_pairs_of_fields_and_arguments_are_the_frozen_ones_in_their_order() -> None:
    now: dict[str, dict[str, list[str]]] = {}
    for section, spec, names in stored_fields():
        now.setdefault(section, {})[spec.name] = [kind_of(spec), *names]
    assert json.dumps(now) == json.dumps(json.loads(FROZEN.read_text(encoding="utf-8")))


def test_the_arguments_of_a_run_have_the_frozen_names_and_no_others() -> None:
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    names = {name for fields in frozen.values() for _, *names in fields.values() for name in names}
    written = arguments_of_config(resolve_arguments(MINIMAL, 1).config.to_dict())
    assert set(written) == names | {"window_size", "window_attn_skip_freq", "no_rope_freq"}


def write_changed(directory: Path, config: Any, **arguments: Any) -> Path:
    folder = write_megatron_torch(MemorySource(config, has_optimizer=False), directory, 3)
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    values = torch.load(path, weights_only=False)
    for name, value in arguments.items():
        setattr(values["args"], name, value)
    torch.save(values, path)
    return folder


def test_the_number_of_groups_counts_only_with_its_flag(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, group_query_attention=False, num_query_groups=SMALL.num_attention_heads)
    folder = write_changed(tmp_path, config, num_query_groups=1)
    source = MegatronTorchSource(folder)
    assert source.model == config
    source.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_embedding_type", "mrope"),
        ("normalization", "L2Norm"),
        ("softmax_type", "off-by-two"),
        ("use_mup", True),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    folder = write_changed(tmp_path, SMALL, **{name: value})
    with pytest.raises(CheckpointError, match=rf"model that is not supported: {name} ") as caught:
        MegatronTorchSource(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_args_say_whose_layers_a_run_had_and_no_run_takes_them_from_there(impl: str, tmp_path: Path) -> None:
    folder = write_changed(tmp_path, dataclasses.replace(SMALL, transformer_impl=impl))
    values = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert values["args"].transformer_impl == impl
    assert "decoder.layers.0.input_layernorm.weight" in values["model"]
    source = MegatronTorchSource(folder)
    assert source.model == SMALL
    source.close()


def test_a_window_is_one_of_causal_attention(tmp_path: Path) -> None:
    folder = write_changed(tmp_path / "causal", SMALL, window_size=(128, 0), window_attn_skip_freq=[1, 0, 1, 1])
    source = MegatronTorchSource(folder)
    assert source.model == dataclasses.replace(SMALL, window_size="128,0", window_attn_skip_freq="[1, 0, 1, 1]")
    source.close()
    with pytest.raises(CheckpointError, match=r"args\.window_size is \(128, 4\); \(N, 0\) is expected"):
        MegatronTorchSource(write_changed(tmp_path / "other", SMALL, window_size=(128, 4)))
    changes: dict[str, Any] = {"window_size": (128, 0), "window_attn_skip_freq": [1, 0]}
    with pytest.raises(CheckpointError, match=r"args\.window_attn_skip_freq is \[1, 0\]: the list has 2 entries"):
        MegatronTorchSource(write_changed(tmp_path / "short", SMALL, **changes))


def test_layers_without_rotary_positions_are_a_number_or_a_list(tmp_path: Path) -> None:
    rotary = dataclasses.replace(SMALL, position_embedding_type="rope")
    for value in (2, [0, 1, 1, 0]):
        source = MegatronTorchSource(write_changed(tmp_path / str(value), rotary, no_rope_freq=value))
        assert source.model == dataclasses.replace(rotary, no_rope_freq=str(value))
        source.close()
    with pytest.raises(CheckpointError, match=r"args\.no_rope_freq is \[1, 0\]: the list has 2 entries"):
        MegatronTorchSource(write_changed(tmp_path / "short", rotary, no_rope_freq=[1, 0]))


STRETCHED = with_fields(
    SMALL,
    position_embedding_type="rope",
    rope_type="yarn",
    rotary_scaling_factor=32.0,
    original_max_position_embeddings=9,
    beta_fast=24.0,
    beta_slow=2.0,
    mscale=0.7,
    mscale_all_dim=0.3,
    yarn_correction_range_round_to_int=False,
)


def test_stretched_positions_have_the_names_that_megatrons_model_asks_for(tmp_path: Path) -> None:
    folder = write_changed(tmp_path, STRETCHED)
    arguments = vars(torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["args"])
    assert {name: value for name, value in arguments.items() if name.startswith("yarn_")} == {
        "yarn_rotary_scaling_factor": 32.0,
        "yarn_original_max_position_embeddings": 9,
        "yarn_beta_fast": 24.0,
        "yarn_beta_slow": 2.0,
        "yarn_mscale": 0.7,
        "yarn_mscale_all_dim": 0.3,
        "yarn_correction_range_round_to_int": False,
    }
    assert arguments["position_embedding_type"] == "yarn"
    assert arguments.get("rope_type") is None, "there it is a field of latent attention, or rope"
    source = MegatronTorchSource(folder)
    assert source.model == STRETCHED
    source.close()


def test_stretched_positions_of_another_trainer(tmp_path: Path) -> None:
    """Without one of the two scales neither counts, and a factor must be there."""
    source = MegatronTorchSource(write_changed(tmp_path / "scales", STRETCHED, yarn_mscale_all_dim=None))
    assert source.model == with_fields(STRETCHED, mscale=1.0, mscale_all_dim=0.0)
    source.close()
    with pytest.raises(CheckpointError, match=r"args\.yarn_rotary_scaling_factor is None; a value of type float"):
        MegatronTorchSource(write_changed(tmp_path / "factor", STRETCHED, yarn_rotary_scaling_factor=None))
    with pytest.raises(CheckpointError, match="model that is not supported: enable_gpt_oss True"):
        MegatronTorchSource(write_changed(tmp_path / "flag", SMALL, enable_gpt_oss=True))


def test_values_that_mean_nothing_special_are_taken(tmp_path: Path) -> None:
    folder = write_changed(tmp_path, SMALL, window_size=None, softmax_type="vanilla", num_experts=None, use_mup=False)
    MegatronTorchSource(folder).close()
