"""Where the host waits for the device in a training step, and which copies a micro-batch brings: run on meta tensors.

A meta tensor is on a device of its own and has no values, so that whoever reads one, or copies anything from the host
to it, is seen. What CUDA alone does (`InnerOptimizer.decides_on_device`) is asked for.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pretrain_gpt
from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import parse_arguments
from megatron.config.run_config import RunConfig
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.data_history import SkippedSamples
from megatron.core.device import Device
from megatron.core.host_memory import HostCopies
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.timers import Timers
from megatron.training.evaluation import evaluate
from megatron.training.fault_tolerance.anomaly_detector import AnomalyDetector
from megatron.training.initialize import Runtime
from megatron.training.model_setup import ModelAndOptimizer, build_model_and_optimizer
from megatron.training.training_step import TrainingStep

LENGTH, BATCH, NUM_MICROBATCHES = 12, 3, 2
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --train-iters 9 --lr 1e-3 --mock-data "
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --micro-batch-size {BATCH} "
    f"--global-batch-size {BATCH * NUM_MICROBATCHES} --tokenizer-type NullTokenizer --vocab-size 52"
)
LION = " --optimizer lion"
WATCHED = " --spike-policy stop --check-for-large-grads"
LLAMA = (
    " --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention \
--num-query-groups 2 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)


class MetaDevice(Device):
    """Stand for a device that is not the host."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("meta")


class Crossings(TorchDispatchMode):
    """Name every copy between host and device; what is read from the device is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[str] = []
        self.to_device: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if name == "_local_scalar_dense" and "meta" in devices:
            self.to_host.append(name)
            return 1.0
        target = torch.device(kwargs.get("device") or next(iter(devices), "cpu")).type
        if name == "_to_copy" and devices == {"meta"} and target == "cpu":
            self.to_host.append(name)
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if (name == "_to_copy" and devices == {"cpu"} and target == "meta") or (
            name == "copy_" and (args[0].device.type, args[1].device.type) == ("meta", "cpu")
        ):
            self.to_device.append(name)
        return func(*args, **kwargs)


class Source:
    """Give micro-batches without content; positions are one tensor for all of them, as in a run."""

    positions = torch.arange(LENGTH).to("meta").expand(BATCH, -1)

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        return np.arange(consumed_samples, consumed_samples + count)

    def sample_ids_hash(self, sample_ids: NDArray[np.int64]) -> str:
        return ""

    def next(self) -> Batch:
        tokens = torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta")
        mask, count = torch.empty(BATCH, LENGTH, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
        return Batch(tokens, tokens, mask, self.positions, None, count)


def provide(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
    return GPTModel(config.model, runtime.state.tp, runtime.rng, seed=None, device="meta")


@pytest.fixture
def _kernels_take_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch make its fused optimizers of meta tensors, and ours leave the decision to them."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    made = InnerOptimizer.__init__

    def init(self: InnerOptimizer, *args: Any) -> None:
        made(self, *args)
        self.decides_on_device = True

    monkeypatch.setattr(InnerOptimizer, "__init__", init)


def build(flags: str) -> tuple[RunConfig, Runtime, ModelAndOptimizer]:
    config = parse_arguments(flags.split())
    is_rotary = config.model.position_embedding_type == "rope"
    model = dataclasses.replace(config.model, vocab_size=52, scale_embeddings=is_rotary)
    config = dataclasses.replace(config, model=model)
    device = MetaDevice("cpu")
    state = create_parallel_state()
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    return config, runtime, build_model_and_optimizer(config, runtime, provide, lambda line: None)


def steps(flags: str) -> Iterator[Crossings]:
    """Yield what crosses between host and device in the first step, the second, …"""
    config, runtime, parts = build(flags)
    forward_step = pretrain_gpt.forward_step
    # It is never asked for data or checkpoints: nothing goes wrong.
    guard = AnomalyDetector(config, runtime, parts, forward_step, None, SkippedSamples(), None, print)  # type: ignore[arg-type]
    step = TrainingStep(config, runtime, parts, forward_step, Timers(), guard=guard)
    train_state = TrainState()
    while True:
        with Crossings() as crossings:
            step.run(train_state, Source(), config.training.global_batch_size, None)
        yield crossings


@pytest.mark.default(1)
@pytest.mark.usefixtures("_kernels_take_meta")
@pytest.mark.parametrize("flags", ["", " --fp16 --log-num-zeros-in-grad", LLAMA, LLAMA + " --bf16", WATCHED, LION])
def test_a_step_waits_once_and_copies_nothing(flags: str) -> None:
    run = steps(FLAGS + flags)
    next(run)
    crossings = next(run)
    assert crossings.to_host == ["_to_copy"]
    assert crossings.to_device == []


@pytest.mark.usefixtures("_kernels_take_meta")
@pytest.mark.parametrize("flags", ["", " --bf16 --log-num-zeros-in-grad --ema-decay 0.9"])
def test_a_launched_step_waits_only_when_it_is_finished(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, runtime, parts = build(f"{FLAGS} {flags} --overlap-step-results --rerun-mode disabled")
    monkeypatch.setattr(MetaDevice, "is_cuda", property(lambda device: True))
    monkeypatch.setattr(MetaDevice, "host_copies", lambda device: HostCopies())
    monkeypatch.setattr(MetaDevice, "peak_tflops", lambda device, dtype: None)
    step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers())
    train_state, unread = TrainState(), []
    for number in range(3):
        with Crossings() as crossings:
            unread.append(step.launch(train_state, Source(), config.training.global_batch_size, None))
        assert crossings.to_host == []
        assert number == 0 or crossings.to_device == []
        if number:
            with Crossings() as crossings:
                report, _ = step.finish(unread.pop(0), train_state, Source())
            assert crossings.to_host == ["_to_copy"]
            assert (report.iteration, train_state.iteration) == (number, number + 1)


@pytest.mark.usefixtures("_kernels_take_meta")
def test_an_evaluation_waits_once_for_all_its_micro_batches() -> None:
    config, runtime, parts = build(FLAGS + LLAMA)
    with Crossings() as crossings:
        evaluate(config, runtime, parts, pretrain_gpt.forward_step, Source(), num_microbatches=3)
    assert crossings.to_host == ["_to_copy"]
    # The rotary frequencies: this run has made no step.
    assert crossings.to_device == ["_to_copy"]
