"""A checkpoint that an older version saved loads at its layout and another, goes on alike and is saved as it was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.cli.diff_checkpoints import main as diff
from megatron.core.device import Device
from megatron.core.dist_checkpointing.index import StoredTensor, read_index
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training.checkpointing import RunCheckpoints, open_saver
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.verification.run_cell import resolve_cell
from tests.harness.distributed import run_distributed
from tests.harness.forked_training import fork_training

FOLDER = Path(__file__).parent / "checkpoints" / "native_tp2_pp2_distributed"
FLAGS = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 12 --max-position-embeddings 12
    --tokenizer-type NullTokenizer --vocab-size 98 --make-vocab-size-divisible-by 8 --init-method-std 0.06 --mock-data
    --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --log-interval 1 --eval-iters 0 --seed 1234 --hidden-dropout 0 --attention-dropout 0
    --distributed-backend gloo --use-distributed-optimizer
"""
LAYOUTS = {"same": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"), "tp1": (1, "")}
TOLERANCE = 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_goes_on_as_the_older_version_did(name: str, tmp_path: Path) -> None:
    processes, layout = LAYOUTS[name]
    args = [*FLAGS.split(), *layout.split(), "--load", FOLDER, "--metrics-jsonl", tmp_path / "metrics.jsonl"]
    iterations = fork_training(args, processes).check().iterations()
    expected = json.loads((FOLDER / "continued.json").read_text())[name]
    assert [line["iteration"] for line in iterations] == [5, 6]
    for ours, theirs in zip(iterations, expected, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=TOLERANCE, abs=0.0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE, abs=0.0)
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["sample_ids_hash"] == theirs["sample_ids_hash"]


def load_and_save(flags: list[str], world_size: int) -> None:
    """Save a run again as soon as it is loaded."""
    config = resolve_cell(flags, world_size, "float32")
    runtime = make_runtime(config, Device("cpu"))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=print)
    tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
    saver = open_saver(config.checkpoint, runtime, print)
    checkpoints = RunCheckpoints(config, runtime, parts, tokenizer, saver, print)
    checkpoints.save(checkpoints.resume())
    checkpoints.finish()
    checkpoints.check_last()


def values_of(tensor: StoredTensor) -> tuple[Any, ...]:
    """Return all that is recorded of a tensor but where in its files it stands."""
    shards = [(shard.box, shard.file, shard.key, shard.num_bytes, shard.checksum) for shard in tensor.shards]
    return (tensor.global_shape, tensor.dtype, *shards)


@pytest.mark.default
def test_what_is_loaded_is_saved_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes, layout = LAYOUTS["same"]
    flags = [*FLAGS.split(), *layout.split(), "--load", str(FOLDER), "--save", str(tmp_path)]
    run_distributed(processes, load_and_save, flags, processes)
    assert diff([str(FOLDER), str(tmp_path)]) == 0, capsys.readouterr().out
    ours, theirs = read_index(tmp_path / "iter_0000004"), read_index(FOLDER / "iter_0000004")
    assert set(ours.files) == set(theirs.files)
    # Dropout needs no state: its streams in the older checkpoint are passed over.
    wanted = {name for name in theirs.tensors if not name.endswith((".replicated", ".tensor-parallel"))}
    assert set(ours.tensors) == wanted
    assert len(theirs.tensors) - len(wanted) == 2 * processes
    for name in wanted:
        assert values_of(ours.tensors[name]) == values_of(theirs.tensors[name]), name
