"""Optimizer offload on one replica: bitwise what is computed without, the bytes that cross, and the order of copies."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_parameters import ParamShard
from megatron.core.errors import TrainingError
from megatron.core.host_memory import Copied, HostCopies
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.optimizer.cpu_offloading import HostOffload, split_groups
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_bucket import cut_into_buckets
from tests.unit.core.distributed.toy_model import ToyModel
from tests.unit.core.optimizer.test_optimizer import STATE, build, poisoned_step, train_step

OFFLOAD: dict[str, object] = {"optimizer_cpu_offload": True, "clip_grad": 0.3, "weight_decay": 0.1}
NUM_STEPS = 3
NUM_PARAMETERS = sum(p.numel() for p in ToyModel().parameters())


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a bucket have at most 64 elements, so that the model has several."""
    small = functools.partial(cut_into_buckets, max_elements=64)
    monkeypatch.setattr(optimizer_module, "cut_into_buckets", small)


def trained(dtype: torch.dtype, **options: object) -> tuple[list[object], list[torch.Tensor], MegatronOptimizer]:
    ddp, optimizer = build(dtype, initial_loss_scale=2.0**6, **options)
    outcomes: list[object] = [train_step(ddp, optimizer, index) for index in range(NUM_STEPS)]
    return outcomes, [parameter.detach().clone() for parameter in ddp.parameters()], optimizer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_every_fraction_computes_the_same_bits(dtype: torch.dtype, name: str) -> None:
    plain = {**OFFLOAD, "optimizer_cpu_offload": False, "optimizer": name}
    outcomes, expected, _ = trained(dtype, **plain)
    for fraction in (0.0, 0.3, 0.8, 1.0):
        for overlap in (False, True):
            options = {**OFFLOAD, "optimizer": name, "optimizer_offload_fraction": fraction}
            found, parameters, optimizer = trained(dtype, overlap_cpu_optimizer_d2h_h2d=overlap, **options)
            assert found == outcomes
            assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
            num_buckets = len(optimizer.offload.buckets) if optimizer.offload else 0
            assert (num_buckets > 2) == (fraction > 0.5)


@pytest.mark.parametrize(("fraction", "num_on_host"), [(0.0, 0), (0.25, 128), (0.56, 128), (0.57, 229), (1.0, 229)])
@pytest.mark.parametrize("in_bf16", [False, True])
def test_bytes_that_cross_and_stay_equal_the_closed_form(fraction: float, num_on_host: int, in_bf16: bool) -> None:
    """A fraction is rounded up to whole blocks of 128 elements; all there are are 229."""
    assert NUM_PARAMETERS == 229
    options = {**OFFLOAD, "optimizer_offload_fraction": fraction}
    ddp, optimizer = build(torch.bfloat16, in_bf16=in_bf16, **options)
    for index in range(NUM_STEPS):
        train_step(ddp, optimizer, index)
    on_host = sum(bucket.num_elements for bucket in optimizer.offload.buckets) if optimizer.offload else 0
    assert on_host == num_on_host
    if optimizer.offload:
        assert optimizer.offload.copies.bytes_out == NUM_STEPS * num_on_host * (2 if in_bf16 else 4)
        assert optimizer.offload.copies.bytes_in == NUM_STEPS * num_on_host * 2
    on_device = sum(bucket.num_elements for bucket in optimizer._on_device)
    assert on_device == 229 - num_on_host
    # Main parameter and two moments, four bytes each, wherever they are.
    assert sum(tensor.nbytes for bucket in optimizer._on_device for tensor in bucket.held()) == 12 * on_device
    assert sum(tensor.nbytes for tensor in optimizer.held_tensors()) == 12 * 229


def test_main_parameters_of_a_full_precision_model_are_copies_on_the_host_only() -> None:
    _, _, optimizer = trained(torch.float32, **OFFLOAD, optimizer_offload_fraction=0.3)
    assert sum(tensor.nbytes for tensor in optimizer.held_tensors()) == 12 * 128 + 8 * 101
    assert not any(name.startswith("optimizer.main_param") for name in optimizer.sharded_state())


def test_pais_name_is_adam_with_half_of_it_offloaded() -> None:
    config = OptimizerConfig(optimizer="hybridadam")
    assert (config.optimizer, config.offload_fraction) == ("adam", 0.5)
    assert OptimizerConfig(optimizer="hybridadam", optimizer_offload_fraction=1.0).offload_fraction == 1.0
    assert OptimizerConfig(optimizer_cpu_offload=True).offload_fraction == 1.0
    assert OptimizerConfig(optimizer_offload_fraction=0.7).offload_fraction == 0.0


NUM_BUCKETS = 5
SECOND = range(NUM_BUCKETS + 1, 2 * NUM_BUCKETS + 1)


class LoggedCopies(HostCopies):
    """Copy at once; note the copies of each bucket, by their numbers in all steps, and when somebody waits."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.offload: HostOffload | None = None
        self.num_copies = Counter[str]()
        self.names: dict[Copied, str] = {}

    def wait(self, copied: Copied) -> None:
        self.events.append(f"device waits for {self.names[copied]}")

    def wait_on_host(self, copied: Copied) -> None:
        self.events.append(f"wait for {self.names[copied]}")

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return self._note("to host", super()._copy_out(tensor, target))

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return self._note("to device", super()._copy_in(tensor, target))

    def _note(self, direction: str, copied: Copied) -> Copied:
        assert self.offload is not None
        lengths = [len(bucket.shards) for bucket in self.offload.buckets] * NUM_STEPS
        self.num_copies[direction] += 1
        ends = list(itertools.accumulate(lengths))
        name = f"{direction} {bisect.bisect_left(ends, self.num_copies[direction]) + 1}"
        if self.num_copies[direction] in ends:
            self.events.append(name)
        self.names[copied] = name
        return copied


def copies_of_second_step(monkeypatch: pytest.MonkeyPatch, *, overlap: bool) -> list[str]:
    events: list[str] = []
    copies = LoggedCopies(events)
    step = InnerOptimizer.step

    def logged(self: InnerOptimizer, *args: object) -> None:
        events.append("update")
        step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(InnerOptimizer, "step", logged)
    ddp = DistributedDataParallel(ToyModel(torch.float32), DistributedDataParallelConfig(), STATE)
    config = OptimizerConfig(
        lr=0.01, optimizer_cpu_offload=True, optimizer_offload_fraction=0.8, overlap_cpu_optimizer_d2h_h2d=overlap
    )
    optimizer = MegatronOptimizer(config, [ddp], STATE, None, lambda: copies)
    assert optimizer.offload is not None
    copies.offload = optimizer.offload
    assert len(optimizer.offload.buckets) == NUM_BUCKETS
    assert not optimizer._on_device
    train_step(ddp, optimizer, 0)
    events.clear()
    train_step(ddp, optimizer, 1)
    return events


def test_without_overlap_one_follows_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = []
    for number in SECOND:
        fetched, sent = f"to host {number}", f"to device {number}"
        expected += [fetched, f"wait for {fetched}", "update", f"wait for to device {number - 1}", sent]
        expected += [f"wait for {sent}"]
    assert copies_of_second_step(monkeypatch, overlap=False) == [*expected, "device waits for to device 10"]


def test_with_overlap_two_buckets_are_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    events = copies_of_second_step(monkeypatch, overlap=True)
    expected = ["to host 6", "to host 7"]
    # Whoever last used the memory of a bucket's parameters: every other bucket, from the first on.
    for number, last in zip(SECOND, (5, 4, 6, 7, 8), strict=True):
        expected += [f"wait for to host {number}", "update"]
        expected += [f"to host {number + 2}"] if number + 2 in SECOND else []
        expected += [f"wait for to device {last}", f"to device {number}"]
    assert events == [*expected, "device waits for to device 10"]


def test_a_skipped_step_changes_nothing_and_sends_nothing() -> None:
    ddp, optimizer = build(torch.float16, initial_loss_scale=4.0, hysteresis=1, **OFFLOAD)
    train_step(ddp, optimizer, 0)
    before = [tensor.clone() for tensor in (*optimizer.held_tensors(), *ddp.parameters())]
    assert optimizer.offload is not None
    sent = optimizer.offload.copies.bytes_in
    assert not poisoned_step(ddp, optimizer, float("inf")).success
    after = (*optimizer.held_tensors(), *ddp.parameters())
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert optimizer.offload.copies.bytes_in == sent
    assert (optimizer.loss_scale, optimizer.num_steps) == (2.0, 1)


def test_a_bad_gradient_is_named() -> None:
    ddp, optimizer = build(torch.bfloat16, **OFFLOAD)
    with pytest.raises(TrainingError, match=r"rank 0: fc2\.weight;"):
        poisoned_step(ddp, optimizer, float("nan"))


def test_weights_that_were_loaded_alone_reach_the_host() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ddp, optimizer = build(dtype, **OFFLOAD, lr=0.0)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.fill_(3.0)
        optimizer.reload_main_params()
        train_step(ddp, optimizer, 0)
        assert all(parameter.eq(3.0).all() for parameter in ddp.parameters())


def test_full_precision_weights_of_a_checkpoint_reach_the_host() -> None:
    ddp, optimizer = build(torch.float32, **OFFLOAD, lr=0.0)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.fill_(3.0)
    optimizer.load_scalar_state(optimizer.scalar_state())
    train_step(ddp, optimizer, 0)
    assert all(parameter.eq(3.0).all() for parameter in ddp.parameters())


def part(length: int) -> ParamShard:
    parameter = nn.Parameter(torch.arange(float(length)))
    return ParamShard(parameter, 0, length, parameter.detach(), torch.zeros(length))


def lengths(groups: list) -> list[list[int]]:
    return [[part.end - part.start for part in parts] for parts, _ in groups]


def test_the_boundary_is_cut_at_whole_blocks() -> None:
    groups = [([part(300), part(500)], 1.0), ([], 0.0), ([part(200)], 0.0)]
    on_host, on_device = split_groups(groups, 0.4)
    # 400 elements are four blocks.
    assert (lengths(on_host), lengths(on_device)) == ([[300, 212]], [[288], [200]])
    assert torch.equal(on_host[0][0][1].values, torch.arange(212.0))
    assert torch.equal(on_device[0][0][0].values, torch.arange(212.0, 500.0))
    assert [multiplier for _, multiplier in on_device] == [1.0, 0.0]
    assert lengths(split_groups(groups, 1.0)[0]) == [[300, 500], [200]]
    assert lengths(split_groups(groups, 0.0)[1]) == [[300, 500], [200]]


def test_buckets_are_filled_in_order_and_long_parts_are_cut() -> None:
    buckets = list(cut_into_buckets([([part(30), part(50), part(70)], 1.0), ([part(300), part(20)], 0.0)], 128))
    assert [lengths(bucket) for bucket in buckets] == [[[30, 50]], [[70]], [[128]], [[128]], [[44, 20]]]
    assert [multiplier for bucket in buckets for _, multiplier in bucket] == [1.0, 1.0, 0.0, 0.0, 0.0]
    whole = list(cut_into_buckets([([part(128), part(64), part(64), part(256)], 1.0)], 128))
    assert [lengths(bucket) for bucket in whole] == [[[128]], [[64, 64]], [[128]], [[128]]]
