"""CUDA graphs: work that is captured once and replayed as a whole, without its launch overhead on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], tuple[torch.Tensor, ...]]
"""Computes tensors from other tensors whose addresses do not change."""


class Graph(Protocol):
    """Captured work that can be replayed; each replay writes its results to the same ``outputs``."""

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that hold the results of the last replay."""
        ...

    def replay(self) -> None:
        """Run the captured work once."""
        ...


class GraphBackend(Protocol):
    """Interface that captures work as graphs, which are always replayed in the order of their capture.

    A later graph may reuse the temporary memory of an earlier graph: replaying the earlier one overwrites results of
    the later one.
    """

    def capture(self, work: Work) -> Graph:
        """Capture the work as a graph. Its results are valid only after the first replay."""
        ...

    def apart(self) -> GraphBackend:
        """Return a backend with a separate memory pool, whose graphs may be replayed at any time between this one's."""
        ...


class CudaGraph:
    """CUDA graph with the memory of its results."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class CudaGraphBackend:
    """CUDA graph capture on the current device. All graphs share one pool, and so reuse each other's temporary memory.

    The caller must keep a reference, from the capture on, to every tensor that has to survive from one replay to the
    next.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: autograd runs a backward pass on the stream of the forward pass.
        self._stream = torch.cuda.Stream() if stream is None else stream  # type: ignore[no-untyped-call]

    def apart(self) -> CudaGraphBackend:
        """Return a backend with a separate pool that captures on the same stream."""
        return CudaGraphBackend(self._stream)

    def capture(self, work: Work) -> CudaGraph:
        """Capture the work as a graph; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # Another thread, NCCL's watchdog, may query events during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = work()
        return CudaGraph(graph, outputs)
