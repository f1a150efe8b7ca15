"""Random numbers of a run that are not keyed by what they are for: torch's own generator, and seeds by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from megatron.core.device import Device
from megatron.core.model_parallel_config import Place
from megatron.core.ops import DropoutSamples, hash_numbers

DEFAULT = "default"
"""The stream of torch's own generator, seeded alike on all ranks."""
STREAM_AXES: Mapping[str, tuple[str, ...]] = {DEFAULT: ()}
"""The axes of the grid of ranks along which a stream differs."""
_NUMBERS_DRAWN = 1 << 62


def stream_seed(seed: int, stream: str, coordinates: tuple[int, ...]) -> int:
    """Return the 63-bit seed of a stream at a place in the grid of ranks."""
    text = f"{seed}\0{stream}\0{','.join(map(str, coordinates))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RngStreams:
    """Seed, save and restore torch's default generator; ``place`` has the rank coordinates.

    Without a ``seed`` the generator stays as it is, for a model that is only described.
    """

    def __init__(self, device: Device, seed: int | None, place: Place) -> None:
        self.device = device
        if seed is not None:
            device.seed_default_generator(seed)
        self._seed = seed
        self._data_parallel_rank = place["dp"]

    def draw_dropout_samples(self, count: int, device: torch.device) -> DropoutSamples:
        """Return samples for a pass of a model that was given none, by a number drawn from the CPU's generator.

        Ranks that draw alike get the same ones, but for those of other data-parallel ranks.
        """
        number = int(torch.randint(_NUMBERS_DRAWN, ()).item())
        return DropoutSamples.at(hash_numbers(number, self._data_parallel_rank), 0, 0, count, device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of every stream: of torch's own generator, under ``default``."""
        return {DEFAULT: self.device.get_rng_state()}

    def resume(self, states: Mapping[str, torch.Tensor], iteration: int) -> None:
        """Go on with the given states; a stream without one starts anew, from the seed and the iteration."""
        if DEFAULT in states:
            self.device.set_rng_state(states[DEFAULT])
        else:
            assert self._seed is not None, "a run has a seed"
            self.device.seed_default_generator(stream_seed(self._seed, DEFAULT, (iteration,)))
