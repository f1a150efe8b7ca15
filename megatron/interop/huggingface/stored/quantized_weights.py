"""Quantised weights of a model folder, read as the values that they stand for."""

from __future__ import annotations

import dataclasses

import torch

from megatron.core.errors import CheckpointError
from megatron.core.precision import dtype_from_name
from megatron.core.sharding import Box
from megatron.interop.huggingface.stored.quantization import BlockFloat8
from megatron.interop.huggingface.weight_files import WeightEntry, WeightFiles

_FACTORS = "_scale_inv"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class BlockFloat8Weights:
    """Multiply each 8-bit weight by the factor of its block; other tensors are read as they are.

    Raises:
        CheckpointError: a weight of 8 bits has no factors, or others than its blocks need.
    """

    def __init__(self, files: WeightFiles, quantization: BlockFloat8) -> None:
        self.folder = files.folder
        self._files, self._block = files, quantization.block
        self._dtype = dtype_from_name(quantization.dtype)
        self._quantised = {name for name, entry in files.entries.items() if entry.dtype in _FLOAT8}
        for name in self._quantised:
            self._check_factors(name)
        factors = {name + _FACTORS for name in self._quantised}
        self.entries: dict[str, WeightEntry] = {
            name: dataclasses.replace(entry, dtype=self._dtype) if name in self._quantised else entry
            for name, entry in files.entries.items()
            if name not in factors
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        values = self._files.read(name, box)
        if name not in self._quantised:
            return values
        places = [
            torch.arange(start, start + length) // size
            for start, length, size in zip(box.offset, box.shape, self._block, strict=True)
        ]
        first = tuple(int(place[0]) if len(place) else 0 for place in places)
        counts = tuple(int(place[-1]) - start + 1 if len(place) else 0 for place, start in zip(places, first))
        factors = self._files.read(name + _FACTORS, Box(first, counts)).float()
        rows, columns = (place - start for place, start in zip(places, first))
        return (values.float() * factors[rows][:, columns]).to(self._dtype)

    def _check_factors(self, name: str) -> None:
        shape, factors = self._files.entries[name].shape, self._files.entries.get(name + _FACTORS)
        if len(shape) != 2:
            raise CheckpointError(f"{self.folder}: {name} is of 8 bits and {list(shape)}; two dims are expected")
        wanted = tuple(-(-length // size) for length, size in zip(shape, self._block))
        if factors is None:
            raise CheckpointError(f"{self.folder}: {name} is of 8 bits, and {name + _FACTORS} is missing")
        if factors.shape != wanted:
            raise CheckpointError(
                f"{self.folder}: {name + _FACTORS} has the shape {list(factors.shape)}; blocks of "
                f"{self._block[0]} x {self._block[1]} of {list(shape)} make it {list(wanted)}"
            )
