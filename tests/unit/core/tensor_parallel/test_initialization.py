"""Initial values by seed, name and index, torch's own generator in a run, and seeds by name."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ONE_RANK
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import Box, ParamSpec, even_shards, full_shards, spec_of, stacked_shards
from megatron.core.tensor_parallel.initialization import (
    TILE_COLUMNS,
    TILE_ROWS,
    _divide,
    initialize_module,
    initialize_parameter,
    normal_box,
    tile_key,
)
from megatron.core.tensor_parallel.random import DEFAULT, RngStreams, stream_seed
from megatron.core.tensor_parallel.sharded_layers import make_parameter
from tests.harness.toy_model import SEED, make_model, make_rng

SHAPE = (2 * TILE_ROWS + 37, TILE_COLUMNS + 19)


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    return normal_box(5, "w", SHAPE, Box((0, 0), SHAPE))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_box_is_a_cut_of_the_whole(whole: np.ndarray, data: st.DataObject) -> None:
    offset = tuple(data.draw(st.integers(0, length - 1)) for length in SHAPE)
    shape = tuple(data.draw(st.integers(1, length - start)) for length, start in zip(SHAPE, offset))
    box = Box(offset, shape)
    assert np.array_equal(normal_box(5, "w", SHAPE, box), whole[box.slices])


def test_values_are_standard_normal(whole: np.ndarray) -> None:
    count = whole.size
    assert abs(whole.mean()) < 5 / count**0.5
    assert abs(whole.std() - 1) < 5 / (2 * count) ** 0.5
    assert abs((np.abs(whole) < 1).mean() - 0.6826895) < 0.005
    assert abs((whole**4).mean() - 3) < 0.1
    assert len(np.unique(whole)) > 0.9 * count


def test_tiles_do_not_repeat(whole: np.ndarray) -> None:
    """Neighboring tiles, and neighboring rows in a tile, are uncorrelated."""
    parts = [whole[:200, :15], whole[TILE_ROWS : TILE_ROWS + 200, :15], whole[:200, TILE_COLUMNS : TILE_COLUMNS + 15]]
    parts.append(whole[1:201, :15])
    for index, first in enumerate(parts):
        for second in parts[index + 1 :]:
            assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1


def test_names_and_seeds_give_different_values() -> None:
    box = Box((0, 0), (40, 30))
    values = [normal_box(seed, name, (40, 30), box) for seed, name in ((5, "w"), (6, "w"), (5, "v"), (51, "w"))]
    for index, first in enumerate(values):
        for second in values[index + 1 :]:
            assert not np.any(first == second)


def test_keys_of_64_bits_are_not_rounded() -> None:
    """A key above 2**63 that passes through a float loses its low bits, and with them the distinctness of names."""
    name = next(f"w{i}" for i in range(100) if tile_key(5, f"w{i}") > 2**63 and tile_key(5, f"w{i}") % 2048)
    key = np.array([tile_key(5, name), 0], dtype=np.uint64)
    drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal((TILE_ROWS, TILE_COLUMNS), np.float32)
    assert np.array_equal(normal_box(5, name, (3, 4), Box((0, 0), (3, 4))), drawn[:3, :4])


def test_more_and_fewer_dims_than_two() -> None:
    cube = normal_box(5, "w", (7, 4, 3), Box((0, 0, 0), (7, 4, 3)))
    assert np.array_equal(normal_box(5, "w", (7, 4, 3), Box((2, 1, 0), (3, 2, 3))), cube[2:5, 1:3])
    assert np.array_equal(normal_box(5, "w", (7, 4, 3), Box((2, 1, 1), (3, 2, 2))), cube[2:5, 1:3, 1:])
    vector = normal_box(5, "w", (600,), Box((0,), (600,)))
    assert np.array_equal(normal_box(5, "w", (600,), Box((250,), (300,))), vector[250:550])


def test_padding_is_zero_and_the_rest_has_mean_and_standard_deviation() -> None:
    spec = ParamSpec("w", (900, 40), even_shards((900, 40), 0, 1, 2, 1024), init_mean=0.5, init_std=0.02)
    parameter = make_parameter((512, 40), spec, torch.float32, "cpu")
    initialize_parameter(parameter, 5)
    values = parameter.detach()
    assert not values[388:].any()
    expected = normal_box(5, "w", (900, 40), Box((512, 0), (388, 40))) * np.float32(0.02) + np.float32(0.5)
    assert np.array_equal(values[:388].numpy(), expected)
    assert values[:388].mean().item() == pytest.approx(0.5, abs=0.001)
    assert values[:388].std().item() == pytest.approx(0.02, rel=0.03)


def test_constant_parameters_keep_their_padding_zero() -> None:
    spec = ParamSpec("b", (5,), even_shards((5,), 0, 1, 2, 8), init_mean=1.0)
    parameter = make_parameter((4,), spec, torch.float32, "cpu")
    initialize_parameter(parameter, 5)
    assert parameter.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_stacked_shards_are_cuts_of_one_tensor() -> None:
    shape = (12, 10)
    whole = make_parameter(shape, ParamSpec("w", shape, full_shards(shape), init_std=1.0), torch.float32, "cpu")
    initialize_parameter(whole, 5)
    for rank in range(3):
        spec = ParamSpec("w", shape, stacked_shards(shape, 0, rank, 3, 2), init_std=1.0)
        shard = make_parameter((4, 10), spec, torch.float32, "cpu")
        initialize_parameter(shard, 5)
        gate, up = whole[:6].chunk(3)[rank], whole[6:].chunk(3)[rank]
        assert torch.equal(shard, torch.cat((gate, up)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_hold_the_rounded_float32_values(dtype: torch.dtype) -> None:
    spec = ParamSpec("w", (30, 20), full_shards((30, 20)), init_std=0.02)
    single, other = (make_parameter((30, 20), spec, kind, "cpu") for kind in (torch.float32, dtype))
    initialize_parameter(single, 5)
    initialize_parameter(other, 5)
    assert torch.equal(other, single.to(dtype))


def test_model_takes_its_deviations_from_the_configuration() -> None:
    config = {"num_layers": 3, "hidden_size": 96, "kv_channels": 24, "ffn_hidden_size": 200, "init_method_std": 0.05}
    model = make_model(single_rank_group(), **config)
    assert model.embedding is not None
    layer = model.decoder.layers["1"]
    assert layer.mlp.linear_fc1.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.05 / 6**0.5, rel=0.05)
    assert layer.self_attention.linear_proj.weight.std().item() == pytest.approx(0.05 / 6**0.5, rel=0.05)
    assert layer.self_attention.linear_qkv.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert model.embedding.word_embeddings.weight[:53].std().item() == pytest.approx(0.05, rel=0.06)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "layernorm" in name:
            assert (parameter == 1).all(), name
    centered = make_model(single_rank_group(), apply_layernorm_1p=True)
    assert not centered.decoder.layers["0"].input_layernorm.weight.any()


def test_every_parameter_is_drawn_apart() -> None:
    model = make_model(single_rank_group(), untie_embeddings_and_output_weights=True)
    drawn = [parameter.detach().ravel()[:100] for parameter in model.parameters() if spec_of(parameter).init_std]
    for index, first in enumerate(drawn):
        for second in drawn[index + 1 :]:
            assert not torch.equal(first / first.std(), second / second.std())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    initialize_module(model, 1235)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters())]
    assert changed == [spec_of(parameter).init_std > 0 for parameter in model.parameters()]


def test_stages_of_a_pipeline_hold_the_layers_of_the_whole_model() -> None:
    """Layer numbers are global, so the second stage's first layer is the whole model's third."""
    tp: Group = single_rank_group()
    whole = make_model(tp, num_layers=4, untie_embeddings_and_output_weights=True)
    stage = GPTModel(whole.config, tp, make_rng(tp), seed=SEED, layer_numbers=(2, 3), pre_process=False)
    expected = dict(whole.named_parameters())
    held = dict(stage.named_parameters())
    assert {name.split(".")[2] for name in held if ".layers." in name} == {"2", "3"}
    assert not any(name.startswith("embedding") for name in held)
    for name, parameter in held.items():
        assert torch.equal(parameter, expected[name]), name
        assert spec_of(parameter) == spec_of(expected[name])


@pytest.mark.parametrize(
    ("costs", "expected"),
    [([1] * 6, [2, 2, 2]), ([4, 1, 1, 1, 1, 4], [1, 4, 1]), ([1, 1], [1, 0, 1]), ([9, 1, 1, 1], [0, 1, 3])],
)
def test_ranks_draw_about_as_many_values_each(costs: list[int], expected: list[int]) -> None:
    blocks = [SimpleNamespace(cost=cost) for cost in costs]
    parts = _divide(blocks, 3)  # type: ignore[arg-type]
    assert [len(part) for part in parts] == expected
    assert [block for part in parts for block in part] == blocks


def streams(seed: int = 5, **place: int) -> RngStreams:
    return RngStreams(Device("cpu"), seed, {**ONE_RANK.place(), **place})


def test_seeds_fit_a_generator_and_do_not_meet() -> None:
    places = [(pp, dp, cp) for pp in range(4) for dp in range(4) for cp in range(4)]
    seeds = {stream_seed(5, stream, place) for stream in ("sampling", "request") for place in places}
    seeds |= {stream_seed(5, "request", (*place, tp)) for place in places for tp in range(4)}
    assert len(seeds) == 64 * 2 + 256
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_default_generator_starts_equal_on_every_rank() -> None:
    drawn = []
    for tp_rank in range(3):
        streams(tp=tp_rank, dp=tp_rank)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp"])
def test_drawn_samples_differ_over_data_parallel_ranks_alone(axis: str) -> None:
    device = torch.device("cpu")
    states = [streams(**{axis: rank}).draw_dropout_samples(3, device).states for rank in (0, 1)]
    assert torch.equal(*states) == (axis != "dp")
    rng = streams()
    first, second = (rng.draw_dropout_samples(3, device).states for _ in range(2))
    assert len({*first.tolist(), *second.tolist()}) == 6


def test_the_default_generator_goes_on_or_starts_anew() -> None:
    rng = streams()
    torch.rand(2)
    states = {name: state.clone() for name, state in rng.state_dict().items()}
    assert list(states) == [DEFAULT]
    expected = torch.rand(3)
    streams(99, tp=3).resume(states, 10)
    assert torch.equal(torch.rand(3), expected)
    anew = []
    for iteration in (10, 11, 10):
        streams().resume({"an older checkpoint's": torch.zeros(3)}, iteration)
        anew.append(torch.rand(3))
    assert torch.equal(anew[0], anew[2])
    assert not torch.equal(anew[0], anew[1])
