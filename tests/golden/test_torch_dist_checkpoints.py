"""Checkpoints that megatron-core wrote in its torch_dist format: read whole, in every form, and gone on from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.comparison import compare_sources
from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.train_state import TrainState
from megatron.config.run_config import CheckpointConfig
from megatron.core.datasets.gpt_dataset import GPTSample, make_sample
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.device import Device
from megatron.core.dist_checkpointing.planner import CheckpointState, ShardedTensor, model_tensors, optimizer_tensors
from megatron.core.timers import Timers
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training.batch_source import BatchSource
from megatron.training.data_plan import dataset_config
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.training_step import TrainingStep
from megatron.verification.run_cell import resolve_cell
from pretrain_gpt import forward_step, provide_model
from tests.harness.distributed import run_distributed
from tests.harness.torch_loader import assert_torch_reads, read_with_torch

SMALL = Path(__file__).parent / "torch_dist"
BATCHES = Path(__file__).parent / "model" / "gpt2.npz"
REFERENCES = Path(__file__).parents[2].parent / "shared" / "golden" / "torch_dist"
needs_references = pytest.mark.skipif(
    not REFERENCES.is_dir(), reason="the reference checkpoints (6 MB) are not beside the repository"
)
NAMES = ("gpt2_tp1", "gpt2_tp2", "gpt2_dp2_distopt")
KINDS = {"model": "w", "exp_avg": "m", "exp_avg_sq": "v"}
TOLERANCE = 1e-5
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32 --no-bias-gelu-fusion
    --hidden-dropout 0 --attention-dropout 0 --seed 1234 --distributed-backend gloo --mock-data
    --global-batch-size 2 --train-iters 10 --lr 1e-2 --min-lr 1e-3 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
    --lr-decay-style cosine --lr-warmup-iters 3
"""
LAYOUTS = {
    "tp1": (1, "--micro-batch-size 2"),
    "tp2": (2, "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--micro-batch-size 1 --pipeline-model-parallel-size 2"),
    "dp2": (2, "--micro-batch-size 1 --use-distributed-optimizer"),
    "cp2": (2, "--micro-batch-size 2 --context-parallel-size 2"),
}


def iteration_folder(name: str) -> Path:
    return REFERENCES / name / "iter_0000005"


class GivenBatches:
    """Give the samples of the reference's batches from the sixth on."""

    def __init__(self, config: GPTDatasetConfig) -> None:
        self._config = config
        reference = np.load(BATCHES)
        tokens, labels = (reference[f"train/{kind}"][5:].reshape(-1, 32) for kind in ("tokens", "labels"))
        self._texts = np.concatenate([tokens, labels[:, -1:]], axis=1).astype(np.int64)

    def __len__(self) -> int:
        return len(self._texts)

    def source_of(self, index: int) -> str:
        return "the reference"

    def __getitem__(self, index: int) -> GPTSample:
        return make_sample(self._texts[index], 33, self._config, np.arange(32), np.ones(32, np.float32))


def assert_filled(tensors: Sequence[ShardedTensor]) -> None:
    """Assert that this rank's parts of weights and moments are, bit for bit, those that were saved."""
    saved = np.load(REFERENCES / "gpt2_tp1" / "state.npz")
    assert len({tensor.name for tensor in tensors}) >= 3 * 14
    for tensor in tensors:
        kind, parameter = tensor.name.removeprefix("optimizer.").split(".", 1)
        whole = torch.from_numpy(saved[f"{KINDS[kind]}/{parameter}"])
        for shard in tensor.shards:
            assert torch.equal(tensor.data[shard.local_box.slices], whole[shard.global_box.slices]), tensor.name


def go_on(flags: str) -> dict[str, list[float]]:
    """Return the losses of five more steps from each of the references, on this rank."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = resolve_cell(flags.split(), world_size, "float32")
    losses: dict[str, list[float]] = {}
    for name in NAMES:
        runtime = make_runtime(config, Device("cpu"))
        parts = build_model_and_optimizer(config, runtime, provide_model, log=lambda line: None)
        loaded = load_checkpoint(
            REFERENCES / name,
            CheckpointState(models=parts.chunks, optimizer=parts.optimizer, rng=runtime.rng.state_dict()),
            runtime.state,
            CheckpointConfig(),
            config.to_dict(),
            lambda line: None,
        )
        assert loaded is not None
        assert loaded.scheduler is not None
        assert (loaded.progress.iteration, loaded.progress.consumed_train_samples) == (5, 10)
        if name == "gpt2_tp1":
            assert_filled([*model_tensors(parts.chunks), *optimizer_tensors(parts.optimizer)])
        parts.scheduler.load_state_dict(loaded.scheduler, override=False, use_checkpoint=True)
        tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
        dataset = GivenBatches(dataset_config(config, tokenizer))
        step = TrainingStep(config, runtime, parts, forward_step, Timers(), lambda: None)
        state = TrainState()
        with contextlib.closing(BatchSource(dataset, config, runtime, tokenizer.vocab_size, 0)) as source:
            for _ in range(5):
                report, _ = step.run(state, source, config.training.global_batch_size, None)
                losses.setdefault(name, []).append(report.lm_loss)
                # The reference counts steps where a run counts samples: two of them a step.
                parts.scheduler.step(-1)
    return losses


@needs_references
@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n in ("tp1", "dp2") else pytest.mark.long) for n in LAYOUTS]
)
def test_training_goes_on_at_any_layout(layout: str) -> None:
    processes, flags = LAYOUTS[layout]
    words = f"{FLAGS} {flags}"
    ranks = [go_on(words)] if processes == 1 else run_distributed(processes, go_on, words, timeout_s=60)
    for name, losses in ranks[0].items():
        expected = json.loads((REFERENCES / name / "losses.json").read_text())["losses"][5:]
        assert losses == pytest.approx(expected, rel=TOLERANCE, abs=0.0), name


@pytest.mark.default
@needs_references
def test_values_are_those_that_were_saved() -> None:
    saved = np.load(REFERENCES / "gpt2_tp1" / "state.npz")
    source = TorchDistSource(iteration_folder("gpt2_tp1"))
    source.check_storages()
    found = {}
    for name in source.tensors:
        kind, parameter = name.removeprefix("optimizer.").split(".", 1)
        found[f"{KINDS[kind]}/{parameter}"] = source.read(name)
    assert found.keys() == set(saved.files)
    for name, values in found.items():
        assert torch.equal(values, torch.from_numpy(saved[name])), name
    assert source.common["optimizer"]["num_steps"] == 5


@needs_references
@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_the_same_and_what_is_written_is_what_was_read(name: str, tmp_path: Path) -> None:
    assert_torch_reads(iteration_folder(name))
    folder = write_torch_dist(TorchDistSource(iteration_folder(name)), tmp_path, 5)
    theirs, ours = read_with_torch(iteration_folder(name)), read_with_torch(folder)
    assert theirs.keys() == ours.keys()
    assert [key for key in theirs if not torch.equal(theirs[key], ours[key])] == []
    left, right = (TorchDistSource(f) for f in (iteration_folder(name), folder))
    assert left.metadata.objects.keys() == right.metadata.objects.keys()


@pytest.mark.default(1)
@pytest.mark.parametrize("name", ["dp_reshardable", "dp_zero_gather_scatter", "singleton_local_shards"])
def test_every_form_of_the_distributed_optimizer_holds_the_same(name: str) -> None:
    expected = TorchDistSource(SMALL / "fully_reshardable" / "iter_0000002")
    found = TorchDistSource(SMALL / name / "iter_0000002")
    found.check_storages()
    assert len(expected.tensors) == 4 * 17
    assert [str(tensor) for tensor in compare_sources(expected, found) if not tensor.is_equal] == []
    for part in ("progress", "optimizer", "scheduler"):
        assert found.common[part] == expected.common[part]
    assert found.common["optimizer"]["num_steps"] == 2
    for weight in (name for name in found.tensors if name.startswith("model.")):
        main = found.read(weight.replace("model.", "optimizer.main_param.", 1))
        assert torch.equal(main.bfloat16(), found.read(weight)), weight
    assert {place: len(states) for place, states in found.random_states().items()} == {(0, 0): 1, (1, 0): 1}


def test_torch_reads_the_small_checkpoint_too() -> None:
    # Its weights were made at random, the rows that pad the vocabulary too: here they count.
    folder = SMALL / "fully_reshardable" / "iter_0000002"
    assert_torch_reads(folder, {"main_param": "param"})
