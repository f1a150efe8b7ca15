"""A simulated GPU without a CUDA driver: fake tensors, fake process groups, copies and links.

The device has the specifications of a GPU type. The recorder is notified when communication and host copies begin, when
something waits for them, and when storages are resized. Tokens are routed without values: the load of the experts is
balanced. Operators on fake tensors skip some of torch's bookkeeping, since sizes are plain numbers, never symbols.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.available_host_memory import HostRoom
from megatron.core.cuda_graph import GraphBackend
from megatron.core.device import Device, MemoryUse
from megatron.core.errors import ConfigurationError
from megatron.core.flight_recorder import DeviceMark
from megatron.core.host_memory import Copied, HostCopies
from megatron.core.models.gpt import GPTConfig
from megatron.core.ops import attention_backend, dot_product_attention
from megatron.core.process_group import CollectiveCall
from megatron.core.transformer import MoEConfig, attention
from megatron.core.transformer.moe import deepep
from megatron.planner import Gpu
from megatron.planner.simulation.fake_triton import recorded_programs
from megatron.planner.simulation.operators import CudaOperators, FakeFlexAttention, LowerRightMask
from megatron.planner.simulation.recorder import TO_DEVICE, TO_HOST, Recorder

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.select.int, _aten.slice.Tensor)
"""`FakeTensorMode` has special rules for these, which matter for symbolic sizes only."""
_FACTORIES = (
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default, _aten.new_zeros.default),
    *(_aten.empty_like.default, _aten.zeros_like.default),
)
_EMPTY: Mapping[str, Any] = {}


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` with the same results that takes a third of the time for most operators.

    An operator whose tensors are on one device directly runs its meta kernel. `FakeTensorMode` runs all other
    operators: those with special rules, with tensors on two devices, or with constants.
    """

    _layouts: ClassVar[dict[Any, tuple[Any, Any, torch.dtype]]] = {}
    """Cache of the shape, strides and dtype of results by call, since many meta kernels are slow Python."""

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _EMPTY
    ) -> object:
        """Run an operator without values."""
        if func is _aten._scaled_mm.out:
            # torch has a meta kernel for the other overload only.
            self.dispatch(_aten._scaled_mm.default, types, args, {k: v for k, v in kwargs.items() if k != "out"})
            return kwargs["out"]
        if func in _FACTORIES:
            given = kwargs.get("device")
            device = _common_device(args[:1]) if given is None else _indexed(torch.device(given))
            if device is not None and device.type == "cuda" and not kwargs.get("pin_memory"):
                with in_kernel_invocation_manager(self):
                    return self._wrap(func(*args, **{**kwargs, "device": "meta"}), device)
        elif _has_plain_meta_kernel(func) and "device" not in kwargs:
            device = _common_device((*args, *kwargs.values()))
            if device is not None:
                key = (func, _described(args), _described([*kwargs.items()])) if _makes_one_tensor(func) else None
                with in_kernel_invocation_manager(self):
                    if key is not None and key in self._layouts:
                        shape, strides, dtype = self._layouts[key]
                        result = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                    else:
                        result = func(*args, **kwargs)
                if key is not None:
                    self._layouts[key] = (result.shape, result.stride(), result.dtype)
                return self._wrap(result, device)
        return super().dispatch(func, types, args, kwargs)

    def _wrap(self, result: Any, device: torch.device) -> Any:
        if isinstance(result, torch.Tensor):
            return result if isinstance(result, FakeTensor) else FakeTensor(self, result, device)
        if isinstance(result, (tuple, list)):
            return type(result)(self._wrap(each, device) for each in result)
        return result


def _common_device(values: Iterable[Any]) -> torch.device | None:
    """Return the device of all tensors, or None without tensors, for a tensor with values, or for several devices."""
    device = None
    for tensor in _tensors(values):
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        if device is not None and tensor.fake_device != device:
            return None
        device = tensor.fake_device
    return device


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _indexed(device: torch.device) -> torch.device:
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


def _described(argument: Any) -> Any:
    """Return a key of everything on which a result's layout may depend; numbers have their type, since 1 == 1.0."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_described, argument))
    return type(argument), argument


@functools.cache
def _makes_one_tensor(func: Any) -> bool:
    """Return whether an operator returns exactly one new tensor."""
    results = func._schema.returns
    is_tensor = len(results) == 1 and str(results[0].type) == "Tensor"
    return is_tensor and not any(each.alias_info for each in (*func._schema.arguments, *results))


@functools.cache
def _has_plain_meta_kernel(func: Any) -> bool:
    """Return whether `FakeTensorMode` would run the meta kernel of an operator without a special rule."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    name = func._name
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta"):
        return False
    return func in _VIEWS or not any(applies(func) for applies, _ in op_implementations_checks)


_GENERATOR_STATE_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class FakeDevice(Device):
    """Simulated CUDA device.

    ``on_wait`` is called when the host would wait for the device. ``copies`` records copies between host and device.
    """

    gpu: Gpu
    on_wait: Callable[[str], None]
    copies: HostCopies
    count_live_bytes: Callable[[], int]

    def make_current(self) -> None:
        """Do nothing, since there is only one device."""

    def synchronize(self) -> None:
        """Record that the host waits."""
        self.on_wait("synchronize")

    def seed_default_generator(self, seed: int) -> None:
        """Do nothing, since no random numbers are drawn."""

    def get_rng_state(self) -> torch.Tensor:
        """Return bytes of the size of a CUDA generator's state, without meaning."""
        return torch.zeros(_GENERATOR_STATE_BYTES, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Do nothing, since no random numbers are drawn."""

    def empty_host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return pageable host memory, since no copies are made."""
        with unset_fake_temporarily():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def host_copies(self) -> HostCopies:
        return self.copies

    def free_bytes(self) -> int | None:
        return self.gpu.memory_bytes - self.count_live_bytes()

    def host_room(self) -> HostRoom | None:
        """Return None: the simulated node has unlimited host memory."""
        return None

    def graph_backend(self) -> GraphBackend | None:
        """Raise an error, since CUDA graphs need a driver.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "--cuda-graph-impl local and --optimizer-cuda-graph are not supported in a dry run; omit them: the kernels "
            "are the same"
        )

    def marker(self) -> Callable[[DeviceMark | None], DeviceMark | None] | None:
        """Return None, since communication completes at once."""
        return None

    def memory_use(self) -> MemoryUse:
        """Return zeros; the dry run records the memory of the step itself."""
        return MemoryUse(0.0, 0.0, 0.0, 0.0)

    def peak_tflops(self, dtype_name: str) -> float | None:
        """Return the dense peak of the GPU type."""
        return (self.gpu.half_flops if dtype_name in ("bfloat16", "float16") else self.gpu.single_flops) / 1e12

    def empty_cache(self) -> None:
        """Do nothing, since there is no caching allocator."""


class RecordedCopies(HostCopies):
    """Copies between host and device that are recorded, but not made."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._under_way: dict[str, list[Copied]] = {TO_HOST: [], TO_DEVICE: []}

    def wait(self, copied: Copied) -> None:
        """Record that the device waits for this copy and all copies before it."""
        for queue in self._under_way.values():
            while copied in queue:
                self._recorder.end_transfer(queue.pop(0))

    def wait_on_host(self, copied: Copied) -> None:
        """Record that the host waits for a copy, and with it everything that it launches later."""
        self._recorder.wait("copies")
        self.wait(copied)

    def free(self, tensor: torch.Tensor) -> None:
        """Record that the memory is freed; the storage keeps its size, since fake tensors have no memory."""
        self._recorder.memory.forget(tensor)

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        target = tensor.new_empty(tensor.shape, device="cpu") if target is None else target
        return self._begin(target, TO_HOST)

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        if target is None:
            target = tensor.new_empty(tensor.shape, device="cuda")
        else:
            self._recorder.memory.remember(target, "weights")
        return self._begin(target, TO_DEVICE)

    def _begin(self, target: torch.Tensor, direction: str) -> Copied:
        copied = Copied(target)
        self._under_way[direction].append(copied)
        self._recorder.begin_copy(copied, direction, target.nbytes)
        return copied


_STARTERS = (
    *("allreduce", "all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"),
    *("all_to_all_single", "alltoall_base", "broadcast", "send"),
)
"""Methods of a process group that start the communication which the group's observer has just seen."""


@contextmanager
def observed_links(recorder: Recorder) -> Iterator[None]:
    """Notify the recorder of the beginning and the end of every communication, and of every receive."""
    wait = FakeWork.wait

    def observed_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.end_transfer(work)
        return wait(work, *args, **kwargs)

    with ExitStack() as stack:
        for name in _STARTERS:
            if hasattr(dist.ProcessGroup, name):
                start = _observed(getattr(dist.ProcessGroup, name), recorder)
                stack.enter_context(patch.object(dist.ProcessGroup, name, start))
        stack.enter_context(patch.object(dist.ProcessGroup, "recv", _observed_receive(recorder)))
        # Code that depends on the backend should behave as on GPUs.
        stack.enter_context(patch.object(dist, "get_backend", lambda group=None: "nccl"))
        stack.enter_context(patch.object(FakeWork, "wait", observed_wait))
        yield


def _observed(start: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def observed(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = start(group, *args, **kwargs)
        recorder.begin_transfer(work)
        return work

    return observed


def _observed_receive(recorder: Recorder) -> Callable[..., Any]:
    receive = dist.ProcessGroup.recv

    def observed(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        axes = recorder.axes_of_ranks.get(tuple(dist.get_process_group_ranks(group)), ("pp",))
        recorder.communicate(CollectiveCall("receive", axes, group.size(), sum(each.nbytes for each in tensors)))
        work = receive(group, tensors, *args, **kwargs)
        recorder.begin_transfer(work)
        return work

    return observed


class BalancedExperts(TorchFunctionMode):
    """Replace token counts that the host reads from the device by those of a balanced load.

    ``on_wait`` is called when the host would wait for the device.
    """

    def __init__(self, config: MoEConfig, on_wait: Callable[[str], None]) -> None:
        super().__init__()
        self._config, self._on_wait = config, on_wait
        self._num_kept = 0

    @contextmanager
    def taking_calls(self) -> Iterator[None]:
        """Replace token counts within the context."""
        # Fake tensors have their own ``tolist``, which reads the numbers one by one.
        as_numbers = FakeTensor.tolist

        def tolist(tensor: FakeTensor) -> Any:
            is_count = tensor.dim() in (1, 3) and tensor.dtype is torch.int64 and tensor.is_cuda
            return self._tolist(tensor) if is_count else as_numbers(tensor)

        with patch.object(FakeTensor, "tolist", tolist), self:
            yield

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; if it counts choices by their target, store the number of choices that are kept."""
        if func is torch.searchsorted and args[0].is_cuda and args[0].dtype is torch.int64:
            # After the last target come choices of experts on other ranks, and choices that an expert's capacity drops.
            share = min(1.0, args[1].numel() / (self._config.num_experts or 1))
            share *= min(1.0, self._config.moe_expert_capacity_factor or 1.0)
            self._num_kept = round(args[0].numel() * share)
        return func(*args, **(kwargs or {}))

    def _tolist(self, counts: torch.Tensor) -> list[Any]:
        """Return the choices per target; three-dimensional counts are of sent and received rows, by rank."""
        self._on_wait("tolist")
        ranks, num_local = counts.shape[-2:] if counts.dim() == 3 else (1, counts.numel())
        even, over = divmod(self._num_kept, ranks * num_local)
        shares = [even + (number < over) for number in range(ranks * num_local)]
        by_rank = [shares[first : first + num_local] for first in range(0, len(shares), num_local)]
        return [by_rank] * len(counts) if counts.dim() == 3 else shares


@contextmanager
def simulated_world(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a fake process group."""
    if world_size == 1:
        yield
        return
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # Otherwise torch would prefix every line of an error with the rank, once per simulated world.
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def simulated_gpu(
    recorder: Recorder, gpu: Gpu, model: GPTConfig, rank: int, world_size: int, second_document: int | None
) -> Iterator[FakeDevice]:
    """Yield the simulated GPU of a rank; the recorder records what a model does with fake tensors on it.

    ``second_document`` is the position at which a second document begins in packed samples, for FlexAttention's masks.
    If it is None, Triton and FlexAttention are not available.
    """
    with (
        simulated_world(rank, world_size),
        without_driver(gpu),
        followed_storages(recorder),
        observed_links(recorder),
        without_triton() if second_document is None else with_triton(recorder, second_document),
        # DeepEP computes on real tensors; its exchange is simulated as alltoall.
        patch.object(deepep, "load_deepep", lambda: None),
        QuickFakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        CudaOperators(recorder, gpu.capability),
        BalancedExperts(model.moe, recorder.wait).taking_calls() if model.moe.num_experts else nullcontext(),
    ):
        yield FakeDevice(
            "cuda",
            gpu=gpu,
            on_wait=recorder.wait,
            copies=RecordedCopies(recorder),
            count_live_bytes=lambda: recorder.memory.num_bytes,
        )


@contextmanager
def with_triton(recorder: Recorder, second_document: int) -> Iterator[None]:
    """Make Triton and FlexAttention available."""
    with recorded_programs(recorder), FakeFlexAttention(recorder, second_document).taking_calls():
        yield


@contextmanager
def without_triton() -> Iterator[None]:
    """Make FlexAttention unavailable, which would be compiled if it is installed."""
    with patch.object(attention_backend, "load_flex_attention", lambda: None):
        yield


@contextmanager
def without_driver(gpu: Gpu) -> Iterator[None]:
    """Replace functions of torch that ask the driver or read the bytes of a message, which fake tensors do not have."""
    with (
        patch.object(torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
        patch.object(torch.cuda, "default_generators", (torch.Generator(),)),
        patch.object(dist, "all_gather_object", _gather_own_object),
        # Its packages need a driver; FlashAttention 3 and 4 are counted as torch's own flash kernel.
        patch.object(attention, "activate_flash_implementation", lambda backend, device, shape: None),
        # Torch cannot build its causal mask from fake tensors.
        patch.object(dot_product_attention, "lower_right_mask", LowerRightMask),
    ):
        yield


@contextmanager
def followed_storages(recorder: Recorder) -> Iterator[None]:
    """Notify the recorder of resized storages, through which FSDP frees and gathers weights without an operation."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        recorder.resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_and_tell):
        yield


def _gather_own_object(values: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
    values[:] = [value] * len(values)
