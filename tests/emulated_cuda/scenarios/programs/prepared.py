"""Train in a prepared process: the first argument names what is prepared, separated by commas, before the flags."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend

import pretrain_gpt
from megatron.config.run_config import RunConfig
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.datasets.gpt_dataset import GPTSample
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.dist_checkpointing.async_save import BackgroundTask
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.model import Model
from megatron.core.pipeline_parallel.executor import ChunkResult
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.training.exit_reason import run_program
from megatron.training.initialize import Runtime

STAND_INS = Path(__file__).resolve().parents[3] / "unit" / "core" / "ops"
SMALL: dict[str, dict[str, Any]] = {
    "megatron.core.collectives": {"_PIECE_BYTES": 4096},
    "megatron.core.dist_checkpointing.disk": {"CHUNK_BYTES": 8192},
    "megatron.core.distributed.weight_checks": {"_CHUNK_ELEMENTS": 1000},
    "megatron.core.flight_recorder": {"_CAPACITY": 16},
    "megatron.core.host_memory": {"_BLOCKS": (2**14, 2**15, 2**16), "_SMALLEST_OF_MANY": 2**11},
    "megatron.core.inference.running_batch": {"_PROMPT_TOKENS_AT_ONCE": 8},
    "megatron.core.inference.prompt_batch": {"_PROMPT_TOKENS_AT_ONCE": 8},
    "megatron.core.ops.cross_entropy": {"_CUDA_SLAB_ELEMENTS": 500},
    "megatron.core.ops.dropout": {"_BLOCK": 300},
    "megatron.core.ops.linear_attention.chunks": {"_CUDA_SLAB_ELEMENTS": 3000},
    "megatron.core.ops.linear_attention.convolution": {"_CUDA_PART_ELEMENTS": 500},
    "megatron.core.optimizer.inner_optimizer": {"_PIECE": 700},
    "megatron.core.tensor_parallel.initialization": {"_GATHERED_ELEMENTS": 4000},
    "megatron.core.tensor_parallel.loss_chunks": {"_CHUNK_ELEMENTS": 1000, "_ROW_MULTIPLE": 6},
    "megatron.training.callbacks.layer_statistics": {"_BLOCK_ELEMENTS": 600},
}
"""Sizes of what is worked on at once, with which a small model takes several turns."""
SMALL_PROGRAMS: dict[str, dict[str, Any]] = {
    "activation": {"_BLOCK": 32, "_MAX_PARTS": 3},
    "adamw": {"_BLOCK": 128},
    "causal_convolution": {"_ROWS": 4, "_COLUMNS": 16},
    "column_sums": {"_ROWS": 2, "_COLUMNS": 16},
    "cross_entropy": {"_FORWARD_BLOCK": 32, "_BACKWARD_BLOCK": 16},
    "fp8_cast": {"_BLOCK": 16},
    "fp8_gated_cast": {"_BLOCK": 16},
    "fp8_group_cast": {"_BLOCK": 32},
    "fp8_scaled_cast": {"_AMAX_BLOCK": 16, "_ROWS_BLOCK": 32},
    "gated_delta_rule": {"_BLOCKS": dict.fromkeys((torch.bfloat16, torch.float32), (16, 16, 16))},
    "gated_norm": {"_MAX_PARTS": 3},
    "gemm_activation": {"_GROUP": 2},
    "residual": {"_BLOCK": 64, "_MAX_PARTS": 3},
    "query_key_value": {"_TILE": 32, "_MAX_PARTS": 3},
    "selective_scan": {"_BLOCKS": dict.fromkeys((torch.bfloat16, torch.float32), (16, 4, 2, 4))},
    "token_rows": {"_BLOCK": 16},
}
"""Sizes of the blocks and parts of Triton programs."""


def make_sizes_small() -> None:
    """Let a small model have many update buckets, batches of matrices, messages, slabs and blocks of attention."""
    for name, values in SMALL.items():
        _set_all(name, values)
    update_bucket = importlib.import_module("megatron.core.optimizer.update_bucket")
    update_bucket.cut_into_buckets.__defaults__ = (2000,)
    exchange = importlib.import_module("megatron.core.optimizer.muon_shard_exchange").MuonShardExchange
    exchange.__init__.__kwdefaults__["batch_bytes"] = 16_000
    importlib.import_module("megatron.core.dist_checkpointing.planner").SavePlanner.__init__.__defaults__ = (4096,)
    kernel = importlib.import_module("megatron.core.ops.attention_block").AttentionBlocks
    kernel.__init__.__defaults__ = (*kernel.__init__.__defaults__[:-1], 1000)


def make_programs_small() -> None:
    """Let Triton programs have several blocks and parts of several rows."""
    for name, values in SMALL_PROGRAMS.items():
        _set_all(f"megatron.core.ops.triton.{name}", values)


def leave_programs_out() -> None:
    """Let torch compute what Triton programs would, where Triton is installed: FlexAttention needs it."""
    _set_all("megatron.core.ops.triton_support", {"_DTYPES": frozenset()})


def prefer_cudnn() -> None:
    """Let cuDNN's attention come first, as with CUDA 13."""
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    torch._C._set_sdp_priority_order([backend.value for backend in order])


def install_flash_attn() -> None:
    """Install the stub of flash-attn."""
    _install("flash_attn", "flash_attn_stand_in.py")


def install_transformer_engine() -> None:
    """Install the stub of transformer-engine."""
    package = sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    package.__path__ = []
    _install("transformer_engine.pytorch", "transformer_engine_stand_in.py")


def install_deepep() -> None:
    """Install the stub of DeepEP."""
    _install("deep_ep", "deep_ep_stand_in.py")


class FusedAdam(torch.optim.Optimizer):
    """Compute what apex's class computes. It counts its steps by parameter group and makes state at its first step."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients, which are on one device and in float32."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert parameter.is_cuda
                assert parameter.dtype is parameter.grad.dtype is torch.float32
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (root + group["eps"]))


def install_apex() -> None:
    """Install a stub of apex."""
    sys.modules["apex"] = ModuleType("apex")
    optimizers: Any = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    sys.modules["apex.optimizers"] = optimizers


def install_transformer_engine_on_rank_0() -> None:
    """Install the stub of transformer-engine on the first rank only, as on nodes of which one lacks the package."""
    if os.environ.get("RANK", "0") == "0":
        install_transformer_engine()


def take_peers_from_rank_1() -> None:
    """Let the device of rank 1 read the memory of no other device."""
    if os.environ.get("RANK", "0") == "1":
        torch.cuda.can_device_access_peer = lambda *_: False


def write_late() -> None:
    """Let each thread of a save begin when the caller waits for its result, as with a slow file system."""
    begin, wait, result = BackgroundTask.__init__, BackgroundTask.wait, BackgroundTask.result

    def begin_late(self: Any, work: Callable[[], Any], name: str) -> None:
        self.is_awaited = threading.Event()

        def work_late() -> Any:
            self.is_awaited.wait()
            return work()

        begin(self, work_late, name)

    def ask_and_wait(self: Any) -> None:
        self.is_awaited.set()
        wait(self)

    def ask_for_result(self: Any) -> Any:
        self.is_awaited.set()
        return result(self)

    task: Any = BackgroundTask
    task.__init__, task.wait, task.result = begin_late, ask_and_wait, ask_for_result


def train_in_float64() -> None:
    """Give parameters 64 bits, for which there is no flag."""
    program: Any = pretrain_gpt
    parse = program.parse_arguments_or_exit

    def parse_and_widen(*arguments: Any, **named: Any) -> RunConfig:
        config: RunConfig = parse(*arguments, **named)
        model = dataclasses.replace(config.model, params_dtype="float64")
        optimizer = dataclasses.replace(config.optimizer, params_dtype="float64")
        return dataclasses.replace(config, model=model, optimizer=optimizer)

    program.parse_arguments_or_exit = parse_and_widen


class OwnSamples:
    """Make samples that count on from their numbers."""

    def read_microbatches(
        self, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
    ) -> Iterator[Sequence[GPTSample]]:
        """Yield the micro-batches of a rank."""
        first = consumed_samples + data_parallel_rank * micro_batch_size
        while True:
            yield [self._sample(first + number) for number in range(micro_batch_size)]
            first += micro_batch_size * data_parallel_size

    is_padded = False

    @classmethod
    def _sample(cls, number: int) -> GPTSample:
        text = (7 * number + np.arange(33) * (number % 5 + 1)) % 63
        sample: GPTSample = {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": np.ones(32, np.float32),
            "position_ids": np.arange(32),
        }
        if cls.is_padded:
            sample["padding_mask"] = np.arange(32) >= 9 + number % 24
            sample["loss_mask"][sample["padding_mask"]] = 0.0
        return sample


class _OwnSets:
    def check(self) -> None:
        pass

    def build(self) -> DatasetSplits:
        return DatasetSplits(train=OwnSamples(), valid=OwnSamples(), test=None)


def make_own_samples() -> None:
    """Let this script make the samples."""
    pretrain_gpt.provide_datasets = lambda *_: _OwnSets()  # type: ignore[assignment]


def make_padded_samples() -> None:
    """Let this script make samples with padding at their ends."""
    OwnSamples.is_padded = True
    make_own_samples()


def write_two_data_sets() -> None:
    """Write the token files of two data sets into this folder, and a file that names each."""
    if os.environ.get("RANK", "0") != "0":
        limit = time.monotonic() + 60.0
        while not Path("second.txt").exists():
            if time.monotonic() > limit:
                raise TimeoutError("rank 0 did not write second.txt")
            time.sleep(0.01)
        return
    for name, step in (("first", 1), ("second", 3)):
        with IndexedDatasetBuilder(Path(name), np.dtype(np.uint16)) as builder:
            for document in range(16):
                builder.add_document(((document + step * np.arange(70)) % 60).astype(np.uint16))
            builder.finalize()
        Path(f"{name}.new").write_text(f"{name}\n")
        Path(f"{name}.new").rename(f"{name}.txt")


def look_at_device() -> None:
    """Let rank 0 write before each forward pass how far its device has come with communications."""
    provide, step = pretrain_gpt.provide_model, pretrain_gpt.forward_step
    flights: list[FlightRecorder] = []

    def provide_and_mark(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
        runtime.flight.mark = runtime.device.marker()
        flights[:] = [runtime.flight] if runtime.state.rank == 0 else []
        return provide(config, runtime, contents)

    def look_and_step(batch: Batch, model: Model, hidden: torch.Tensor | None) -> ChunkResult:
        for flight in flights:
            view = flight.on_device()
            assert view is not None, "the device is marked"
            entries = {"inside": view.inside, "beside": view.beside, "ahead": (view.ahead,) if view.ahead else ()}
            operations = {name: [flight.describe(each).operation for each in some] for name, some in entries.items()}
            with open("view.jsonl", "a") as file:
                file.write(json.dumps({**operations, "entered": view.entered}) + "\n")
        return step(batch, model, hidden)

    pretrain_gpt.provide_model = provide_and_mark
    pretrain_gpt.forward_step = look_and_step


PREPARATIONS: dict[str, Callable[[], None]] = {
    "look-at-device": look_at_device,
    "small": make_sizes_small,
    "small-programs": make_programs_small,
    "no-programs": leave_programs_out,
    "cudnn": prefer_cudnn,
    "flash-attn": install_flash_attn,
    "transformer-engine": install_transformer_engine,
    "deepep": install_deepep,
    "transformer-engine-of-rank-0": install_transformer_engine_on_rank_0,
    "no-peers-of-rank-1": take_peers_from_rank_1,
    "apex": install_apex,
    "late-writes": write_late,
    "float64": train_in_float64,
    "own-samples": make_own_samples,
    "padded-samples": make_padded_samples,
    "two-data-sets": write_two_data_sets,
}


def _set_all(name: str, values: dict[str, Any]) -> None:
    module = importlib.import_module(name)
    for constant, value in values.items():
        assert hasattr(module, constant), f"{name} has no {constant}"
        setattr(module, constant, value)


def _install(name: str, file: str) -> None:
    spec = importlib.util.spec_from_file_location(name, STAND_INS / file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    for preparation in sys.argv[1].split(","):
        PREPARATIONS[preparation]()
    run_program(lambda: pretrain_gpt.main(sys.argv[2:]))
