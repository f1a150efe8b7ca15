"""Graphs on a CPU: work is run again in place of being replayed, and its results are put where the first ones were.

Memory is that of a CUDA allocator as far as it can do harm: what a graph keeps may lie where graphs that were recorded
before it, in the same pool, have temporary memory. So what later ones keep is overwritten when an earlier one is
replayed. That happens to nothing that is needed where graphs are replayed in the order of their recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.cuda_graph import Work

_BYTE_OF_NAN = 0xFF


class _NewMemory(TorchDispatchMode):
    """Note the memory of all tensors that operations make, without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := _memory_of(tensor)) not in given:
                self.made[key] = StorageWeakRef(tensor.untyped_storage())
        return result


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class RerunGraph:
    """Stand for a graph. To record it runs the work, which counts as the first replay: a GPU would compute nothing.

    ``pool`` has the graphs of the same memory, in the order of their recording.
    """

    def __init__(self, work: Work, pool: list[RerunGraph]) -> None:
        self._work = work
        self._pool, self._number = pool, len(pool)
        pool.append(self)
        self._made: dict[int, StorageWeakRef] = {}
        self.outputs = self._run()
        self._of_outputs = {_memory_of(output): StorageWeakRef(output.untyped_storage()) for output in self.outputs}
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        if self.num_replays == 1:
            return
        for later in self._pool[self._number + 1 :]:
            later._lose_all()
        with torch.no_grad():
            for static, new in zip(self.outputs, self._run(), strict=True):
                assert static.data_ptr() != new.data_ptr(), "work has left its result in static memory"
                static.copy_(new)

    def _run(self) -> tuple[torch.Tensor, ...]:
        with _NewMemory() as memory:
            results = self._work()
        self._made = memory.made
        return results

    def _lose_all(self) -> None:
        """Overwrite whatever this graph's last run has made that is still there."""
        for reference in (*self._made.values(), *self._of_outputs.values()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes():
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_BYTE_OF_NAN)


class RerunBackend:
    """Record work as what can be run again; ``graphs`` are all that were recorded, here and apart from here."""

    def __init__(self, graphs: list[RerunGraph] | None = None) -> None:
        self.graphs: list[RerunGraph] = [] if graphs is None else graphs
        self._pool: list[RerunGraph] = []

    def capture(self, work: Work) -> RerunGraph:
        self.graphs.append(RerunGraph(work, self._pool))
        return self.graphs[-1]

    def apart(self) -> RerunBackend:
        return type(self)(self.graphs)
