"""Models with experts go from Hugging Face's folders to Megatron's files and back, at several layouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.cli import diff_checkpoints, inspect_checkpoint
from megatron.core.errors import ConfigurationError
from tests.e2e.test_convert import run_converter
from tests.e2e.test_resume_layouts import assert_same_content
from tests.e2e.toy_run import newest, toy_args
from tests.harness.forked_training import fork_training
from tests.unit.interop.huggingface.tiny_models import folder_bytes, save_model

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUT = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 3 --target-expert-parallel-size 2"


def test_mixtral_crosses_megatrons_files_at_another_layout(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path / "hf")
    run_converter(tmp_path / "hf", tmp_path / "torch", f"--loader hf --saver torch {LAYOUT}")
    folders = {path.parent.name for path in (tmp_path / "torch").glob("release/*/*.pt")}
    assert folders == {f"mp_rank_0{t}_00{p}_00{e}" for t in range(2) for p in range(3) for e in range(2)}
    run_converter(tmp_path / "torch", tmp_path / "one", "--saver torch --target-expert-parallel-size 1")
    assert len(list((tmp_path / "one").glob("release/*/*.pt"))) == 6
    run_converter(tmp_path / "one", tmp_path / "again", "--saver hf")
    weights = "model.safetensors"
    assert folder_bytes(tmp_path / "again")[weights] == folder_bytes(tmp_path / "hf")[weights]
    assert HuggingFaceSource(tmp_path / "again").config.num_experts == 4


@pytest.mark.long
def test_a_run_with_spread_experts_becomes_megatrons_files_and_comes_back(tmp_path: Path) -> None:
    words = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --mock-data --train-iters 2 --lr-warmup-iters 0"
    run = toy_args(tmp_path, f"{words} --eval-iters 0", "--expert-model-parallel-size 2", data=False)
    fork_training(run, 2).check()
    trained = newest(tmp_path / "checkpoints").parent
    lines = run_converter(trained, tmp_path / "torch", "--saver torch")
    assert any("with optimizer state" in line for line in lines)
    assert len(list((tmp_path / "torch").glob("iter_0000002/mp_rank_00_00?/*.pt"))) == 2
    run_converter(tmp_path / "torch", tmp_path / "native", "--saver native")
    assert_same_content(newest(tmp_path / "native"), newest(tmp_path / "checkpoints"))


@pytest.mark.long
def test_layouts_of_experts_are_converted_compared_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = GOLDEN / "experts" / "ep2"
    start = spread / "torch" / "iter_0000002"
    sizes = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --target-expert-parallel-size 4"
    run_converter(start, tmp_path / "a", f"--saver torch {sizes}")
    run_converter(tmp_path / "a", tmp_path / "b", "--saver torch_dist --target-expert-parallel-size 1")
    run_converter(tmp_path / "b", tmp_path / "c", "--saver native --target-tensor-parallel-size 1")
    for folder in (spread / "torch_dist" / "iter_0000002", *(tmp_path / name for name in "abc")):
        assert diff_checkpoints.main([str(start), str(folder), "--weights-only"]) == 0, folder
        assert diff_checkpoints.main([str(start), str(folder)]) == 0, folder
    capsys.readouterr()
    assert inspect_checkpoint.main([str(tmp_path / "a"), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "expert_model_parallel_size: 4" in shown
    assert re.search(r"optimizer\.exp_avg\.decoder\.layers\.1\.mlp\.experts\.linear_fc1\.weight +4x16x16 ", shown)
    path = next((tmp_path / "a").rglob("mp_rank_01_001_003/model_optim_rng.pt"))
    content = torch.load(path, weights_only=False)
    content["model"]["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"][2, 3] += 1.0
    torch.save(content, path)
    assert diff_checkpoints.main([str(start), str(tmp_path / "a")]) == 1
    assert "model.decoder.layers.1.mlp.experts.linear_fc2.weight: 1 of 512" in capsys.readouterr().out


def test_experts_that_cannot_be_spread_so_are_refused(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path / "hf")
    with pytest.raises(ConfigurationError, match="3 does not divide 4 experts; 1, 2, 4 work"):
        run_converter(tmp_path / "hf", tmp_path / "a", "--loader hf --saver torch --target-expert-parallel-size 3")
    save_model("llama_tied", tmp_path / "dense")
    with pytest.raises(ConfigurationError, match="the model has no experts; leave it out"):
        run_converter(tmp_path / "dense", tmp_path / "b", "--loader hf --saver torch --target-expert-parallel-size 2")
