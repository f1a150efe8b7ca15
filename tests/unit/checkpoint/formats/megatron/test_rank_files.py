"""What is written as Megatron's files reads back as what it was, at every layout and with every optimizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.checkpoint_source import CheckpointSource
from megatron.checkpoint.formats.megatron.stored_optimizer import is_weight_of, may_be_in_float8
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.ops.fp8_tensor import E4M3, WHOLE, quantize
from tests.unit.checkpoint.formats.megatron.memory_source import SMALL, MemorySource

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp4-more-than-groups": {"tensor_model_parallel_size": 4},
    "pp2": {"pipeline_model_parallel_size": 2},
    "tp2-pp2-vpp2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
    "pp2-uneven-chunks": {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|tt|t|tL"},
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied-rms": {"untie_embeddings_and_output_weights": True, "normalization": "RMSNorm"},
    "qwen-bf16": {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True, "bf16": True},
    "rope-fp16": {"swiglu": False, "position_embedding_type": "rope", "fp16": True},
    "sinks": {"softmax_type": "learnable"},
    "no-rope": {"position_embedding_type": "rope", "no_rope_freq": "[0, 1, 0, 0]"},
    "windows": {"window_size": "7,0", "window_attn_skip_freq": "2"},
    "scaled-rope": {
        "position_embedding_type": "rope",
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
        "rope_scaling_low_freq_factor": 1.5,
        "rope_scaling_high_freq_factor": 6.0,
        "rope_scaling_original_max_position_embeddings": 32,
    },
}
CASES = [
    *(("tied", layout, False) for layout in LAYOUTS),
    *(("qwen-bf16", layout, True) for layout in LAYOUTS),
    ("tied", "pp2-uneven-chunks", True),
    ("untied-rms", "tp2-pp2-vpp2", False),
    ("untied-rms", "pp2", True),
    ("rope-fp16", "tp2", False),
    ("rope-fp16", "pp2", True),
    ("scaled-rope", "tp2", False),
    ("windows", "tp2", False),
    ("sinks", "tp2-pp2-vpp2", False),
    ("sinks", "pp2", True),
    ("no-rope", "one", False),
]


def same(ours: CheckpointSource, theirs: CheckpointSource) -> None:
    """Compare every tensor bit by bit, and the shared state that a run goes on from."""
    assert ours.tensors == theirs.tensors
    for name in ours.tensors:
        assert torch.equal(ours.read(name), theirs.read(name)), name
    for key in ("progress", "optimizer", "scheduler"):
        assert ours.common[key] == theirs.common[key], key


def write_and_open(source: CheckpointSource, directory: Path) -> MegatronTorchSource:
    return MegatronTorchSource(write_megatron_torch(source, directory, 12))


@pytest.mark.default(4)
@pytest.mark.parametrize(("model", "layout", "distributed"), CASES)
def test_what_is_written_reads_back(model: str, layout: str, distributed: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, **MODELS[model], **LAYOUTS[layout])
    source = MemorySource(config, distributed=distributed, overlap=distributed)
    written = write_and_open(source, tmp_path)
    same(written, source)
    written.check_storages()
    assert written.model == config
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"12"


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_the_vocabulary_keeps_its_size_whatever_the_tokenizer(layout: str, tmp_path: Path) -> None:
    source = MemorySource(dataclasses.replace(SMALL, **LAYOUTS[layout]))
    source.common["config"]["tokenizer"] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "gone"}
    written = write_and_open(source, tmp_path)
    assert written.padded_vocab_size == 64
    same(written, source)


def test_files_without_the_size_take_it_from_the_record_beside_them(tmp_path: Path) -> None:
    source = MemorySource(SMALL)
    source.common["config"]["tokenizer"] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "gone"}
    folder = write_megatron_torch(source, tmp_path, 12)
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    values = torch.load(path, weights_only=False)
    del values["args"].true_vocab_size
    torch.save(values, path)
    assert MegatronTorchSource(folder).model.vocab_size == 64
    (folder / "tokenizer").mkdir()
    for recorded, expected in ((61, 61), (50, 64)):
        (folder / "tokenizer" / "tokenizer_record.json").write_text(json.dumps({"vocab_size": recorded}))
        assert MegatronTorchSource(folder).model.vocab_size == expected


def test_a_model_that_arguments_cannot_describe_is_refused(tmp_path: Path) -> None:
    source = MemorySource(dataclasses.replace(SMALL, use_parallel_residual=True), has_optimizer=False)
    with pytest.raises(
        ConfigurationError, match="Megatron has no arguments for --use-parallel-residual; use the native format"
    ):
        write_megatron_torch(source, tmp_path, 12)
    assert not list(tmp_path.glob("*/*/*.pt"))


@pytest.mark.parametrize("write", [write_megatron_torch, write_torch_dist])
def test_the_state_of_an_optimizer_that_megatron_does_not_have_is_rejected_by_name(
    write: Callable[[CheckpointSource, Path, int], Path], tmp_path: Path
) -> None:
    source = MemorySource(SMALL)
    config = source.common["config"]
    source.common = {**source.common, "config": {**config, "optimizer": {**config["optimizer"], "optimizer": "lion"}}}
    with pytest.raises(ConfigurationError, match="cannot store the state of --optimizer lion; use the native format"):
        write(source, tmp_path, 3)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.full
def test_layouts_follow_each_other_without_a_loss(tmp_path: Path) -> None:
    source: CheckpointSource = MemorySource(dataclasses.replace(SMALL, bf16=True), distributed=True)
    original = source
    for number, (tp, pp, distributed) in enumerate([(2, 2, False), (4, 1, True), (1, 4, True), (2, 1, False)]):
        model = source.common["config"]["model"] | {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
        }
        config = source.common["config"] | {"model": model, "ddp": {"use_distributed_optimizer": distributed}}
        view = Retargeted(source, config)
        source = write_and_open(view, tmp_path / str(number))
        same(source, original)


class Retargeted:
    """Pass a source on with another configuration."""

    def __init__(self, source: CheckpointSource, config: dict[str, Any]) -> None:
        self.common = dict(source.common) | {"config": config}
        self.folder, self.tensors, self.read, self.close = source.folder, source.tensors, source.read, source.close


@pytest.mark.parametrize(("divisor", "rows"), [(8, 32), (40, 40)])
def test_other_padding_at_the_same_layout_is_what_the_configuration_asks_for(
    divisor: int, rows: int, tmp_path: Path
) -> None:
    first = write_and_open(MemorySource(dataclasses.replace(SMALL, tensor_model_parallel_size=2)), tmp_path / "first")
    config = dict(first.common["config"])
    config["model"] = config["model"] | {"make_vocab_size_divisible_by": divisor}
    second = write_and_open(Retargeted(first, config), tmp_path / "second")
    same(second, first)
    path = second.folder / "mp_rank_01" / "model_optim_rng.pt"
    values = torch.load(path, weights_only=False)
    assert values["model"]["embedding.word_embeddings.weight"].shape == (rows, 24)
    assert values["args"].padded_vocab_size == 2 * rows


def test_release_has_no_iteration(tmp_path: Path) -> None:
    source = MemorySource(SMALL, has_optimizer=False)
    folder = write_megatron_torch(source, tmp_path, "release")
    assert folder == tmp_path / "release"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"release"
    written = MegatronTorchSource(folder)
    assert written.common["progress"]["iteration"] == 0
    assert written.common["optimizer"] is None
    for name in source.tensors:
        assert torch.equal(written.read(name), source.read(name)), name


def test_padding_is_zero_in_the_files_and_dropped_from_them(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, tensor_model_parallel_size=4)
    folder = write_megatron_torch(MemorySource(config), tmp_path, 3)
    file = torch.load(folder / "mp_rank_03" / "model_optim_rng.pt", weights_only=False)
    rows = file["model"]["embedding.word_embeddings.weight"]
    moments = file["optimizer"]["state"][0]["exp_avg"]
    assert rows.shape == moments.shape == (16, 24)
    assert rows[:13].ne(0).all()
    assert moments[:13].ne(0).all()
    assert rows[13:].eq(0).all()
    assert moments[13:].eq(0).all()
    assert MegatronTorchSource(folder).tensors["model.embedding.word_embeddings.weight"].global_shape == (61, 24)


def test_torch_itself_reads_the_files(tmp_path: Path) -> None:
    config: GPTConfig = dataclasses.replace(SMALL, pipeline_model_parallel_size=2, bf16=True)
    folder = write_megatron_torch(MemorySource(config, distributed=True), tmp_path, 3)
    for path in folder.glob("*/model_optim_rng.pt"):
        assert torch.load(path, weights_only=False)["iteration"] == 3
        flat = torch.load(path.with_name("distrib_optim.pt"), weights_only=False, mmap=True)
        (buffers,) = flat[0].values()
        assert list(flat[0]) == [(torch.bfloat16, torch.float32)]
        assert {name: len(values) for name, values in buffers.items() if name != "numel_unpadded"} == dict.fromkeys(
            ("param", "exp_avg", "exp_avg_sq"), buffers["numel_unpadded"]
        )


@pytest.fixture
def main() -> torch.Tensor:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5))
    return values * torch.logspace(-9, 1, 4000)


def test_every_number_that_was_rounded_in_fp8_is_its_own(main: torch.Tensor) -> None:
    weight = quantize(main.bfloat16().view(1, -1), E4M3, WHOLE).values()[0].bfloat16()
    assert (weight == 0).any()
    assert all(is_weight_of(one, other, main) for one, other in zip(main, weight, strict=True))
    exact = [is_weight_of(one, other) for one, other in zip(main, weight, strict=True)]
    assert not all(exact)


def test_others_are_not(main: torch.Tensor) -> None:
    weight = quantize(main.bfloat16().view(1, -1), E4M3, WHOLE).values()[0].bfloat16()
    large = main.abs() > 1e-3 * main.abs().max()
    taken = [is_weight_of(one, other, main) for one, other in zip(main[large], weight[large].roll(1), strict=True)]
    assert sum(taken) < 0.1 * len(taken)
    nan = torch.tensor(float("nan"))
    assert is_weight_of(nan, nan.bfloat16())
    assert not is_weight_of(nan, torch.tensor(1.0), main)
    assert not is_weight_of(torch.tensor(1.0), nan, main)


def test_a_weight_of_a_near_iteration_is_not(main: torch.Tensor) -> None:
    """What moved by a few per cent would be rounded to the same in fp8; a weight that never was in fp8 is no such."""
    main = main[main.abs() > 1e-6]
    weight = main.bfloat16()
    moved = 1.03 * main
    taken = [is_weight_of(one, other, moved) for one, other in zip(moved, weight, strict=True)]
    # One in sixteen of bfloat16's numbers is one of E4M3's, too.
    assert sum(taken) < 0.1 * len(taken)


def test_arguments_may_say_that_nothing_was_gathered_in_fp8() -> None:
    assert may_be_in_float8({})
    assert may_be_in_float8({"fp8_param_gather": True})
    assert not may_be_in_float8({"fp8_param_gather": False})
