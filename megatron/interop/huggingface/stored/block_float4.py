"""Weights of 4 bits with an exponent for each 32 of them (MXFP4), read as the values that they stand for.

A byte holds two numbers of a sign, two bits of exponent and one of mantissa, the lower half first (OCP Microscaling
Formats 1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
"""

from __future__ import annotations

import torch

from megatron.core.errors import CheckpointError
from megatron.core.precision import dtype_from_name
from megatron.core.sharding import Box
from megatron.interop.huggingface.stored.quantization import BlockFloat4
from megatron.interop.huggingface.weight_files import WeightEntry, WeightFiles

_BLOCKS, _SCALES = "_blocks", "_scales"
_IN_BLOCK, _BYTES = 32, 16
_EXPONENT_OF_ONE = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockFloat4Weights:
    """Multiply each 4-bit weight by the power of two of its block; other tensors are read as they are.

    The files have ``NAME_blocks``, bytes ``[experts, out, in / 32, 16]``, and ``NAME_scales``, exponents plus 127
    ``[experts, out, in / 32]``; what is read is ``NAME``, ``[experts, in, out]``.

    Raises:
        CheckpointError: blocks are of another kind or shape, or have no scales that fit.
    """

    def __init__(self, files: WeightFiles, quantization: BlockFloat4) -> None:
        self.folder = files.folder
        self._files, self._dtype = files, dtype_from_name(quantization.dtype)
        self._quantised = {name.removesuffix(_BLOCKS) for name in files.entries if name.endswith(_BLOCKS)}
        stored = {name + ending for name in self._quantised for ending in (_BLOCKS, _SCALES)}
        self.entries: dict[str, WeightEntry] = {
            name: entry for name, entry in files.entries.items() if name not in stored
        }
        for name in self._quantised:
            self.entries[name] = self._entry(name)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if name not in self._quantised:
            return self._files.read(name, box)
        (expert, first, row), (experts, columns, rows) = box.offset, box.shape
        start, end = first // _IN_BLOCK, -(-(first + columns) // _IN_BLOCK)
        of_blocks = Box((expert, row, start), (experts, rows, end - start))
        packed = self._files.read(name + _BLOCKS, Box((*of_blocks.offset, 0), (*of_blocks.shape, _BYTES)))
        exponents = self._files.read(name + _SCALES, of_blocks).int() - _EXPONENT_OF_ONE
        magnitudes = torch.tensor(_MAGNITUDES)
        values = torch.cat((magnitudes, -magnitudes))
        pairs = torch.stack((values[(packed & 15).int()], values[(packed >> 4).int()]), dim=-1)
        whole = torch.ldexp(pairs.flatten(3), exponents[..., None]).flatten(2)
        inner = first - start * _IN_BLOCK
        return whole[:, :, inner : inner + columns].mT.to(self._dtype)

    def _entry(self, name: str) -> WeightEntry:
        blocks, scales = (self._files.entries.get(name + ending) for ending in (_BLOCKS, _SCALES))
        assert blocks is not None, "names are of blocks"
        if scales is None:
            raise CheckpointError(f"{self.folder}: {name + _BLOCKS} is of 4 bits, and {name + _SCALES} is missing")
        for entry, ending in ((blocks, _BLOCKS), (scales, _SCALES)):
            if entry.dtype != torch.uint8:
                raise CheckpointError(f"{self.folder}: {name + ending} is {entry.dtype}; torch.uint8 is expected")
        if len(blocks.shape) != 4 or blocks.shape[3] != _BYTES:
            raise CheckpointError(
                f"{self.folder}: {name + _BLOCKS} has the shape {list(blocks.shape)}; four dims are expected, the last "
                f"of {_BYTES} bytes"
            )
        if scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"{self.folder}: {name + _SCALES} has the shape {list(scales.shape)}; the blocks make it "
                f"{list(blocks.shape[:3])}"
            )
        experts, rows, num_blocks, _ = blocks.shape
        return WeightEntry(blocks.file, (experts, num_blocks * _IN_BLOCK, rows), self._dtype, blocks.start)
