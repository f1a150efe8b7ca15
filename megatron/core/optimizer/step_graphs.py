"""CUDA graphs of an optimizer step: the parts between its collectives are captured once, then replayed."""

from __future__ import annotations

import torch

from megatron.core.cuda_graph import Graph, GraphBackend, Work


class StepGraphs:
    """Run the parts of a step as CUDA graphs after ``num_warmup_steps`` eager steps.

    The parts are known by name, and run in the same order in each step. Collectives run between them, so that hang
    reports contain each of them.
    """

    def __init__(self, backend: GraphBackend, num_warmup_steps: int) -> None:
        self._backend = backend
        self._num_steps_to_wait = num_warmup_steps + 1
        self._graphs: dict[str, Graph] = {}

    def begin_step(self) -> None:
        """Count a step; call it before the first part."""
        self._num_steps_to_wait -= 1

    def run(self, name: str, work: Work) -> tuple[torch.Tensor, ...]:
        """Run a part, and return its results; the results of a graph are valid until the part runs again.

        ``work`` reads all that changes between steps from tensors that exist as long as the graphs.
        """
        if self._num_steps_to_wait > 0:
            return work()
        graph = self._graphs.get(name)
        if graph is None:
            graph = self._graphs[name] = self._backend.capture(work)
        graph.replay()
        return graph.outputs
