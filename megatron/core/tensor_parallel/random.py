"""Named streams of random numbers, so that dropout is equal or different over tensor-parallel ranks as it must be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from megatron.core.device import Device
from megatron.core.parallel_sizes import GRID_AXES, Place

REPLICATED = "replicated"
"""Stream that is equal on all ranks of a tensor-parallel group: dropout of activations that they all hold."""
TENSOR_PARALLEL = "tensor-parallel"
"""Stream that differs on every rank of a tensor-parallel group: dropout of heads or of parts of the sequence."""
DEFAULT = "default"
"""Torch's own generator, seeded alike on all ranks."""
STREAM_AXES: Mapping[str, tuple[str, ...]] = {
    DEFAULT: (),
    REPLICATED: tuple(axis for axis in GRID_AXES if axis != "tp"),
    TENSOR_PARALLEL: GRID_AXES,
}
"""The axes of the grid of ranks along which a stream differs."""


def stream_seed(seed: int, stream: str, coordinates: tuple[int, ...]) -> int:
    """Return the 63-bit seed of a stream at a place in the grid of ranks."""
    text = f"{seed}\0{stream}\0{','.join(map(str, coordinates))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RngStreams:
    """Hold one generator state for each named stream; ``fork`` makes a stream torch's default for a while.

    ``place`` has this rank's coordinate along every axis of ``STREAM_AXES``.
    """

    def __init__(self, device: Device, seed: int, place: Place) -> None:
        self.device = device
        device.seed_default_generator(seed)
        outer = device.get_rng_state()
        self._seed = seed
        self._coordinates = {
            stream: tuple(place[axis] for axis in axes) for stream, axes in STREAM_AXES.items() if stream != DEFAULT
        }
        self._states = {stream: self._seeded(stream) for stream in self._coordinates}
        device.set_rng_state(outer)

    @contextmanager
    def fork(self, stream: str) -> Iterator[None]:
        """Draw from ``stream`` inside the context and from the default generator again after it."""
        outer = self.device.get_rng_state()
        self.device.set_rng_state(self._states[stream])
        try:
            yield
        finally:
            self._states[stream] = self.device.get_rng_state()
            self.device.set_rng_state(outer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of every stream, and of the default generator under ``default``."""
        return {DEFAULT: self.device.get_rng_state(), **self._states}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Restore what ``state_dict`` returned."""
        self.device.set_rng_state(states[DEFAULT])
        self._states = {stream: states[stream] for stream in self._states}

    def resume(self, states: Mapping[str, torch.Tensor], iteration: int) -> None:
        """Go on with the given states; start every other stream anew, from the seed, its place and the iteration.

        A stream that starts anew draws other numbers than those that it drew at the beginning of the run.
        """
        outer = self.device.get_rng_state()
        for stream in self._states:
            if stream not in states:
                self._states[stream] = self._seeded(stream, f"{stream}\0{iteration}")
        self.device.set_rng_state(outer)
        self.load_state_dict({**self.state_dict(), **states})

    def _seeded(self, stream: str, label: str | None = None) -> torch.Tensor:
        """Return the state of a stream that starts from the seed; the default generator is left seeded by it."""
        self.device.seed_default_generator(stream_seed(self._seed, label or stream, self._coordinates[stream]))
        return self.device.get_rng_state()

    @contextmanager
    def replay(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        """Draw once more what was drawn after ``states`` was taken, and leave every stream as it was."""
        outer = self.state_dict()
        self.load_state_dict(states)
        try:
            yield
        finally:
            self.load_state_dict(outer)
