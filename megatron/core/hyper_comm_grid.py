"""A grid of ranks with axes of one's own, and the process groups along them, as megatron-core's HyperCommGrid."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.core.parallel_config import all_slices


class HyperCommGrid:
    """Ranks from ``rank_offset`` on in a grid, whose dims are listed from the fastest to the slowest varying.

    Raises:
        ValueError: there is not one name per dim, two names are equal, or the offset is negative.
        RuntimeError: the grid has more ranks than the world.
    """

    def __init__(
        self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        if len(shape) != len(dim_names):
            raise ValueError(f"shape {list(shape)} has {len(shape)} dims, but there are {len(dim_names)} dim_names")
        if len(set(dim_names)) < len(dim_names):
            raise ValueError(f"dim_names {list(dim_names)} has equal names; each dim needs its own")
        if rank_offset < 0:
            raise ValueError(f"rank_offset must be non-negative, got {rank_offset}")
        if "WORLD_SIZE" in os.environ:
            world_size = int(os.environ["WORLD_SIZE"])
        elif dist.is_initialized():
            world_size = dist.get_world_size()
        else:
            raise RuntimeError("the world size is unknown; set WORLD_SIZE or initialize torch.distributed first")
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        self.size = math.prod(shape)
        if self.size > world_size - rank_offset:
            raise RuntimeError(
                f"Grid shape {self.shape} is over sized with world size {world_size} and rank offset {rank_offset}"
            )
        self._pgs: dict[str, dist.ProcessGroup | None] = {}

    def create_pg(self, dims: str | Sequence[str], **kwargs: Any) -> dist.ProcessGroup | None:
        """Create the process groups that span ``dims``, and return this rank's; collective over the world.

        ``kwargs`` are those of ``torch.distributed.new_group``.

        Raises:
            KeyError: the groups exist already.
        """
        key = self._key(dims)
        if key in self._pgs:
            raise KeyError(f"Process group {dims} has already been created; call get_pg")
        groups = self.get_rank_enum(dims)
        own: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            groups, backend=self.backend, **kwargs
        )[0]
        self._pgs[key] = own
        return own

    def get_pg(self, dims: str | Sequence[str]) -> dist.ProcessGroup | None:
        """Return this rank's process group that spans ``dims``.

        Raises:
            KeyError: the group has not been created.
        """
        key = self._key(dims)
        if key not in self._pgs:
            raise KeyError(f"Process group for {key} hasn't been created. Call create_pg first.")
        return self._pgs[key]

    def get_rank_enum(self, dims: str | Sequence[str]) -> list[list[int]]:
        """Return the ranks of every group that spans ``dims``."""
        grid = dict(zip(reversed(self.dim_names), reversed(self.shape)))
        axes = tuple(self._ordered(dims))
        return [[self.rank_offset + rank for rank in ranks] for ranks in all_slices(grid, axes)]

    def _ordered(self, dims: str | Sequence[str]) -> list[str]:
        names = [dims] if isinstance(dims, str) else list(dims)
        if unknown := [name for name in names if name not in self.dim_names]:
            raise ValueError(f"the grid has no dims {unknown}; its dims are {self.dim_names}")
        return [name for name in reversed(self.dim_names) if name in names]

    def _key(self, dims: str | Sequence[str]) -> str:
        return "-".join(self._ordered(dims))
