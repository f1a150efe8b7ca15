"""The converter on checkpoints of real runs: what comes out is what went in, and a run goes on from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import conversion
from megatron.checkpoint.checkpoint_folder import find_checkpoint
from megatron.checkpoint.comparison import ConversionMismatchError, compare_sources, diff_checkpoints
from megatron.checkpoint.conversion import convert
from megatron.checkpoint.formats.native import NativeSource
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.cli.convert import parse_arguments
from megatron.config.run_config import RunConfig
from megatron.core.errors import CheckpointError
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.forked_training import fork_training

STATE = ("progress", "optimizer", "scheduler", "tokenizer")
PADDED = "--make-vocab-size-divisible-by 96"
HALF_WAY = "--bf16 --exit-interval 4 --num-layers 4"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run at DP 2 with the distributed optimizer, stopped at iteration 4 of 20."""
    folder = tmp_path_factory.mktemp("trained")
    fork_training(toy_args(folder, HALF_WAY, "--use-distributed-optimizer"), 2).check()
    return folder / "checkpoints"


def run_converter(load: Path, save: Path, *more: str) -> list[str]:
    lines: list[str] = []
    words = ["--load-dir", str(load), "--save-dir", str(save), *" ".join(more).split()]
    convert(parse_arguments(words)[0], lines.append)
    return lines


@pytest.mark.parametrize("origin", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_there_and_back_by_torch_dist(origin: str, trained: Path, tmp_path: Path) -> None:
    start = trained
    if origin == "torch":
        start = tmp_path / "torch"
        run_converter(trained, start, "--saver torch")
    sizes = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    run_converter(start, tmp_path / "between", "--saver torch_dist", sizes)
    # 128 tokens are padded to a multiple of 8 x 2; --make-vocab-size-divisible-by 96 pads them to 192.
    run_converter(tmp_path / "between", tmp_path / "padded", "--loader torch_dist --saver torch_dist", PADDED)
    run_converter(tmp_path / "padded", tmp_path / "back", f"--saver {origin}")
    lines: list[str] = []
    assert diff_checkpoints(start, tmp_path / "back", log=lines.append), lines
    back = open_checkpoint(newest(tmp_path / "back"))
    assert back.tensors["optimizer.main_param.embedding.word_embeddings.weight"].global_shape == (128, 32)
    back.close()


@pytest.mark.default
def test_another_layout_holds_the_same_bits_and_is_resumed(trained: Path, tmp_path: Path) -> None:
    lines = run_converter(
        trained, tmp_path / "checkpoints", "--target-tensor-parallel-size 1 --target-pipeline-parallel-size 2"
    )
    result = newest(tmp_path / "checkpoints")
    assert result.name == "iter_0000004"
    assert any("writing" in line and "MB/s" in line for line in lines)
    assert any("are equal, bit by bit" in line for line in lines)
    assert not list((tmp_path / "checkpoints").glob(".*"))

    old, new = (NativeSource(folder, with_random_streams=True) for folder in (newest(trained), result))
    assert any(name.startswith("rng.") for name in new.tensors)
    names = {name.split(".")[1] for name in new.tensors if name.startswith("optimizer.")}
    assert names == {"exp_avg", "exp_avg_sq", "main_param"}
    assert [str(item) for item in compare_sources(old, new) if not item.is_equal] == []
    for key in STATE:
        assert new.common[key] == old.common[key], key
    model = RunConfig.from_dict(new.common["config"]).model
    assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == (1, 2)
    assert new.common["layout"] == old.common["layout"], "the streams are those of the layout that wrote them"
    old.close()
    new.close()

    flags = f"{HALF_WAY} --exit-interval 8"
    (tmp_path / "direct").mkdir()
    converted = fork_training([*toy_args(tmp_path, flags), "--save", str(tmp_path / "after")], 1).check()
    words = toy_args(tmp_path / "direct", flags, "--load", trained)
    direct = fork_training(words, 1).check()
    assert "at iteration 4" in converted.stdout
    assert exact_figures(converted.metrics) == exact_figures(direct.metrics)
    assert len(converted.iterations()) == 4


@pytest.mark.default
def test_there_and_back_is_the_same_checkpoint(trained: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    run_converter(trained, there, "--target-pipeline-parallel-size 4 --target-tensor-parallel-size 4")
    run_converter(there, back, "--target-pipeline-parallel-size 1 --target-tensor-parallel-size 1")
    old, new = NativeSource(newest(trained)), NativeSource(newest(back))
    assert [str(item) for item in compare_sources(old, new) if not item.is_equal] == []
    assert {key: old.common[key] for key in STATE} == {key: new.common[key] for key in STATE}
    old.close()
    new.close()


@pytest.mark.default
def test_megatrons_format_and_back_keeps_all_of_a_run(trained: Path, tmp_path: Path) -> None:
    lines = run_converter(
        trained,
        tmp_path / "torch",
        "--saver mcore --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2",
        "--target-num-layers-per-virtual-pipeline-stage 1",
    )
    assert any("are equal, bit by bit" in line for line in lines)
    folder = tmp_path / "torch" / "iter_0000004"
    assert sorted(path.name for path in folder.glob("mp_rank_*")) == [
        f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(2)
    ]
    assert len(list(folder.glob("*/distrib_optim.pt"))) == 4
    run_converter(
        tmp_path / "torch", tmp_path / "one", "--target-tensor-parallel-size 1 --target-pipeline-parallel-size 1"
    )
    assert sorted(path.name for path in (tmp_path / "one" / "iter_0000004").glob("mp_*")) == ["mp_rank_00"]
    run_converter(tmp_path / "one", tmp_path / "native", "--loader torch --saver megatron")
    old, new = NativeSource(newest(trained)), NativeSource(newest(tmp_path / "native"))
    assert [str(item) for item in compare_sources(old, new) if not item.is_equal] == []
    assert {key: old.common[key] for key in STATE[:3]} == {key: new.common[key] for key in STATE[:3]}
    old.close()
    new.close()


@pytest.mark.default
def test_a_damaged_file_of_megatrons_is_refused(trained: Path, tmp_path: Path) -> None:
    run_converter(trained, tmp_path / "torch", "--saver torch")
    path = next((tmp_path / "torch" / "iter_0000004").glob("mp_rank_00*/model_optim_rng.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"do not match their checksum; it holds"):
        run_converter(tmp_path / "torch", tmp_path / "native", "--loader torch --saver native")
    assert not (tmp_path / "native").exists()


def test_weights_alone_in_another_type(trained: Path, tmp_path: Path) -> None:
    lines = run_converter(trained, tmp_path, "--no-save-optim --fp16")
    assert any("without optimizer state" in line for line in lines)
    old, new = NativeSource(newest(trained)), NativeSource(newest(tmp_path))
    assert new.common["optimizer"] is None
    assert new.common["scheduler"] is None
    assert RunConfig.from_dict(new.common["config"]).model.params_dtype == "float16"
    assert sorted(new.tensors) == sorted(name for name in old.tensors if name.startswith("model."))
    for name in new.tensors:
        assert torch.equal(new.read(name), old.read(name).half()), name
    old.close()
    new.close()


def test_a_wrong_result_is_not_published(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "optimizer.exp_avg.decoder.layers.2.mlp.linear_fc1.weight"
    right = conversion.write_native

    class WrongSource(conversion.SourceView):
        def read(self, wanted: str, box: object = None) -> torch.Tensor:
            values = super().read(wanted, box)  # type: ignore[arg-type]
            if wanted == name:
                values.view(-1)[5] += 1e-3
            return values

    monkeypatch.setattr(
        conversion,
        "write_native",
        lambda source, *rest, **options: right(WrongSource(source, source.common), *rest, **options),
    )
    with pytest.raises(ConversionMismatchError, match=rf"not published: {name}: 1 of \d+ elements differ"):
        run_converter(trained, tmp_path / "result")
    assert not (tmp_path / "result").exists()
    run_converter(trained, tmp_path / "unchecked", "--no-verify")
    assert newest(tmp_path / "unchecked").is_dir()


def test_an_index_that_says_something_else_is_not_published(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = conversion.write_native

    def write(source: conversion.SourceView, *rest: Any, **options: Any) -> Path:
        progress = json.loads(json.dumps(source.common["progress"]))
        progress["consumed_train_samples"] += 1
        return right(conversion.SourceView(source, {**source.common, "progress": progress}), *rest, **options)

    monkeypatch.setattr(conversion, "write_native", write)
    with pytest.raises(ConversionMismatchError, match=r"progress: .*became"):
        run_converter(trained, tmp_path / "result")
    assert not (tmp_path / "result").exists()


def test_random_streams_cross_megatrons_formats(tmp_path: Path) -> None:
    flags = "--exit-interval 2 --train-iters 4 --eval-interval 100"
    start = tmp_path / "start"
    fork_training(toy_args(start, flags, "--ckpt-format torch_dist"), 1).check()
    run_converter(start / "checkpoints", tmp_path / "torch", "--saver torch")
    run_converter(tmp_path / "torch", tmp_path / "torch_dist", "--saver torch_dist")
    run_converter(tmp_path / "torch_dist", tmp_path / "again", "--saver torch_dist")
    figures = []
    for folder in (start / "checkpoints", tmp_path / "torch", tmp_path / "torch_dist", tmp_path / "again"):
        words = toy_args(tmp_path / f"after {folder.name}", flags, "--load", folder)
        run = fork_training(words, 1).check()
        assert "start anew" not in run.stdout, folder
        figures.append(exact_figures(run.iterations()))
    assert len(figures[0]) == 2
    assert figures == [figures[0]] * 4


@pytest.fixture(scope="module")
def of_each_format(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the trained checkpoint in every format."""
    folder = tmp_path_factory.mktemp("formats")
    for name in ("torch", "torch_dist", "hf"):
        run_converter(trained, folder / name, f"--saver {name}")
    return {"native": trained, **{name: folder / name for name in ("torch", "torch_dist", "hf")}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("loader", "saver"), list(itertools.permutations(("native", "torch", "torch_dist", "hf"), 2)), ids="-to-".join
)
def test_every_format_becomes_every_other(
    loader: str, saver: str, of_each_format: dict[str, Path], tmp_path: Path
) -> None:
    run_converter(of_each_format[loader], tmp_path / saver, f"--loader {loader} --saver {saver}")
    lines: list[str] = []
    weights_only = "hf" in (loader, saver)
    folders = (of_each_format["native"], tmp_path / saver)
    assert diff_checkpoints(*folders, weights_only=weights_only, log=lines.append), lines
    old, new = (open_checkpoint(find_checkpoint(folder).folder) for folder in folders)
    assert new.common["config"]["model"]["vocab_size"] == old.common["config"]["model"]["vocab_size"] == 128
    kinds = {name.split(".")[1] for name in new.tensors if name.startswith("optimizer.")}
    assert kinds == (set() if weights_only else {"exp_avg", "exp_avg_sq", "main_param"})
    assert (new.common["optimizer"] is None) == weights_only
    if not weights_only:
        assert new.common["optimizer"]["num_steps"] == old.common["optimizer"]["num_steps"] == 4
    old.close()
    new.close()
