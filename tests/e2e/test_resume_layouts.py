"""A run saved at one layout goes on at every other, and back, with latent attention and YaRN too."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.config.arguments import resolve_arguments
from megatron.core.device import select_device
from megatron.core.dist_checkpointing.index import CheckpointIndex, read_index
from megatron.core.dist_checkpointing.load import load_tensors
from megatron.core.dist_checkpointing.planner import (
    RNG_PREFIX,
    ShardedTensor,
    dtype_of,
    model_tensors,
    optimizer_tensors,
    whole_tensor,
)
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training.checkpointing import RunCheckpoints, open_saver
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.pretraining import with_vocabulary
from pretrain_gpt import provide_model
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.distributed import run_distributed
from tests.harness.forked_training import ForkedRun, fork_training

MODEL = """
    --num-layers 4 --micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0
    --eval-interval 1000 --log-interval 5
"""


@dataclass(frozen=True)
class Layout:
    """Hold a number of processes and the flags that spread a run over them."""

    num_processes: int
    flags: str


HOME = Layout(8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer")
LAYOUTS = {
    "tp1": Layout(1, ""),
    "tp4": Layout(4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "pp4": Layout(4, "--pipeline-model-parallel-size 4"),
    "pp2-vpp2": Layout(2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "cp2-tp2": Layout(4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --use-distributed-optimizer"),
    "dp8": Layout(8, "--use-distributed-optimizer"),
    "tp2-dp2-without-sharding": Layout(4, "--tensor-model-parallel-size 2"),
}


def layouts(*by_default: str) -> list[object]:
    """Return all layouts as parameters; those that are not run by default take long."""
    return [
        pytest.param(layout, id=name, marks=() if name in by_default else pytest.mark.long)
        for name, layout in LAYOUTS.items()
    ]


def train(folder: Path, layout: Layout, *more: str) -> ForkedRun:
    return fork_training(toy_args(folder, MODEL, layout.flags, *more), layout.num_processes).check()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ForkedRun]:
    """Return the checkpoints at iterations 10 and 20 of a run that was not interrupted, and the run."""
    folder = tmp_path_factory.mktemp("home")
    run = train(folder, HOME, "--save-interval 10")
    return folder / "checkpoints", run


def copy_of_iteration_10(checkpoints: Path, folder: Path) -> None:
    target = folder / "checkpoints"
    target.mkdir(parents=True)
    shutil.copytree(checkpoints / "iter_0000010", target / "iter_0000010")
    (target / "latest_checkpointed_iteration.txt").write_text("10")


def assert_goes_on_like(run: ForkedRun, whole: ForkedRun) -> None:
    """Compare iterations 11 to 20 of a resumed run with those of one that was not interrupted."""
    ours = [line for line in run.iterations() if line["iteration"] > 10]
    expected = [line for line in whole.iterations() if line["iteration"] > 10]
    assert [line["iteration"] for line in ours] == list(range(11, 21))
    for mine, theirs in zip(ours, expected, strict=True):
        for name in ("iteration", "consumed_samples", "sample_ids_hash", "learning_rate", "loss_scale"):
            assert mine[name] == theirs[name], name
        for name in ("lm_loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=0.0)


@pytest.mark.long
@pytest.mark.parametrize("layout", layouts("tp1"))
def test_goes_on_at_another_layout(home: tuple[Path, ForkedRun], layout: Layout, tmp_path: Path) -> None:
    checkpoints, whole = home
    copy_of_iteration_10(checkpoints, tmp_path)
    assert_goes_on_like(train(tmp_path, layout), whole)


@pytest.mark.long
@pytest.mark.parametrize("layout", layouts())
def test_comes_back_from_another_layout(home: tuple[Path, ForkedRun], layout: Layout, tmp_path: Path) -> None:
    train(tmp_path, layout, "--exit-interval 10")
    assert_goes_on_like(train(tmp_path, HOME), home[1])


@pytest.mark.long
def test_dropout_goes_on_at_another_layout(tmp_path: Path) -> None:
    dropout = "--hidden-dropout 0.2 --attention-dropout 0.1"
    whole = train(tmp_path / "whole", LAYOUTS["tp1"], dropout)
    without = train(tmp_path / "without", LAYOUTS["tp1"])
    assert abs(whole.iterations()[0]["grad_norm"] / without.iterations()[0]["grad_norm"] - 1) > 1e-3
    folder = tmp_path / "parts"
    train(folder, LAYOUTS["cp2-tp2"], dropout, "--exit-interval 10")
    second = train(folder, LAYOUTS["dp8"], dropout)
    assert_goes_on_like(second, whole)
    assert "random number streams" not in second.stdout


def load_and_save(argv: list[str]) -> tuple[list[tuple[int, int, int]], int]:
    """Load a checkpoint into a run's parts and save it again.

    Returns (inode, first byte, number of bytes) of all that was read of shard files, and how many bytes this rank's
    tensors are made of.
    """
    config = resolve_arguments(argv, torch.distributed.get_world_size()).config
    tokenizer = build_tokenizer(tokenizer_type=config.tokenizer.tokenizer_type, vocab_size=config.tokenizer.vocab_size)
    config = with_vocabulary(config, tokenizer, lambda line: None)
    runtime = make_runtime(config, select_device(0))
    parts = build_model_and_optimizer(config, runtime, provide_model, lambda line: None)
    saver = open_saver(config.checkpoint, runtime, lambda line: None)
    checkpoints = RunCheckpoints(config, runtime, parts, tokenizer, saver, lambda line: None)
    reads: list[tuple[int, int, int]] = []
    real_preadv = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], start: int) -> int:
        received = real_preadv(descriptor, buffers, start)
        reads.append((os.fstat(descriptor).st_ino, start, received))
        return received

    os.preadv = preadv
    train_state = checkpoints.resume()
    os.preadv = real_preadv
    assert train_state.iteration == 10
    wanted = model_tensors(parts.chunks) + optimizer_tensors(parts.optimizer)
    checkpoints.save(train_state)
    checkpoints.finish()
    return reads, sum(num_bytes(tensor) for tensor in wanted)


def num_bytes(tensor: ShardedTensor) -> int:
    return sum(shard.global_box.num_elements for shard in tensor.shards) * tensor.data.element_size()


def pass_through(layout: Layout, source: Path, target: Path) -> list[tuple[list[tuple[int, int, int]], int]]:
    places = ["--load", str(source), "--save", str(target), "--no-load-rng", "--log-interval", "1"]
    argv = [*toy_args(target, MODEL, layout.flags, save=False), *places]
    return run_distributed(layout.num_processes, load_and_save, argv, timeout_s=90.0)


def read_all(folder: Path, index: CheckpointIndex) -> dict[str, torch.Tensor]:
    values = {
        name: torch.empty(stored.global_shape, dtype=dtype_of(stored.dtype))
        for name, stored in index.tensors.items()
        if not name.startswith(RNG_PREFIX)
    }
    tensors = [whole_tensor(name, tensor) for name, tensor in values.items()]
    load_tensors(folder, index, tensors, (), describe_parallel_state(0, 1))
    return values


def assert_same_content(left: Path, right: Path) -> None:
    """Assert that two checkpoints of any layout hold the same bits and stand at the same point of the run."""
    ours, theirs = read_index(left), read_index(right)
    left_values, right_values = read_all(left, ours), read_all(right, theirs)
    assert left_values.keys() == right_values.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in left_values)
    for name, values in left_values.items():
        assert values.dtype == right_values[name].dtype, name
        assert torch.equal(values.view(torch.uint8), right_values[name].view(torch.uint8)), name
    for key in ("progress", "optimizer", "scheduler"):
        assert ours.common[key] == theirs.common[key], key


@pytest.mark.parametrize(
    "precision", [pytest.param("", id="fp32"), pytest.param("--bf16", id="bf16", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("layout", layouts("pp2-vpp2"))
def test_there_and_back_is_bitwise_equal_and_reads_no_byte_in_vain(
    home: tuple[Path, ForkedRun], layout: Layout, precision: str, tmp_path: Path
) -> None:
    checkpoints = home[0]
    source, there, back = tmp_path / "checkpoints", tmp_path / "there", tmp_path / "back"
    if precision:
        train(tmp_path, Layout(1, precision), "--exit-interval 10")
    else:
        copy_of_iteration_10(checkpoints, tmp_path)
    other = Layout(layout.num_processes, f"{layout.flags} {precision}")
    at_home = Layout(HOME.num_processes, f"{HOME.flags} {precision}")
    assert_reads_are_exact(source, pass_through(other, source, there))
    assert_same_content(newest(there), newest(source))
    assert_reads_are_exact(there, pass_through(at_home, there, back))
    assert_same_content(newest(back), newest(source))


def assert_reads_are_exact(checkpoints: Path, ranks: list[tuple[list[tuple[int, int, int]], int]]) -> None:
    """Assert that each rank read as many bytes as its tensors have, and none twice; and all ranks together, all."""
    folder = newest(checkpoints)
    index = read_index(folder)
    stored = {
        ((folder / shard.file).stat().st_ino, byte)
        for name, tensor in index.tensors.items()
        if not name.startswith(RNG_PREFIX)
        for shard in tensor.shards
        for byte in range(shard.start, shard.start + shard.num_bytes, 2)
    }
    begins: dict[int, int] = {}
    for inode, byte in stored:
        begins[inode] = min(byte, begins.get(inode, byte))
    found = set()
    for every_read, wanted_bytes in ranks:
        # The index, and the headers of shards, are read whole.
        reads = [(inode, start, count) for inode, start, count in every_read if start >= begins.get(inode, 1 << 62)]
        assert sum(count for _, _, count in reads) == wanted_bytes
        own = [(inode, byte) for inode, start, count in reads for byte in range(start, start + count, 2)]
        assert len(set(own)) == len(own)
        found.update(own)
    assert found == stored


LATENT_MODEL = """
    --multi-latent-attention --position-embedding-type rope --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6
    --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
"""
LATENT_HOME = Layout(
    4,
    f"{LATENT_MODEL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer",
)


@pytest.mark.long
def test_latent_attention_and_further_tokens_go_on_at_another_layout(tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "there"
    home.mkdir()
    there.mkdir()
    whole = train(home, LATENT_HOME, "--save-interval 10")
    copy_of_iteration_10(home / "checkpoints", there)
    one = Layout(1, LATENT_MODEL)
    pass_through(one, there / "checkpoints", tmp_path / "again")
    assert_same_content(newest(tmp_path / "again"), newest(there / "checkpoints"))
    run = train(there, one)
    assert_goes_on_like(run, whole)
    assert all(line["mtp_1_loss"] > 0 for line in run.iterations())
    assert "mtp_1_loss: " in run.stdout


KIND = """
    --normalization RMSNorm --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --softmax-type learnable --window-size 7,0 --window-attn-skip-freq 2 --quick-geglu --glu-linear-offset 1
    --activation-func-clamp-value 7 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24
    --position-embedding-type rope --rope-type yarn --rotary-base 150000 --rotary-scaling-factor 8
    --original-max-position-embeddings 9 --no-yarn-correction-range-round-to-int
"""
STEPS = "--train-iters 6 --lr-warmup-iters 2 --eval-interval 100"


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_megatrons_files_hold_stretched_positions(form: str, tmp_path: Path) -> None:
    flags = (KIND, STEPS, f"--ckpt-format {form} --tensor-model-parallel-size 2")
    whole = fork_training(toy_args(tmp_path / "whole", *flags), 2).check()
    fork_training(toy_args(tmp_path, *flags, "--exit-interval 3"), 2).check()
    resumed = fork_training(toy_args(tmp_path, *flags), 2).check()
    assert exact_figures(resumed.iterations())[-3:] == exact_figures(whole.iterations())[-3:]
    other = fork_training(toy_args(tmp_path, *flags, "--rotary-scaling-factor 9"), 2).check()
    assert "configuration changed since the checkpoint: model.rotary_scaling_factor: 8.0 -> 9.0" in other.stdout
