"""Memory of a run: at the start, where weights are sharded, and when unused memory is given back."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.formats.huggingface import weight_files
from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device, select_device
from megatron.core.dist_checkpointing.planner import optimizer_tensors
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.timers import Timers
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training.checkpointing import RunCheckpoints, open_saver
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import ModelAndOptimizer, build_model_and_optimizer
from megatron.training.pretraining import with_vocabulary
from pretrain_gpt import provide_model
from tests.e2e.toy_run import toy_args
from tests.harness.distributed import run_distributed
from tests.harness.training_run import REPOSITORY
from tests.unit.config.command_lines import MINIMAL

SLACK = 40 * 2**20
"""Bytes for what is not a model: imported modules, a heap's gaps, tiles of initial values, 16 MiB of a file checked."""
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"
MODEL = """
    --num-layers 12 --hidden-size 512 --num-attention-heads 4 --ffn-hidden-size 2048 --vocab-size 2040
    --micro-batch-size 1 --global-batch-size 8
"""


@dataclass(frozen=True)
class Start:
    """Hold bytes: of this stage's whole weights, of the largest layer, of what a rank keeps, and two peaks."""

    whole: int
    largest: int
    kept: int
    build_peak: int
    load_peak: int

    def check(self) -> None:
        """Check that no rank held more than its own and two layers, and that another would be noticed."""
        assert max(self.build_peak, self.load_peak) <= self.kept + 2 * self.largest + SLACK, self
        assert self.whole > 2 * self.largest + SLACK, "a rank that held the whole model would pass"


def resident(name: str) -> int:
    """Return a figure of this process's memory in bytes: ``VmRSS``, or ``VmHWM``, the most since it was reset."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> int:
    """Begin a new peak, and return what is resident."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def kept_bytes(parts: ModelAndOptimizer) -> int:
    """Return the bytes of the shards of weights, gradients and the optimizer's state."""
    tensors = [each for chunk in parts.ddp_chunks for part in chunk.shards for each in (part.values, part.gradient)]
    tensors += [tensor.data for tensor in optimizer_tensors(parts.optimizer)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def start(argv: list[str], iteration: int | None) -> Start:
    """Begin a run, from a checkpoint of that iteration or to save one at the start, and return what that took."""
    # A mapped file's pages are the machine's to take back; only here do they count.
    weight_files._MAPPED_BYTES = 8 * 2**20
    config = resolve_arguments(argv, torch.distributed.get_world_size()).config
    tokenizer = build_tokenizer(tokenizer_type=config.tokenizer.tokenizer_type, vocab_size=config.tokenizer.vocab_size)
    config = with_vocabulary(config, tokenizer, lambda line: None)
    runtime = make_runtime(config, select_device(0))
    before = reset_peak()
    parts = build_model_and_optimizer(config, runtime, provide_model, lambda line: None)
    build_peak = resident("VmHWM") - before
    layers = [layer for chunk in parts.chunks for block in chunk.blocks for layer in block.layers.values()]
    units = [*layers]
    for chunk in parts.chunks:
        assert isinstance(chunk, GPTModel)
        further = () if chunk.mtp is None else chunk.mtp.layers.values()
        units += [*further, *(module for module in (chunk.embedding, chunk.output_layer) if module is not None)]
    sizes = [sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in units]
    kept = kept_bytes(parts)
    saver = open_saver(config.checkpoint, runtime, lambda line: None)
    checkpoints = RunCheckpoints(config, runtime, parts, tokenizer, saver, lambda line: None)
    load_peak = 0
    if iteration is None:
        checkpoints.save(TrainState())
        checkpoints.finish()
    else:
        reset_peak()
        state = checkpoints.resume()
        load_peak = resident("VmHWM") - before
        assert state.iteration == iteration
    whole = sum(p.numel() * p.element_size() for chunk in parts.chunks for p in chunk.parameters())
    return Start(whole, max(sizes), kept, build_peak, load_peak)


MOE = """
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --ffn-hidden-size 256 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope
"""
LATENT = """
    --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16
    --v-head-dim 32 --mtp-num-layers 2
"""
CASES = {
    "dense": "",
    "bf16-average": "--bf16 --ema-decay 0.9",
    "muon": "--optimizer muon",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "two-instances-untied": "--num-distributed-optimizer-instances 2 --untie-embeddings-and-output-weights",
    "experts-ep2": f"{MOE} --expert-model-parallel-size 2",
    "experts-latent-further": f"{MOE} {LATENT}",
    "torch": "--ckpt-format torch",
    "torch-dist-bf16": "--ckpt-format torch_dist --bf16",
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_no_rank_holds_the_whole_model(name: str, tmp_path: Path) -> None:
    argv = toy_args(tmp_path, MODEL, SHARDED, CASES[name])
    for rank in run_distributed(4, start, argv, None, timeout_s=600.0):
        assert rank.build_peak <= rank.kept + 2 * rank.largest + SLACK
    for rank in run_distributed(4, start, argv, 0, timeout_s=600.0):
        rank.check()


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--swiglu --disable-bias-linear", MOE], ids=["dense", "experts"])
def test_hugging_faces_folders(flags: str, tmp_path: Path) -> None:
    """What was saved comes back from a folder of Hugging Face's, in another number of ranks."""
    family = "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
    model = toy_args(tmp_path, MODEL, SHARDED, flags, family)
    run_distributed(2, start, model, None, timeout_s=600.0)
    script = REPOSITORY / "tools" / "checkpoint" / "convert.py"
    places = ["--load-dir", tmp_path / "checkpoints", "--save-dir", tmp_path / "hf", "--saver", "hf"]
    command = [sys.executable, *map(str, (script, *places))]
    converted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert converted.returncode == 0, converted.stderr
    argv = [*model, "--load", str(tmp_path / "hf"), "--no-load-optim", "--no-load-rng"]
    for rank in run_distributed(4, start, argv, 0, timeout_s=600.0):
        rank.check()


def events_of_a_run(level: int) -> list[str]:
    events: list[str] = []
    step = MegatronOptimizer.begin_step

    def counted_step(optimizer: MegatronOptimizer, timers: Timers) -> object:
        events.append("step")
        return step(optimizer, timers)

    words = ["--train-iters", "2", "--eval-iters", "0", "--empty-unused-memory-level", str(level)]
    with (
        patch.object(Device, "empty_cache", lambda device: events.append("empty")),
        patch.object(MegatronOptimizer, "begin_step", counted_step),
        patch("megatron.training.pretraining.shut_down"),  # the process group is the test's
    ):
        assert pretrain_gpt.main([*MINIMAL, *words]) == 0
    return events


@pytest.mark.parametrize(
    ("level", "iteration"), [(0, ["step"]), (1, ["step", "empty"]), (2, ["empty", "step", "empty"])]
)
def test_unused_memory_is_given_back_as_often_as_the_level_says(level: int, iteration: list[str]) -> None:
    assert run_distributed(1, events_of_a_run, level) == [iteration * 2]
