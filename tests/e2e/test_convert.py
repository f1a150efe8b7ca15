"""The converter on checkpoints of real runs: any format into any other, in little memory, and a run goes on."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import conversion
from megatron.checkpoint.checkpoint_folder import find_checkpoint
from megatron.checkpoint.checkpoint_source import TensorInfo
from megatron.checkpoint.comparison import ConversionMismatchError, compare_sources, diff_checkpoints
from megatron.checkpoint.conversion import convert
from megatron.checkpoint.formats.native import NativeSource, write_native
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.cli import convert as convert_command
from megatron.cli import diff_checkpoints as diff_command
from megatron.cli import inspect_checkpoint
from megatron.cli.convert import parse_arguments
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ONE_RANK
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import Box, spec_of
from megatron.core.tensor_parallel.random import RngStreams
from tests.e2e.test_text_generation import call_tool
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.forked_training import fork_training, fork_trainings
from tests.harness.titan_llama import (
    FEED_FORWARD,
    GROUPS,
    LAYERS,
    TOLD,
    TOLD_FLAGS,
    WIDTH,
    make_weights,
    reference_logits,
    save_run,
)
from tests.harness.training_run import REPOSITORY
from tests.unit.checkpoint.formats.huggingface.tiny_models import save_model
from tests.unit.checkpoint.small_checkpoint import MemorySource, small_common

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
    with pytest.raises(CheckpointError, match=r"do not match their checksum; the file contains"):
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
    with pytest.raises(ConversionMismatchError, match=r"progress: .* instead of"):
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
        assert "restart from the seed" not in run.stdout, folder
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


LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer --bf16"
# 128 tokens are padded to a multiple of 96 x 2.
RUN = (
    f"{LAYOUT} --make-vocab-size-divisible-by 96 --train-iters 3 --lr-warmup-iters 1 --eval-interval 100 --num-layers 4"
)
MODELS = {
    "tied": "--kv-channels 8",
    "untied": "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 --ffn-hidden-size 80",
}
DIRECTIONS = tuple(itertools.permutations(("native", "torch", "torch_dist", "hf"), 2))


@pytest.fixture(scope="module")
def trained_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a run of each model at TP 2 and PP 2 with the distributed optimizer."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for run in fork_trainings([toy_args(folders[name], RUN, flags) for name, flags in MODELS.items()], 4):
        run.check()
    return {name: folder / "checkpoints" for name, folder in folders.items()}


def follow(start: Path, formats: tuple[str, ...], folder: Path) -> Path:
    """Convert ``start`` into one format after the other, and return the last result."""
    current = start
    for number, saver in enumerate(formats):
        target = folder / f"{number}-{saver}"
        run_converter(current, target, f"--loader {'hf' if 'hf' in current.name else 'megatron'} --saver {saver}")
        current = target
    return current


def assert_equal(start: Path, end: Path, *, weights_only: bool) -> None:
    lines: list[str] = []
    assert diff_checkpoints(start, end, weights_only=weights_only, log=lines.append), lines
    compared = next(line for line in lines if line.startswith("tensors: "))
    assert not compared.startswith("tensors: 0 ")


@pytest.mark.parametrize(
    ("model", "formats"),
    [
        ("tied", ("torch", "torch_dist", "native")),
        ("untied", ("torch", "torch_dist", "hf", "native")),
        pytest.param("untied", ("torch", "torch_dist", "native"), marks=pytest.mark.long),
        pytest.param("tied", ("torch", "torch_dist", "hf", "native"), marks=pytest.mark.long),
    ],
)
def test_a_cycle_through_the_formats(
    model: str, formats: tuple[str, ...], trained_checkpoint: dict[str, Path], tmp_path: Path
) -> None:
    end = follow(trained_checkpoint[model], formats, tmp_path)
    assert_equal(trained_checkpoint[model], end, weights_only="hf" in formats)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("origin", "target"), DIRECTIONS)
def test_every_direction_and_back(
    model: str, origin: str, target: str, trained_checkpoint: dict[str, Path], tmp_path: Path
) -> None:
    formats = (origin, target, "native")[origin == "native" : 2 if target == "native" else 3]
    end = follow(trained_checkpoint[model], formats, tmp_path)
    assert_equal(trained_checkpoint[model], end, weights_only="hf" in formats)


VOCAB_SIZE = 128
SHAPE = (
    f"--num-layers {LAYERS} --hidden-size {WIDTH} --ffn-hidden-size {FEED_FORWARD} --group-query-attention "
    f"--num-query-groups {GROUPS} --swiglu --normalization RMSNorm --disable-bias-linear "
    f"--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    f"--attention-dropout 0 {TOLD_FLAGS}"
)


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("titan") / "step-3", make_weights(VOCAB_SIZE))


def test_a_folder_becomes_a_native_one_and_a_model_of_hugging_faces(titan: Path, tmp_path: Path) -> None:
    lines = run_converter(titan, tmp_path / "native", "--loader torchtitan", TOLD_FLAGS)
    assert any("are equal, bit by bit" in line for line in lines)
    run_converter(titan, tmp_path / "hf", "--loader torchtitan --saver hf --test-logits", TOLD_FLAGS)
    lines = run_converter(tmp_path / "hf", tmp_path / "back", "--loader hf --rotary-base 7")
    assert "--rotary-base 7 has no effect: the checkpoint determines it" in lines
    for other in ("native", "back"):
        lines = []
        assert diff_checkpoints(titan, tmp_path / other, told=TOLD, log=lines.append), lines


def test_the_commands_name_the_flags_that_are_needed(
    titan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_checkpoint.main([str(titan), *TOLD_FLAGS.split()]) == 0
    printed = capsys.readouterr().out
    assert "format: torchtitan's format" in printed
    assert "num_query_groups=2" in printed
    for main, words in (
        (inspect_checkpoint.main, [str(titan)]),
        (diff_command.main, [str(titan), str(titan)]),
        (
            convert_command.main,
            ["--loader", "torchtitan", "--load-dir", str(titan), "--save-dir", str(tmp_path / "x")],
        ),
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            "which does not record --num-attention-heads, --rotary-base, --norm-epsilon, --max-position-embeddings; "
            "pass the values used in training"
        ) in line
    with pytest.raises(SystemExit, match="2"):
        convert_command.main(["--saver", "torchtitan", "--load-dir", str(titan), "--save-dir", str(tmp_path / "x")])
    assert "--saver torchtitan is not supported: torchtitan checkpoints can only be read" in capsys.readouterr().err


def test_text_is_generated_from_a_folder(titan: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    tokens = [3, 14, 15]
    for _ in range(5):
        tokens.append(int(reference_logits(make_weights(VOCAB_SIZE), torch.tensor([tokens]))[0, -1].argmax()))
    words = ("--load", titan, *TOLD_FLAGS.split(), "--prompt", "3 14 15", "--greedy", "--tokens-to-generate", "5")
    status, out, _ = call_tool(monkeypatch, capsys, *words)
    assert (status, out.split()) == (0, [str(token) for token in tokens])
    save_model("llama_tied", tmp_path / "hf")
    words = ("--load-hf", tmp_path / "hf", "--prompt", "3", "--greedy", "--tokens-to-generate", "1")
    status, _, errors = call_tool(monkeypatch, capsys, *words, "--rotary-base", "7")
    assert status == 0
    assert "--rotary-base 7 has no effect: the checkpoint determines it" in errors.splitlines()


def test_training_begins_with_its_weights_at_any_layout(titan: Path, tmp_path: Path) -> None:
    def begin(folder: Path, load: Path, *more: str, nproc: int = 1) -> list[float]:
        words = toy_args(folder, SHAPE, "--train-iters 2 --lr-warmup-iters 1 --eval-interval 1000", *more, save=False)
        run = fork_training([*words, "--load", load, "--metrics-jsonl", folder / "metrics.jsonl"], nproc).check()
        line = "is a torchtitan checkpoint, which does not record all model settings; assumed " + TOLD_FLAGS
        assert (line in run.stdout) == (load == titan)
        assert [step["iteration"] for step in run.iterations()] == [1, 2]
        return run.losses()

    run_converter(titan, tmp_path / "native", "--loader torchtitan", TOLD_FLAGS)
    expected = begin(tmp_path, tmp_path / "native")
    (tmp_path / "two").mkdir()
    found = begin(tmp_path / "two", titan, "--tensor-model-parallel-size 2", nproc=2)
    assert found == pytest.approx(expected, rel=1e-5)
    words = toy_args(tmp_path, SHAPE, "--num-attention-heads 12 --rotary-base 9", save=False)
    assert "num_query_groups: 4 -> 2" in fork_training([*words, "--load", titan]).errors[0]


def test_use_checkpoint_args_takes_the_shapes(titan: Path, tmp_path: Path) -> None:
    words = toy_args(tmp_path, f"--use-checkpoint-args --group-query-attention --num-query-groups {GROUPS}", save=False)
    for name in ("--num-layers", "--hidden-size"):
        del words[words.index(name) : words.index(name) + 2]
    words += [*TOLD_FLAGS.split(), "--load", str(titan), "--train-iters", "1", "--lr-warmup-iters", "0"]
    run = fork_training(words).check()
    assert "successfully loaded checkpoint" in run.stdout


GIBIBYTE = 1024**3
MODEL = """
    --num-layers 20 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 3072 --vocab-size 50256
    --make-vocab-size-divisible-by 128
"""
CONVERTER = REPOSITORY / "tools" / "checkpoint" / "convert.py"


class SyntheticSource(MemorySource):
    """Make the values of a checkpoint of 2 GB when they are asked for."""

    def __init__(self, has_flat_buffers: bool) -> None:
        common = small_common(MODEL)
        common["config"]["model"]["vocab_size"] = 50257
        common["config"]["ddp"]["use_distributed_optimizer"] = has_flat_buffers
        super().__init__({}, common)
        config = RunConfig.from_dict(common["config"]).model
        rng = RngStreams(Device("cpu"), 1, ONE_RANK.place())
        model = GPTModel(config, single_rank_group(), rng, seed=1, device="meta")
        self.infos = {
            f"{prefix}.{spec_of(parameter).name}": TensorInfo(spec_of(parameter).global_shape, torch.float32)
            for parameter in model.parameters()
            for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        }

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.infos

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        assert box is None
        generator = torch.Generator().manual_seed(len(name))
        return torch.rand(self.infos[name].global_shape, generator=generator)


def peak_of(command: Sequence[str | Path]) -> int:
    """Run a command and return the most memory that it held, in bytes."""
    process = subprocess.Popen([sys.executable, *map(str, command)], env={**os.environ, "OMP_NUM_THREADS": "2"})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.fixture
def synthetic(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, int, int]:
    """Return the folder of a checkpoint, its bytes and those of its largest tensor."""
    source = SyntheticSource(has_flat_buffers=request.param == "flat")
    write_native(source, tmp_path / "native", 3)
    sizes = [info.num_bytes for info in source.tensors.values()]
    return tmp_path / "native", sum(sizes), max(sizes)


def convert_memory_convert(origin: Path, result: Path, bound: int, *more: str) -> None:
    peak = peak_of([CONVERTER, "--load-dir", origin, "--save-dir", result, *" ".join(more).split()])
    print(f"{' '.join(more)}: peak {peak / 1e6:.0f} MB of {bound / 1e6:.0f} MB allowed")
    assert peak <= bound


@pytest.mark.long
@pytest.mark.parametrize("synthetic", ["plain"], indirect=True)
def test_between_formats_and_layouts(synthetic: tuple[Path, int, int], tmp_path: Path) -> None:
    native, total, largest = synthetic
    bound = 2 * largest + GIBIBYTE
    assert bound < total, "a converter that held the whole checkpoint would pass"
    convert_memory_convert(native, tmp_path / "tp4", bound, "--target-tensor-parallel-size 4")
    convert_memory_convert(native, tmp_path / "torch", bound, "--saver torch --target-tensor-parallel-size 2")
    convert_memory_convert(tmp_path / "torch", tmp_path / "back", bound, "--loader torch --saver native")
    convert_memory_convert(native, tmp_path / "hf", bound, "--saver hf")
    convert_memory_convert(tmp_path / "hf", tmp_path / "from_hf", bound, "--loader hf")


@pytest.mark.long
@pytest.mark.parametrize("synthetic", ["flat"], indirect=True)
def test_flat_optimizer_buffers(synthetic: tuple[Path, int, int], tmp_path: Path) -> None:
    native, total, _ = synthetic
    # The largest tensor of such a file is one moment of every parameter.
    bound = 2 * total // 3 + GIBIBYTE
    convert_memory_convert(native, tmp_path / "torch", bound, "--saver torch --target-tensor-parallel-size 1")
    assert (tmp_path / "torch" / "iter_0000003" / "mp_rank_00" / "distrib_optim.pt").is_file()
    convert_memory_convert(tmp_path / "torch", tmp_path / "back", bound, "--loader torch --saver native")
