"""Graphs on a CPU: work is run again in place of being replayed, and its results are put where the first ones were."""

from __future__ import annotations

import torch

from megatron.core.cuda_graph import Work


class RerunGraph:
    """Stand for a graph. To record it runs the work, which counts as the first replay: a GPU would compute nothing."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs = work()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        if self.num_replays == 1:
            return
        with torch.no_grad():
            for static, new in zip(self.outputs, self._work(), strict=True):
                assert static.data_ptr() != new.data_ptr(), "work has left its result in static memory"
                static.copy_(new)


class RerunBackend:
    """Record work as what can be run again; ``graphs`` are all that were recorded."""

    def __init__(self) -> None:
        self.graphs: list[RerunGraph] = []

    def capture(self, work: Work) -> RerunGraph:
        self.graphs.append(RerunGraph(work))
        return self.graphs[-1]
