"""CUDA graphs of the layers of a model chunk: captured once per micro-batch in flight, then replayed.

A layer's forward pass is one graph and its backward pass another. The embedding, and the final norm with the output
layer and the loss, can be captured in the same way. The graphs need static memory: a *slot* holds the inputs, the
activations and the gradients of one micro-batch from its forward pass to the end of its backward pass. The number of
slots is the number of micro-batches that the pipeline schedule has in flight. Work that a graph cannot capture runs
between replays: waiting for gathered parameters, and counting the contributions to main gradients, whose owner is
notified when a gradient is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

from megatron.core.cuda_graph import Graph, GraphBackend
from megatron.core.errors import ConfigurationError
from megatron.core.layer_output import LayerOutput
from megatron.core.main_grad import MainGrad, WeightGradQueue, contributions_held, main_grad_of
from megatron.core.ops import DropoutKeys


@dataclass(frozen=True, eq=False)
class GraphUnit:
    """Modules that are captured as one pair of graphs, and the function that runs them.

    ``run`` takes the result of the unit before and dropout keys. The first unit of a chunk takes None if it does not
    differentiate its input. ``borrowed`` are parameters of other modules that ``run`` uses too; these modules run
    earlier in a forward pass.
    """

    modules: Sequence[nn.Module]
    run: Callable[[Any, DropoutKeys | None], LayerOutput]
    borrowed: Sequence[nn.Parameter] = ()


MakeUnits = Callable[[Mapping[str, torch.Tensor]], Sequence[GraphUnit]]
"""Returns the units of a chunk, which read a micro-batch from the given static tensors."""


class GraphedLayers:
    """Run the units of a model chunk as CUDA graphs after ``num_warmup_steps`` eager steps.

    The eager steps let libraries initialize at their first call, which a graph must not capture. All micro-batches have
    the same shape. ``num_slots`` is the largest number of micro-batches in flight so far. ``with_ends`` tells the model
    to capture its embedding and its loss as further units.
    """

    def __init__(self, backend: GraphBackend, num_warmup_steps: int, *, with_ends: bool = False) -> None:
        self.with_ends = with_ends
        self._backend = backend
        self._num_steps_to_wait = num_warmup_steps + 1
        self._free: list[_Slot] = []
        self.num_slots = 0
        # A capture keeps the saved tensors of the backward pass. A compiled backward pass would free them and raise an
        # error.
        functorch_config.donated_buffer = False

    def begin_step(self) -> None:
        """Count a training step; call it before the step's first micro-batch."""
        self._num_steps_to_wait -= 1

    @property
    def is_warm(self) -> bool:
        return self._num_steps_to_wait <= 0

    def warm_up(self, modules: Iterable[nn.Module]) -> None:
        """Zero empty main gradients in the last eager step, so that its kernels match those captured.

        Call it before a forward pass of ``modules``. Graphs add gradients too. With one micro-batch, earlier steps
        overwrite instead of add and compile other Triton variants. CUDA compiles no kernel during a capture. For the
        same reason no sums of several layers are computed together, and no matmul waits for another layer.
        """
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            if (main_grad := main_grad_of(parameter)) is not None:
                main_grad.may_wait = False
                if self._num_steps_to_wait == 1:
                    main_grad.fill_if_empty()

    def run(
        self,
        make_units: MakeUnits,
        x: torch.Tensor | None,
        dropout: DropoutKeys | None,
        batch: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Return the output of the units; ``make_units`` is called with static copies of ``batch`` for a new slot.

        The output is valid until the micro-batch's backward pass ends.

        Shapes: ``x: [s, b, h]``, None if the first unit reads ``batch`` only.
        """
        assert x is None or x.requires_grad, "captured layers stand behind what is trained"
        if not self._free:
            # Graphs get separate memory pools, because slots are not used in the order of their capture.
            self._free.append(_Slot(self._backend.apart(), make_units, x, dropout, batch))
            self.num_slots += 1
        slot = self._free.pop()
        slot.load(x, dropout, batch)
        start = torch.empty(0, requires_grad=True) if x is None else x
        output: torch.Tensor = _Replay.apply(start, slot, self._free.append)  # type: ignore[no-untyped-call]
        return output


class _Replay(torch.autograd.Function):
    """Replay all graphs of a slot. The slot is free when the micro-batch's gradients are complete."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, slot: _Slot, release: Callable[[_Slot], None]) -> torch.Tensor:
        ctx.slot, ctx.release = slot, release
        return slot.forward()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        slot: _Slot = ctx.slot
        x_grad = slot.backward(grad)
        slot.when_finished(lambda: ctx.release(slot))
        return x_grad, None, None


class _Slot:
    """Graphs and static memory of one micro-batch in flight."""

    def __init__(
        self,
        backend: GraphBackend,
        make_units: MakeUnits,
        x: torch.Tensor | None,
        dropout: DropoutKeys | None,
        batch: Mapping[str, torch.Tensor],
    ) -> None:
        self._x = None if x is None else torch.empty_like(x)
        self._batch = {
            name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in batch.items()
        }
        self._dropout = None if dropout is None else dropout.static_copy()
        self._units = [_CapturedUnit(backend, unit) for unit in make_units(self._batch)]
        self._grad: torch.Tensor | None = None

    def load(self, x: torch.Tensor | None, dropout: DropoutKeys | None, batch: Mapping[str, torch.Tensor]) -> None:
        """Copy the inputs of a micro-batch into static memory."""
        assert batch.keys() == self._batch.keys(), "micro-batches of one kind are captured"
        copied = [(self._batch[name], tensor) for name, tensor in batch.items()]
        if self._x is not None and x is not None:
            copied.append((self._x, x))
        for static, new in copied:
            assert (new.shape, new.dtype) == (static.shape, static.dtype), "micro-batches of one shape are captured"
            static.copy_(new)
        if self._dropout is not None and dropout is not None:
            self._dropout.overwrite(dropout)

    def forward(self) -> torch.Tensor:
        hidden = self._x
        for unit in self._units:
            hidden = unit.forward(hidden, self._dropout)
        assert hidden is not None
        return hidden.detach()

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self._grad is None:
            self._grad = torch.empty_like(grad, memory_format=torch.contiguous_format)
        self._grad.copy_(grad)
        static: torch.Tensor | None = self._grad
        for unit in reversed(self._units):
            assert static is not None
            static = unit.backward(static)
        # Copied out of static memory: another stage may still read it when the next micro-batch arrives.
        return None if static is None else static.clone()

    def when_finished(self, action: Callable[[], None]) -> None:
        """Call ``action`` after the micro-batch's backward pass and its deferred weight gradients."""
        queues = (unit.queue for unit in self._units)
        queue = next((queue for queue in queues if queue is not None and queue.is_collecting), None)
        if queue is None:
            action()
        else:
            queue.put(action)


class _CapturedUnit:
    """Graphs of a unit: forward, backward, and the weight gradients that the backward pass defers."""

    def __init__(self, backend: GraphBackend, unit: GraphUnit) -> None:
        self._backend = backend
        self._unit = unit
        own = [parameter for module in unit.modules for parameter in module.parameters()]
        self._parameters = [parameter for parameter in (*own, *unit.borrowed) if parameter.requires_grad]
        self._main_grads = [_require_main_grad(parameter) for parameter in self._parameters]
        self._gather_hooks = [
            (hook, submodule)
            for module in unit.modules
            for submodule in module.modules()
            for hook in submodule._forward_pre_hooks.values()
        ]
        self._forward: Graph | None = None
        self._backward: Graph | None = None
        self._weights: Graph | None = None
        # Keep the autograd graph: its saved tensors are the memory that the backward graph reads.
        self._x: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._deferred: list[Callable[[], None]] = []
        self._contributions: list[MainGrad] = []
        self._deferred_contributions: list[MainGrad] = []

    @property
    def queue(self) -> WeightGradQueue | None:
        """Return the queue of deferred weight gradients."""
        return next((main_grad.queue for main_grad in self._main_grads if main_grad.queue is not None), None)

    def forward(self, x: torch.Tensor | None, dropout: DropoutKeys | None) -> torch.Tensor:
        for hook, module in self._gather_hooks:
            hook(module, ())
        if self._forward is None:
            self._x = None if x is None else x.detach().requires_grad_()
            self._forward = self._backend.capture(lambda: self._compute(dropout))
        self._forward.replay()
        return self._forward.outputs[0]

    def _compute(self, dropout: DropoutKeys | None) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            self._output, losses = self._unit.run(self._x, dropout)
        if losses:
            raise ConfigurationError(
                f"--cuda-graph-impl local cannot capture layers with auxiliary losses ({losses[0].name}); omit it"
            )
        return (self._output.detach(),)

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        for main_grad in self._main_grads:
            # Graphs accumulate, so the first gradient of a step needs a buffer of zeros.
            main_grad.fill_if_empty()
        if self._backward is None:
            self._backward = self._backend.capture(lambda: self._differentiate(grad))
        self._backward.replay()
        for main_grad in self._contributions:
            main_grad.end_contribution()
        if self._deferred:
            assert self.queue is not None
            self.queue.put(self._add_deferred)
        return self._backward.outputs[0] if self._backward.outputs else None

    def _differentiate(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self._output is not None
        queue = self.queue or WeightGradQueue()
        inputs = () if self._x is None else (self._x,)
        with contributions_held(self._main_grads) as self._contributions, queue.diverted() as self._deferred:
            grads = torch.autograd.grad(
                self._output, (*inputs, *self._parameters), grad, retain_graph=True, allow_unused=True
            )
            for main_grad, of_parameter in zip(self._main_grads, grads[len(inputs) :], strict=True):
                # None for weights of linear layers, which add their gradients themselves.
                if of_parameter is not None:
                    main_grad.add(of_parameter)
        return grads[: len(inputs)]

    def _add_deferred(self) -> None:
        if self._weights is None:
            self._weights = self._backend.capture(self._contribute)
        self._weights.replay()
        for main_grad in self._deferred_contributions:
            main_grad.end_contribution()

    def _contribute(self) -> tuple[torch.Tensor, ...]:
        with contributions_held(self._main_grads) as self._deferred_contributions:
            for contribution in self._deferred:
                contribution()
        return ()


def _require_main_grad(parameter: nn.Parameter) -> MainGrad:
    main_grad = main_grad_of(parameter)
    assert main_grad is not None, "graphs add to main gradients: wrap the model in DistributedDataParallel first"
    return main_grad


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """Return megatron-core's order of passes of a stage: chunk + 1 for a forward pass, -(chunk + 1) for a backward one.

    ``schedule_table`` is the result of `megatron.core.pipeline_parallel.schedules.get_schedule_table`. After the warmup
    one backward pass follows each forward pass.
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = iter([chunk - num_model_chunks for _, chunk in schedule_table])
    order = forwards[:num_warmup_microbatches]
    for forward in forwards[num_warmup_microbatches:]:
        order += [forward, next(backwards)]
    return [*order, *backwards]
