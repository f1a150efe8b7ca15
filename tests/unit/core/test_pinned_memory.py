"""Pinned memory is about as large as what lies in it, though torch rounds every block up to a power of two."""

from __future__ import annotations

import weakref

import pytest
import torch

from megatron.core.host_memory.pinned_memory import PinnedMemory

MIB, GIB = 2**20, 2**30


def rounded(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length()


class Blocks:
    """Make blocks as torch's allocator of pinned memory does: of powers of two, here without their memory."""

    def __init__(self) -> None:
        self.live = self.most = 0
        self.sizes: list[int] = []

    def make(self, num_bytes: int) -> torch.Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        self.sizes.append(num_bytes)
        self.live += rounded(num_bytes)
        self.most = max(self.most, self.live)
        weakref.finalize(block.untyped_storage(), self._end, rounded(num_bytes))
        return block

    def _end(self, size: int) -> None:
        self.live -= size


def like(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("sizes", [[80, 240, 80, 216, 216, 80], [65] * 7], ids=["hidden size 5120", "a little more"])
def test_blocks_are_hardly_larger_than_what_lies_in_them(sizes: list[int]) -> None:
    blocks = Blocks()
    memory = PinnedMemory(blocks.make)
    kept = [memory.empty_like(like(size * MIB)) for _ in range(32) for size in sizes]
    needed = sum(tensor.nbytes for tensor in kept)
    assert needed <= blocks.most <= 1.15 * needed + GIB
    assert blocks.most < 0.95 * sum(rounded(tensor.nbytes) for tensor in kept)


def test_what_has_gone_gives_its_block_back() -> None:
    blocks = Blocks()
    memory = PinnedMemory(blocks.make)
    for _ in range(3):
        kept = [memory.empty_like(like(80 * MIB)) for _ in range(48)]
        while kept:
            kept.pop()
        # The block that the next tensor would lie in stays.
        assert blocks.live <= GIB
    assert blocks.most <= 6 * GIB


def test_tensors_do_not_overlap_and_lie_as_they_did() -> None:
    memory = PinnedMemory(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    given = [torch.randn(3, 5), torch.randn(7).double(), torch.randn(2, 2, 3).bfloat16(), torch.empty(0, 4)]
    made = [memory.empty_like(tensor).copy_(tensor) for tensor in given]
    for tensor, copy in zip(given, made, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


def test_what_is_very_large_has_a_block_of_its_own() -> None:
    blocks = Blocks()
    memory = PinnedMemory(blocks.make)
    kept = [memory.empty_like(like(size * MIB)) for size in (513, 160, 512, 90)]
    assert [tensor.nbytes for tensor in kept] == [513 * MIB, 160 * MIB, 512 * MIB, 90 * MIB]
    assert blocks.sizes == [513 * MIB, 256 * MIB, 512 * MIB]
