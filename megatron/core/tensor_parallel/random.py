"""RNG streams: torch's default generator, for random numbers without keys, and seeds by stream name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from megatron.core.device import Device
from megatron.core.ops import DropoutSamples, hash_numbers
from megatron.core.parallel_config import Place

DEFAULT = "default"
"""The stream of torch's default generator, seeded equally on all ranks."""
STREAM_AXES: Mapping[str, tuple[str, ...]] = {DEFAULT: ()}
"""The parallel axes along which a stream differs."""
_NUMBERS_DRAWN = 1 << 62


def stream_seed(seed: int, stream: str, coordinates: tuple[int, ...]) -> int:
    """Return the 63-bit seed of a stream at these rank coordinates."""
    text = f"{seed}\0{stream}\0{','.join(map(str, coordinates))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RngStreams:
    """Seed, save and restore torch's default generator; ``place`` has the rank coordinates.

    Without a ``seed`` the generator is unchanged, for a model that is only described.
    """

    def __init__(self, device: Device, seed: int | None, place: Place) -> None:
        self.device = device
        if seed is not None:
            device.seed_default_generator(seed)
        self._seed = seed
        self._data_parallel_rank = place["dp"]

    def draw_dropout_samples(self, count: int, device: torch.device) -> DropoutSamples:
        """Return dropout samples from a number drawn with the CPU generator, for a pass without explicit samples.

        Ranks with the same generator state get the same samples, except that data-parallel ranks differ.
        """
        number = int(torch.randint(_NUMBERS_DRAWN, ()).item())
        return DropoutSamples.at(hash_numbers(number, self._data_parallel_rank), 0, 0, count, device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of every stream: torch's default generator, as ``default``."""
        return {DEFAULT: self.device.get_rng_state()}

    def resume(self, states: Mapping[str, torch.Tensor], iteration: int) -> None:
        """Restore the given states; a stream without a state is reseeded from the seed and the iteration."""
        if DEFAULT in states:
            self.device.set_rng_state(states[DEFAULT])
        else:
            assert self._seed is not None, "a run has a seed"
            self.device.seed_default_generator(stream_seed(self._seed, DEFAULT, (iteration,)))
