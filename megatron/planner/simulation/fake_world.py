"""The surroundings of a simulated step: fake process groups, no CUDA driver, and recorded sizes of storages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.ops import attention_backend, dot_product_attention
from megatron.planner.gpu import Gpu
from megatron.planner.simulation.balanced_experts import BalancedExperts
from megatron.planner.simulation.device import PretendedDevice
from megatron.planner.simulation.flex_attention import PretendedFlexAttention
from megatron.planner.simulation.host_copies import RecordedCopies
from megatron.planner.simulation.links import observed_links
from megatron.planner.simulation.operators import CudaOperators, LowerRightMask
from megatron.planner.simulation.quick_fake_tensors import QuickFakeTensorMode
from megatron.planner.simulation.recorder import Recorder
from megatron.planner.simulation.triton import recorded_programs


@contextmanager
def simulated_world(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a fake process group."""
    if world_size == 1:
        yield
        return
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # Torch would name the rank before every line of an error from now on, and once more for each world.
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def simulated_gpu(
    recorder: Recorder, gpu: Gpu, model: GPTConfig, rank: int, world_size: int, second_document: int | None
) -> Iterator[PretendedDevice]:
    """Yield a simulated GPU of a rank, on which the recorder sees what a model does with tensors without values.

    ``second_document`` is the position at which a second document begins in packed samples, for FlexAttention's masks.
    None leaves Triton and FlexAttention out.
    """
    with (
        simulated_world(rank, world_size),
        without_driver(gpu),
        followed_storages(recorder),
        observed_links(recorder),
        without_triton() if second_document is None else with_triton(recorder, second_document),
        QuickFakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        CudaOperators(recorder, gpu.capability),
        BalancedExperts(model, recorder.wait).taking_calls() if model.num_experts else nullcontext(),
    ):
        yield PretendedDevice(
            "cuda",
            gpu=gpu,
            on_wait=recorder.wait,
            copies=RecordedCopies(recorder),
            count_live_bytes=lambda: recorder.memory.num_bytes,
        )


@contextmanager
def with_triton(recorder: Recorder, second_document: int) -> Iterator[None]:
    """Have Triton, and FlexAttention with it."""
    with recorded_programs(recorder), PretendedFlexAttention(recorder, second_document).taking_calls():
        yield


@contextmanager
def without_triton() -> Iterator[None]:
    """Have neither: tensors without values go to torch, but FlexAttention would be compiled where it is installed."""
    with patch.object(attention_backend, "load_flex_attention", lambda: None):
        yield


@contextmanager
def without_driver(gpu: Gpu) -> Iterator[None]:
    """Answer what torch's own code asks of a driver or of the bytes of a message: fake tensors have none."""
    with (
        patch.object(torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
        patch.object(torch.cuda, "default_generators", (torch.Generator(),)),
        patch.object(dist, "all_gather_object", _gather_own_object),
        # Fake tensors cannot become torch's mask.
        patch.object(dot_product_attention, "lower_right_mask", LowerRightMask),
    ):
        yield


@contextmanager
def followed_storages(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of storages that are given another size, which is no operation: so weights come and go."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        recorder.resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_and_tell):
        yield


def _gather_own_object(values: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
    values[:] = [value] * len(values)
