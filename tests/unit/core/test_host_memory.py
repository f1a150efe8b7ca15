"""Host memory: copies to and from the device, pinned memory about as large as its contents, and its reuse."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from megatron.core import host_memory
from megatron.core.host_memory import (
    MIN_BYTES,
    Copied,
    CudaHostCopies,
    HostCopies,
    PinnedMemory,
    ReusedMemory,
    pack,
    pack_again,
    side_by_side,
)
from megatron.core.ops.gemm import linear


def test_bytes_are_counted_by_direction_and_targets_are_filled() -> None:
    copies = HostCopies()
    values = torch.arange(6.0)
    out = copies.to_host(values)
    assert out.tensor.data_ptr() != values.data_ptr()
    target = torch.empty(6)
    assert copies.to_host(values, target).tensor is target
    back = copies.to_device(out.tensor[:2])
    assert copies.to_device(values[:2], target[:2]).tensor.tolist() == back.tensor.tolist() == [0.0, 1.0]
    assert torch.equal(target, values)
    assert (copies.bytes_out, copies.bytes_in) == (48, 16)
    copies.wait(back)
    copies.wait_on_host(back)
    copies.free(values)
    assert values.untyped_storage().nbytes() == 0


class Stream:
    """Note what a stream is given; the one that is entered last is given the copies."""

    current: Stream

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for the copy on {event.stream}")

    def record_event(self) -> Event:
        return Event(self.name, self._log)


class Event:
    """Stand in for an event at the end of a copy."""

    def __init__(self, stream: str, log: list[str]) -> None:
        self.stream, self._log = stream, log

    def synchronize(self) -> None:
        self._log.append(f"the host waits for the copy on {self.stream}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace streams and pinned memory by those of this file; return what happens."""
    log: list[str] = []
    names = iter(("out", "in"))
    main = Stream("the current stream", log)

    def enter(stream: Stream) -> AbstractContextManager[None]:
        log.append(f"copy on {stream.name}")
        return nullcontext()

    def make(num_bytes: int) -> torch.Tensor:
        log.append("pinned memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(host_memory, "_pinned", make)
    return log


def test_cuda_copies_follow_what_is_computed_on_streams_of_their_own(log: list[str]) -> None:
    copies = CudaHostCopies(torch.device("cpu"))
    values = torch.arange(6.0)
    out = copies.to_host(values)
    assert torch.equal(out.tensor, values)
    assert log == ["pinned memory", "out waits for the current stream", "copy on out"]
    log.clear()
    target = torch.empty(6)
    assert copies.to_host(values + 1.0, target).tensor is target
    assert torch.equal(target, values + 1.0)
    assert log == ["out waits for the current stream", "copy on out"]
    log.clear()
    back = copies.to_device(out.tensor)
    assert torch.equal(back.tensor, values)
    assert copies.to_device(target, back.tensor).tensor is back.tensor
    assert torch.equal(back.tensor, target)
    assert log == ["in waits for the current stream", "copy on in"] * 2


def test_work_and_the_host_wait_for_a_copy_that_may_not_be_done(log: list[str]) -> None:
    copies = CudaHostCopies(torch.device("cpu"))
    out, back = copies.to_host(torch.ones(3)), copies.to_device(torch.ones(3))
    log.clear()
    copies.wait(back)
    copies.wait_on_host(out)
    copies.wait(Copied(torch.ones(3)))
    copies.wait_on_host(Copied(torch.ones(3)))
    assert log == ["the current stream waits for the copy on in", "the host waits for the copy on out"]


MIB, GIB = 2**20, 2**30


def rounded(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length()


class Blocks:
    """Make blocks as torch's allocator of pinned memory does, here without their memory.

    They are powers of two, and one that is freed stays, for a block of its own size. ``taken`` counts all of them.
    """

    def __init__(self) -> None:
        self.live = self.taken = 0
        self.sizes: list[int] = []
        self.spare = Counter[int]()

    def make(self, num_bytes: int) -> torch.Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        size = rounded(num_bytes)
        self.sizes.append(num_bytes)
        self.live += size
        if self.spare[size]:
            self.spare[size] -= 1
        else:
            self.taken += size
        weakref.finalize(block.untyped_storage(), self._end, size)
        return block

    def _end(self, size: int) -> None:
        self.live -= size
        self.spare[size] += 1


def like(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("sizes", [[80, 240, 80, 216, 216, 80], [65] * 7], ids=["hidden size 5120", "a little more"])
def test_blocks_are_hardly_larger_than_what_lies_in_them(sizes: list[int]) -> None:
    blocks = Blocks()
    memory = PinnedMemory(blocks.make)
    kept = [memory.empty_like(like(size * MIB)) for _ in range(32) for size in sizes]
    needed = sum(tensor.nbytes for tensor in kept)
    assert needed <= blocks.taken <= 1.15 * needed + GIB
    assert blocks.taken < 0.95 * sum(rounded(tensor.nbytes) for tensor in kept)


@pytest.mark.parametrize("backward", [-1, 0], ids=["the last go first", "the first go first"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("count", "size", "block"), [(16, 6, 64), (8, 20, 64), (200, 5, 64), (48, 80, 256), (40, 140, 1024), (2, 50, 256)]
)
def test_many_steps_take_no_more_than_one(count: int, size: int, block: int, in_flight: int, backward: int) -> None:
    blocks = Blocks()
    memory = PinnedMemory(blocks.make)
    passes: list[list[torch.Tensor]] = []
    for _ in range(40):
        passes.append([memory.empty_like(like(size * MIB)) for _ in range(count)])
        while len(passes) == in_flight and passes[0]:
            passes[0].pop(backward)
        if len(passes) == in_flight:
            passes.pop(0)
    needed = in_flight * count * size
    # A block that is begun, and with several passes in flight one whose first half has gone.
    assert needed <= blocks.taken / MIB <= 8 / 7 * needed + in_flight * block
    passes.clear()
    assert blocks.live == 0


def test_tensors_do_not_overlap_and_lie_as_they_did() -> None:
    memory = PinnedMemory(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    given = [torch.randn(3, 5), torch.randn(7).double(), torch.randn(2, 2, 3).bfloat16(), torch.empty(0, 4)]
    made = [memory.empty_like(tensor).copy_(tensor) for tensor in given]
    for tensor, copy in zip(given, made, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


def test_memory_is_not_given_again_while_a_view_of_it_is_held() -> None:
    memory = PinnedMemory(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    order = random.Random(5)
    kept: list[tuple[float, torch.Tensor]] = []
    for number in range(300):
        made = memory.empty_like(torch.empty(order.choice((300, 5, 77_000)), dtype=torch.float32))
        kept.append((float(number), made.fill_(number)[1:].detach()))
        del made
        while kept and order.random() < 0.5:
            kept.pop(order.randrange(len(kept)))
        assert all(bool((view == value).all()) for value, view in kept)


def test_what_is_very_large_has_a_block_of_its_own() -> None:
    blocks = Blocks()
    memory = PinnedMemory(blocks.make)
    kept = [memory.empty_like(like(size * MIB)) for size in (513, 160, 512, 90)]
    assert [tensor.nbytes for tensor in kept] == [513 * MIB, 160 * MIB, 512 * MIB, 90 * MIB]
    assert blocks.sizes == [513 * MIB, 512 * MIB, 512 * MIB]


@pytest.mark.parametrize("seed", range(20))
def test_a_list_of_tensors_is_packed_into_powers_of_two_hardly_larger_than_they_are(seed: int) -> None:
    """Never more than the one block that torch would round up, and for a rank's share of a checkpoint far less."""
    draw = random.Random(seed)
    largest = draw.choice([2**20, 100 * MIB, 900 * MIB])
    sizes = [draw.randint(0, largest) if draw.random() < 0.5 else draw.randint(0, 4096) for _ in range(200)]
    packing = pack(sizes)
    assert all(block == rounded(block) for block in packing.blocks)
    assert sum(packing.blocks) <= rounded(sum(-(-size // 256) * 256 for size in sizes))
    assert sum(packing.blocks) <= 1.1 * sum(sizes) + 2 * MIB
    by_block: dict[int, list[tuple[int, int]]] = {}
    for (block, start), size in zip(packing.places, sizes):
        if size:
            assert start % 256 == 0
            assert start + size <= packing.blocks[block]
            by_block.setdefault(block, []).append((start, start + size))
    for places in by_block.values():
        ordered = sorted(places)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    fewer = pack_again(sizes[:100], packing.blocks)
    assert fewer is not None
    assert fewer.blocks == packing.blocks
    assert pack_again([*sizes, sum(packing.blocks)], packing.blocks) is None


@pytest.mark.parametrize("seed", range(12))
def test_a_list_is_packed_again_as_it_was(seed: int) -> None:
    """The share of a rank of a model of 8 billion parameters: of each, weights and moments in float32, cut in parts."""
    draw = random.Random(seed)
    tp, parts = draw.choice([1, 2, 4, 8]), draw.choice([2, 8, 32, 64])
    layer = [4096 * 6144 // tp, 4096 * 4096 // tp, 4096 * 28672 // tp, 14336 * 4096 // tp, 4096, 4096]
    parameters = layer * 32 + [128256 * 4096 // tp] * 2 + [4096]
    sizes = [4 * -(-parameter // parts) for parameter in parameters for _ in range(3)]
    packing = pack(sizes)
    assert pack_again(sizes, packing.blocks) == packing


def test_one_tensor_has_one_block_and_no_tensor_a_small_one() -> None:
    assert pack([5 * GIB]).blocks == (8 * GIB,)
    assert pack([5 * GIB, *[100 * MIB] * 30]).blocks == (8 * GIB,)
    assert sum(pack([]).blocks) <= 256
    # As long as 1 GiB is left, no block is smaller.
    assert pack([size * MIB for size in (300, 300, 600, 700, 500)]).blocks == (GIB,) * 3


def test_tensors_side_by_side_fill_one_block_in_steps_of_256_bytes() -> None:
    packing = side_by_side([300, 0, 256, 1])
    assert packing.blocks == (1024,)
    assert sorted(start for (_, start), size in zip(packing.places, [300, 0, 256, 1]) if size) == [0, 512, 768]
    assert side_by_side([]).blocks == (0,)


@pytest.mark.parametrize(
    ("size", "block"),
    [(40, 128), (50, 256), (55, 512), (56, 56), (64, 64), (600, 600), (80, 256), (120, 120), (65, 512)],
)
def test_a_tensor_shares_the_smallest_block_that_its_size_fills_but_for_a_seventh(size: int, block: int) -> None:
    blocks = Blocks()
    kept = PinnedMemory(blocks.make).empty_like(like(size * MIB))
    assert blocks.sizes == [block * MIB]
    assert kept.nbytes == size * MIB


_ROWS = MIN_BYTES // (4 * 1024)


def test_a_dead_tensors_memory_is_lent_again() -> None:
    memory = ReusedMemory()
    first = memory.empty((_ROWS, 1024), torch.float32)
    address = first.data_ptr()
    del first
    again = memory.empty((2 * _ROWS, 1024), torch.bfloat16)
    assert again.data_ptr() == address
    assert again.shape == (2 * _ROWS, 1024)
    assert again.dtype is torch.bfloat16


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_of_two_dead_tensors_the_larger_ones_memory_is_lent(first_to_go: int) -> None:
    memory = ReusedMemory()
    both = [memory.empty((rows, 1024), torch.float32) for rows in (_ROWS, 2 * _ROWS)]
    address = both[1].data_ptr()
    both.pop(first_to_go)
    both.clear()
    assert memory.empty((2 * _ROWS, 1024), torch.float32).data_ptr() == address


def test_memory_of_a_living_tensor_is_not_lent() -> None:
    memory = ReusedMemory()
    view = memory.empty((_ROWS, 1024), torch.float32)[3:5].fill_(7.0)
    gc.collect()
    memory.empty((_ROWS, 1024), torch.float32).fill_(1.0)
    assert (view == 7.0).all()


def test_autograd_keeps_what_it_saved() -> None:
    memory = ReusedMemory()
    x = torch.randn(_ROWS, 16, requires_grad=True)
    weight = torch.randn(1024, 16)
    with torch.no_grad():
        product = linear(x, weight, library="mkl", memory=memory)
    scale = torch.ones((), requires_grad=True)
    loss = (product * scale).sum()
    expected = product.sum()
    del product
    memory.empty((_ROWS, 1024), torch.float32).zero_()
    loss.backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, expected)


def test_a_small_tensor_is_its_own() -> None:
    memory = ReusedMemory()
    first = memory.empty((4, 4), torch.float32)
    assert first.untyped_storage().nbytes() == 64


@pytest.mark.full
def test_a_product_in_lent_memory_is_the_product() -> None:
    memory = ReusedMemory()
    for dtype, biases in ((torch.float32, (False, True)), (torch.bfloat16, (True,))):
        x, weight, bias = (
            torch.randn(shape).to(dtype) for shape in ((64, 32), (MIN_BYTES // 64, 32), (MIN_BYTES // 64,))
        )
        for with_bias in (bias if has else None for has in biases):
            with torch.no_grad():
                got = linear(x.view(8, 8, 32), weight, with_bias, "mkl", memory)
            expected = torch.nn.functional.linear(x.view(8, 8, 32), weight, with_bias)
            torch.testing.assert_close(got, expected)


def test_blocks_that_the_c_library_would_return_to_the_system_are_kept() -> None:
    memory = ReusedMemory()
    memory.empty((2**25,), torch.uint8).fill_(7)
    assert (memory.empty((2**25,), torch.uint8)[::4096] == 7).all()
