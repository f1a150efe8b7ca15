"""The inspector and the comparison of two checkpoints, of their bits, as users run them."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.checkpoint import comparison
from megatron.checkpoint.checkpoint_source import SourceView
from megatron.checkpoint.comparison import compare_sources
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import write_megatron_torch
from megatron.checkpoint.formats.native import write_native
from megatron.cli import convert, diff_checkpoints, inspect_checkpoint
from megatron.core import registry
from megatron.core.tokenizers.tokenizer_record import RECORD_FILE
from megatron.training import register_activation
from tests.harness.training_run import run_command
from tests.unit.checkpoint.small_checkpoint import (
    COMMON,
    MemorySource,
    sample_tensors,
    small_common,
    small_source,
    write_small,
)


def compared(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, comparison.TensorComparison]:
    return {found.name: found for found in compare_sources(MemorySource(left), MemorySource(right))}


def test_equal_checkpoints_are_equal_nan_included() -> None:
    found = compared(sample_tensors(), sample_tensors())
    assert list(found) == sorted(sample_tensors())
    assert all(item.is_equal and item.is_close(0.0) for item in found.values())
    assert str(found["model.ids"]) == "model.ids: equal"


@pytest.mark.parametrize("box_bytes", [1 << 20, 24])
def test_differences_are_measured(monkeypatch: pytest.MonkeyPatch, box_bytes: int) -> None:
    monkeypatch.setattr(comparison, "MAX_BOX_BYTES", box_bytes)
    left, right = {"w": torch.full((4, 3), 8.0)}, {"w": torch.full((4, 3), 8.0)}
    left["w"][3, 1] += 0.5
    left["w"][0, 0] -= 0.25
    item = compared(left, right)["w"]
    assert (item.num_different, item.max_difference, item.max_value) == (2, 0.5, 8.0)
    assert item.relative_difference == 0.0625
    assert item.is_close(0.1)
    assert not item.is_close(0.01)
    assert str(item) == "w: 2 of 12 elements differ, by at most 5.000e-01 (relative 6.250e-02)"


def test_bits_decide() -> None:
    zeros = compared({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])})["w"]
    assert (zeros.num_different, zeros.max_difference, zeros.is_equal) == (1, 0.0, False)
    nan = compared({"w": torch.tensor([math.nan, 1.0])}, {"w": torch.tensor([2.0, 1.0])})["w"]
    assert (nan.num_different, nan.is_close(1.0)) == (1, False)
    assert nan.max_difference > 1e300
    infinities = compared({"w": torch.tensor([math.inf, 1.0])}, {"w": torch.tensor([math.inf, 1.5])})["w"]
    assert (infinities.num_different, infinities.max_difference) == (1, 0.5)


def test_shapes_dtypes_and_absence() -> None:
    found = compared(
        {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(2)},
        {"a": torch.ones(3, 2), "b": torch.ones(4).bfloat16(), "d": torch.ones(2)},
    )
    assert [str(item) for item in found.values()] == [
        "a: shape [2, 3] and [3, 2]",
        "b: dtype float32 and bfloat16",
        "c: only in the first",
        "d: only in the second",
    ]
    assert not any(item.is_equal or item.is_close(1.0) for item in found.values())


def test_a_view_leaves_out_converts_and_reports() -> None:
    reported: list[int] = []
    source = MemorySource(sample_tensors())
    view = SourceView(source, {"x": 1}, keeps_optimizer=False, weights_dtype=torch.float32, on_read=reported.append)
    assert view.common == {"x": 1}
    assert source.common == COMMON
    assert all(name.startswith("model.") for name in view.tensors)
    assert view.tensors["model.norm.bias"].dtype == torch.float32
    values = view.read("model.norm.bias")
    assert torch.equal(values, sample_tensors()["model.norm.bias"].float())
    assert reported == [values.nbytes]
    with pytest.raises(KeyError):
        view.read("optimizer.exp_avg.norm.bias")
    view.close()
    assert source.is_closed


TOOLS = Path(__file__).parents[3] / "tools" / "checkpoint"


MAINS: dict[str, Callable[[list[str]], int]] = {
    "inspect.py": inspect_checkpoint.main,
    "diff.py": diff_checkpoints.main,
    "convert.py": convert.main,
}


@dataclass(frozen=True)
class ToolRun:
    """Run a tool in this process: starting one that imports torch takes seconds."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, name: str, *words: str | Path) -> tuple[int, str, str]:
        """Return the exit status, and what was printed to either stream."""
        try:
            status = MAINS[name]([str(word) for word in words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *self.capsys.readouterr()


@pytest.fixture
def run_tool(capsys: pytest.CaptureFixture[str]) -> ToolRun:
    return ToolRun(capsys)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_small(folder, small_common())
    return folder


def test_inspect_lists_tensors_layout_and_configuration(run_tool: ToolRun, checkpoint: Path) -> None:
    status, printed, _ = run_tool("inspect.py", checkpoint, "--all", "--verify")
    assert status == 0
    source = small_source(small_common())
    weights = sum(values.numel() for name, values in source.values.items() if name.startswith("model."))
    assert f"checkpoint: {checkpoint / 'iter_0000003'}" in printed
    assert "format: the native format" in printed
    assert f"parameters: {weights} in " in printed
    assert "tensor_model_parallel_size: 1" in printed
    assert "num_layers: 4" in printed
    assert "iteration: 3" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith(("model.", "optimizer."))]
    assert [row[0] for row in rows] == sorted(source.values)
    assert ["model.embedding.word_embeddings.weight", "101x24", "float32", str(101 * 24 * 4), "1"] in rows
    assert "match their checksums" in printed


def test_plain_inspect_fits_one_screen(run_tool: ToolRun, checkpoint: Path) -> None:
    status, printed, _ = run_tool("inspect.py", checkpoint)
    lines = printed.splitlines()
    assert status == 0
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 120
    assert "optimizer state: 104 tensors (exp_avg 52, exp_avg_sq 52)" in lines
    assert not any(line.startswith("optimizer.") for line in lines)
    settings = " ".join(" ".join(lines).split())
    assert " data: mock_data=True seq_length=20 split=969, 30, 1 model: ffn_hidden_size=40 hidden_size=24 " in settings
    assert "num_layers=4" in settings
    assert "adam_beta1" not in settings, "a default"
    assert "consumed_train_samples=6" in settings
    rows = [line.split() for line in lines]
    assert ["model.decoder.layers.*.mlp.linear_fc1.weight", "40x24", "float32", "4", str(4 * 40 * 24 * 4)] in rows
    assert "    adam_beta1: 0.9" in run_tool("inspect.py", checkpoint, "--config")[1].splitlines()


@pytest.mark.parametrize("saver", [write_megatron_torch, write_torch_dist])
def test_inspect_compares_the_checksums_of_megatrons_formats_and_says_so(
    run_tool: ToolRun, saver: Callable[..., Path], tmp_path: Path
) -> None:
    saver(small_source(small_common()), tmp_path, 3)
    status, printed, _ = run_tool("inspect.py", tmp_path, "--no-tensors", "--verify")
    assert status == 0
    assert printed.endswith("tensors match their checksums\n")


def test_inspect_names_damage(run_tool: ToolRun, checkpoint: Path, tmp_path: Path) -> None:
    folder = write_small(tmp_path, small_common())
    shard = folder / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-6] ^= 4
    shard.write_bytes(data)
    assert run_tool("inspect.py", tmp_path, "--no-tensors")[0] == 0
    status, _, error = run_tool("inspect.py", tmp_path, "--no-tensors", "--verify")
    assert status == 2
    assert error.count("\n") == 1
    assert "do not match their checksum" in error


@pytest.mark.parametrize("saver", [write_native, write_megatron_torch, write_torch_dist])
def test_plain_inspect_reports_what_the_sizes_of_files_show(
    run_tool: ToolRun, saver: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {"max_file_bytes": 100_000} if saver is write_native else {}
    for iteration in (3, 4):
        saver(small_source(small_common(iteration=iteration)), tmp_path, iteration, **sizes)
    assert run_tool("inspect.py", tmp_path, "--no-tensors")[0] == 0
    patterns = ("*.safetensors", "*.distcp", "mp_rank_*/*.pt")
    old, new = (
        sorted(path for pattern in patterns for path in (tmp_path / f"iter_000000{number}").glob(pattern))
        for number in (3, 4)
    )
    os.truncate(old[0], old[0].stat().st_size - 1)
    status, printed, error = run_tool("inspect.py", tmp_path, "--no-tensors")
    assert (status, error.count("\n")) == (2, 1)
    assert printed.startswith(f"checkpoint: {tmp_path / 'iter_0000004'}"), "the newest is described"
    assert str(old[0]) in error
    saver(small_source(small_common(iteration=2)), tmp_path, 2, **sizes)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    for path in new[:2]:
        os.truncate(path, path.stat().st_size // 2)
    error = run_tool("inspect.py", tmp_path, "--no-tensors")[2]
    assert "; iter_0000002 is complete: --ckpt-step 2 loads it" in error
    assert run_tool("inspect.py", tmp_path, "--ckpt-step", "2")[0] == 0
    shutil.rmtree(tmp_path / "iter_0000002")
    status, printed, error = run_tool("inspect.py", "--load", tmp_path, "--no-tensors")
    assert (status, printed, error.count("\n")) == (2, "", 1)
    assert all(str(path) in error for path in (old[0], *new[:2]))
    assert run_tool("inspect.py", tmp_path, "--no-tensors", "--ckpt-step", "4")[0] == 2
    assert str(old[0]) not in run_tool("inspect.py", tmp_path / "iter_0000004", "--no-tensors")[2]


def test_diff_of_equal_and_different_checkpoints(run_tool: ToolRun, checkpoint: Path, tmp_path: Path) -> None:
    common = copy.deepcopy(small_common("--tensor-model-parallel-size 1 --lr 2e-3"))
    source = small_source(common)
    write_native(source, tmp_path / "equal", 3, max_file_bytes=10_000)
    status, printed, _ = run_tool("diff.py", checkpoint, tmp_path / "equal")
    assert status == 0
    assert printed.endswith("equal\n")
    assert "optimizer.lr: 0.001 -> 0.002" in printed

    name = "optimizer.exp_avg.decoder.final_layernorm.weight"
    source.values[name] = source.values[name] * (1 + 1e-4)
    write_native(source, tmp_path / "changed", 3)
    status, printed, _ = run_tool("diff.py", checkpoint, tmp_path / "changed")
    assert status == 1
    assert f"{name}: 24 of 24 elements differ" in printed
    assert run_tool("diff.py", checkpoint, tmp_path / "changed", "--weights-only")[0] == 0
    assert run_tool("diff.py", checkpoint, tmp_path / "changed", "--tolerance", "1e-3")[0] == 0

    del source.values[name]
    source.values["model.extra"] = torch.ones(2)
    source.common["progress"]["consumed_train_samples"] += 1  # type: ignore[index]
    write_native(source, tmp_path / "others", 3)
    status, printed, _ = run_tool("diff.py", checkpoint, tmp_path / "others")
    assert status == 1
    for line in (f"{name}: only in the first", "model.extra: only in the second"):
        assert line in printed
    assert "progress.consumed_train_samples: 6 and 7" in printed


def test_a_folder_of_another_trainer_is_told_from_megatrons(run_tool: ToolRun, tmp_path: Path) -> None:
    dcp.save({"encoder.weight": torch.ones(5, 3)}, checkpoint_id=tmp_path, no_dist=True)
    status, _, error = run_tool("inspect.py", tmp_path)
    assert status == 2
    assert error.count("\n") == 1
    assert "is neither a Megatron checkpoint (its folder has no common.pt) nor" in error


def test_diff_names_an_unregistered_part_before_it_reads_tensors(
    run_tool: ToolRun, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_REGISTERED", {})
        patch.setattr(registry, "_SCRIPTS", [])
        register_activation("mine", torch.tanh)
        write_native(small_source(small_common("--activation-func mine")), tmp_path / "own", 3)
    status, printed, told = run_tool("diff.py", checkpoint, tmp_path / "own")
    assert status == 2
    assert "activation mine is not registered; pass the script" in told
    assert "tensors:" not in printed


def test_diff_names_what_decides_which_weights_there_are(run_tool: ToolRun, checkpoint: Path, tmp_path: Path) -> None:
    write_small(tmp_path, small_common("--untie-embeddings-and-output-weights"))
    status, printed, _ = run_tool("diff.py", checkpoint, tmp_path, "--weights-only")
    assert status == 1
    assert "configuration (does not count): model.untie_embeddings_and_output_weights: False -> True" in printed
    assert printed.endswith("different: 1 difference\n"), "the output layer's tensor"


def test_the_converter_records_bare_ids_of_the_models_vocabulary(
    run_tool: ToolRun, checkpoint: Path, tmp_path: Path
) -> None:
    words = ["--load-dir", checkpoint, "--save-dir", tmp_path, "--tokenizer-type", "NullTokenizer", "--no-verify"]
    status, _, error = run_tool("convert.py", *words)
    assert (status, error) == (0, "")
    record = json.loads((tmp_path / "iter_0000003" / "tokenizer" / RECORD_FILE).read_text())
    assert (record["tokenizer_type"], record["vocab_size"]) == ("NullTokenizer", 101)


@pytest.mark.parametrize(
    ("tool", "words", "expected"),
    [
        ("inspect.py", ["nowhere"], "nowhere is not a folder"),
        ("inspect.py", [str(TOOLS)], "contains no checkpoint"),
        ("inspect.py", [], "one of the arguments DIR --load is required"),
        ("diff.py", ["nowhere", "elsewhere"], "nowhere is not a folder"),
        ("diff.py", ["a", "b", "--tolerance", "-1"], "--tolerance -1.0"),
        ("convert.py", ["--load-dir", "nowhere", "--save-dir", "b"], "nowhere is not a folder"),
        (
            "convert.py",
            ["--load-dir", "a", "--save-dir", "b", "--true-vocab-size", "0"],
            "--true-vocab-size 0 is not positive",
        ),
        (
            "convert.py",
            ["--load-dir", "a", "--save-dir", "b", "--checkpoint-type", "hf"],
            "--checkpoint-type hf: --loader megatron reads a different format; use --loader hf",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(run_tool: ToolRun, tool: str, words: list[str], expected: str) -> None:
    status, _, error = run_tool(tool, *words)
    assert status == 2
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("tool", sorted(MAINS))
def test_the_scripts_find_pythons_own_inspect(tool: str) -> None:
    result = run_command([sys.executable, TOOLS / tool, "--help"]).check()
    assert result.stdout.startswith(f"usage: {tool}")


def test_the_converter_has_its_former_name_too(checkpoint: Path, tmp_path: Path) -> None:
    words = "--model-type GPT --loader megatron --saver megatron --target-tensor-parallel-size 2 --load-dir"
    done = run_command([sys.executable, TOOLS / "util.py", *words.split(), checkpoint, "--save-dir", tmp_path / "out"])
    assert "converted to" in done.check().stdout


@pytest.mark.full
def test_a_script_imports_torch_beside_inspect_py(checkpoint: Path) -> None:
    assert "format: the native format" in run_command([sys.executable, TOOLS / "inspect.py", checkpoint]).check().stdout
