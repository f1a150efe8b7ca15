"""CUDA graphs: work that is recorded once and launched again as a whole, without the host's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], tuple[torch.Tensor, ...]]
"""Compute some tensors from others that stay where they are."""


class Graph(Protocol):
    """Hold work that can be launched again; each replay leaves its results in the same ``outputs``."""

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that hold the results of the last replay."""
        ...

    def replay(self) -> None:
        """Do the work once."""
        ...


class GraphBackend(Protocol):
    """Record work as graphs, which are replayed one after the other, and always in the order of their recording.

    Temporary memory of a graph may be what a later one keeps: to replay the first while that is needed destroys it.
    """

    def capture(self, work: Work) -> Graph:
        """Return the work as a graph. Its results are there after the first replay, and not before."""
        ...

    def apart(self) -> GraphBackend:
        """Return a backend with memory of its own, whose graphs may be replayed at any time between this one's."""
        ...


class CudaGraph:
    """Hold a CUDA graph with the memory of its results."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class CudaGraphBackend:
    """Record work on the current CUDA device. Its graphs share one pool, where one's temporary memory is another's.

    What has to live from one replay to the next must be referred to, from its capture on, by whoever captures.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: autograd runs a backward pass on the stream of the forward pass.
        self._stream = torch.cuda.Stream() if stream is None else stream  # type: ignore[no-untyped-call]

    def apart(self) -> CudaGraphBackend:
        """Return a backend with a pool of its own, which records on the same stream."""
        return CudaGraphBackend(self._stream)

    def capture(self, work: Work) -> CudaGraph:
        """Return the work as a graph; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # Another thread, NCCL's watchdog, may ask for the state of events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = work()
        return CudaGraph(graph, outputs)
