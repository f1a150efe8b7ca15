"""Gradient accumulation: a parameter's gradient, summed over micro-batches.

Layers write weight gradients directly into it, so that no second gradient tensor of the weight's size exists. The
first contribution of a step overwrites the gradient of the previous step, so that no zeroing is needed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from megatron.core.ops import (
    add_rows,
    add_wide_product,
    gradient_library,
    group_gradient,
    grouped_gradient,
    lengthened_group,
    product,
    uses_onednn,
)


class MainGrad:
    """Accumulated gradient of one parameter, with a callback when a micro-batch's gradient is complete.

    ``tensor`` has the parameter's shape and the accumulation dtype, and is usually a view into a flat buffer.
    ``num_uses`` is the number of contributions per backward pass (two for a word embedding that is also the output
    layer). ``on_complete`` is called when all of them have arrived. ``on_begin`` is called before the first
    contribution after a reset: an owner that frees the memory in between sets ``tensor`` there. ``fuses_products`` says
    that the device can accumulate matmuls of the parameter's dtype in the dtype of ``tensor`` (see
    `adds_wide_products`). ``is_awaited`` says whether communication starts when the gradient is complete.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        num_uses: int = 1,
        on_complete: Callable[[], None] | None = None,
        on_begin: Callable[[], None] | None = None,
        fuses_products: bool = False,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tensor = tensor
        self.num_uses = num_uses
        self.on_complete = on_complete
        self.on_begin = on_begin
        self.fuses_products = fuses_products
        self.is_awaited = is_awaited
        self.queue: WeightGradQueue | None = None
        self.may_wait = True
        """Whether contributions may be computed later in the backward pass, between operations of other layers."""
        self.is_empty = True
        self._num_arrived = 0
        self._held: list[MainGrad] | None = None

    def reset(self) -> None:
        """Discard the accumulated gradient; the next contribution overwrites it."""
        self.is_empty = True
        self._num_arrived = 0

    def fill_if_empty(self) -> None:
        """Set the gradient to zero if there was no contribution since the last reset."""
        self._begin()
        if self.is_empty:
            self.tensor.zero_()
            self.is_empty = False

    def begin_contribution(self) -> tuple[torch.Tensor, bool]:
        """Return the gradient for the caller to write, and whether the caller must add to its present values.

        The caller launches the write at once and then calls ``end_contribution``. This contribution is never deferred.
        """
        self._begin()
        return self.tensor, not self.is_empty

    def end_contribution(self) -> None:
        """Count a contribution as arrived, and notify the owner after the last one of a micro-batch."""
        self.is_empty = False
        if self._held is not None:
            self._held.append(self)
            return
        self._num_arrived += 1
        if self._num_arrived == self.num_uses:
            self._num_arrived = 0
            self.complete()

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient of the parameter's shape."""
        if self.num_uses == 1 or not self._defer(self._add_now, grad):
            self._add_now(grad)

    def _add_now(self, grad: torch.Tensor) -> None:
        self._begin()
        self._write(grad)
        self.end_contribution()

    def _write(self, grad: torch.Tensor) -> None:
        if self.is_empty:
            self.tensor.copy_(grad)
        else:
            self.tensor.add_(grad)

    def add_matmul(
        self, left: torch.Tensor, right: torch.Tensor, library: str = "auto", *, delays: bool = False
    ) -> None:
        """Add the matmul ``left @ right``, computed on CPU with the given library (see `linear`).

        With ``delays`` it may wait for `launch_delayed`, at the latest until the end of the backward pass.

        Shapes: ``left: [out, n]``, ``right: [n, in]``.
        """
        # Detached: queued matmuls run outside of the backward pass, and autograd would record them.
        left, right = left.detach(), right.detach()
        self._launch(self._add_matmul_now, left, right, library, delays=delays)

    def add_matmul_chunk(self, left: torch.Tensor, right: torch.Tensor, library: str = "auto") -> None:
        """Add one of several matmuls that are one contribution, at once; `end_contribution` follows the last.

        Shapes: ``left: [out, n]``, ``right: [n, in]``.
        """
        self._begin()
        # The weight of a single expert has a first dim of 1.
        total = self.tensor[0] if self.tensor.dim() == 3 else self.tensor
        if self.fuses_products:
            add_wide_product(total, left, right, overwrite=self.is_empty)
        elif self.tensor.dtype != left.dtype or uses_onednn(left, gradient_library(library)):
            self._write(product(left, right, library))
        elif self.is_empty:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
        self.is_empty = False

    def _add_matmul_now(self, left: torch.Tensor, right: torch.Tensor, library: str) -> None:
        self.add_matmul_chunk(left, right, library)
        self.end_contribution()

    def add_grouped_matmul(
        self, grad: torch.Tensor, x: torch.Tensor, counts: Sequence[int], library: str = "auto"
    ) -> None:
        """Add the matmul ``grad.T @ x`` of each group of rows to that group's matrix of the gradient.

        On CUDA a single group accumulates in the dtype of the gradient, if the device supports it. torch's grouped and
        batched GEMMs round the matmuls of several groups to the dtype of the operands before they are added.

        Shapes: ``grad: [n, out]``, ``x: [n, in]``, counts that sum to n, for a gradient ``[groups, out, in]``.
        """
        grad, x = grad.detach(), x.detach()
        if not self._defer(self._add_grouped_matmul_now, grad, x, counts, library):
            self._add_grouped_matmul_now(grad, x, counts, library)

    def _add_grouped_matmul_now(self, grad: torch.Tensor, x: torch.Tensor, counts: Sequence[int], library: str) -> None:
        if grad.is_cuda and len(counts) == 1 and len(x):
            self._add_matmul_now(grad.t(), x, library)
            return
        if grad.is_cuda:
            self._add_now(grouped_gradient(grad, x, counts, library))
            return
        self._begin()
        sizes = list(counts)
        for total, left, right in zip(self.tensor, grad.split_with_sizes(sizes), x.split_with_sizes(sizes)):
            if not len(left):
                if self.is_empty:
                    total.zero_()
            elif total.dtype == left.dtype and not uses_onednn(left.t(), gradient_library(library)):
                left, right = lengthened_group(left, right, library)
                torch.addmm(total, left.t(), right, beta=0 if self.is_empty else 1, out=total)
            elif self.is_empty:
                total.copy_(group_gradient(left, right, library))
            else:
                total.add_(group_gradient(left, right, library))
        self.end_contribution()

    def add_computed(self, compute: Callable[[], torch.Tensor]) -> None:
        """Add the result of ``compute``, such as another kind of matmul, of the parameter's shape."""
        if not self._defer(self._add_computed_now, compute):
            self._add_computed_now(compute)

    def _add_computed_now(self, compute: Callable[[], torch.Tensor]) -> None:
        self._add_now(compute())

    def add_by(self, add: Callable[[torch.Tensor, bool], None], *, delays: bool = False) -> None:
        """Let ``add`` change the gradient: it gets the tensor, and whether to overwrite its values.

        With ``delays`` this may wait like a matmul (see `add_matmul`).
        """
        self._launch(self._add_by_now, add, delays=delays)

    def _add_by_now(self, add: Callable[[torch.Tensor, bool], None]) -> None:
        self._begin()
        add(self.tensor, self.is_empty)
        self.end_contribution()

    def add_rows(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]``.

        Shapes: ``indices: [n]``, ``rows: [n, h]``.
        """
        if self.num_uses == 1 or not self._defer(self._add_rows_now, indices, rows):
            self._add_rows_now(indices, rows)

    def _add_rows_now(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        self._begin()
        if self.is_empty:
            self.tensor.zero_()
        add_rows(self.tensor, indices, rows)
        self.end_contribution()

    def _begin(self) -> None:
        if self.is_empty and self.on_begin is not None:
            self.on_begin()

    def _launch(self, contribution: Callable[..., None], *operands: Any, delays: bool) -> None:
        """Launch a contribution now, if it is neither deferred to the queue nor delayed within the backward pass."""
        if self._defer(contribution, *operands):
            return
        this_pass = _backward_pass() if delays and self.may_wait and self.on_begin is None else None
        if this_pass is None:
            contribution(*operands)
        else:
            this_pass.delay(functools.partial(contribution, *operands))

    def _defer(self, contribution: Callable[..., None], *operands: Any) -> bool:
        """Defer a contribution if the queue is collecting, and return whether it was deferred.

        Only matmuls are worth deferring. A parameter with several uses defers all its contributions, because otherwise
        the completion of a micro-batch could not be detected.
        """
        if self.queue is None or not self.queue.is_collecting:
            return False
        self.queue.put(functools.partial(contribution, *operands))
        return True

    def complete(self) -> None:
        """Notify the owner that a micro-batch's gradient is complete."""
        if self.on_complete is not None:
            self.on_complete()


class WeightGradQueue:
    """Queue of deferred weight gradients per micro-batch, so that a backward pass can be split in two.

    While the queue collects, its main gradients put their matmuls here. The operands stay alive until ``run`` computes
    the matmuls.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter] = ()) -> None:
        self._pending: dict[int, list[Callable[[], None]]] = {}
        self._open: list[Callable[[], None]] | None = None
        self.attach(parameters)

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Attach the queue to the main gradients of parameters; parameters without one are never deferred."""
        for parameter in parameters:
            main_grad = main_grad_of(parameter)
            if main_grad is not None:
                main_grad.queue = self

    @property
    def is_collecting(self) -> bool:
        return self._open is not None

    @contextlib.contextmanager
    def collecting(self, microbatch: int) -> Iterator[None]:
        """Defer the contributions made inside the context until ``run`` is called for the micro-batch."""
        assert self._open is None
        assert microbatch not in self._pending
        self._open = self._pending[microbatch] = []
        try:
            yield
        finally:
            self._open = None

    @contextlib.contextmanager
    def diverted(self) -> Iterator[list[Callable[[], None]]]:
        """Yield a list of the contributions deferred inside the context, empty if nothing is deferred."""
        contributions: list[Callable[[], None]] = []
        outer = self._open
        self._open = None if outer is None else contributions
        try:
            yield contributions
        finally:
            self._open = outer

    def put(self, contribution: Callable[[], None]) -> None:
        """Append a contribution of the micro-batch that is being collected."""
        assert self._open is not None
        self._open.append(contribution)

    def run(self, microbatch: int) -> None:
        """Run the deferred contributions of a micro-batch in their order of arrival."""
        # A backward pass runs without autograd recording, but its saved operands still belong to a graph.
        with torch.no_grad():
            for contribution in self._pending.pop(microbatch):
                contribution()


@contextlib.contextmanager
def contributions_held(main_grads: Iterable[MainGrad]) -> Iterator[list[MainGrad]]:
    """Yield a list of the contributions that end inside the context; the caller must end each of them again.

    A main gradient is in the list once per contribution.
    """
    held: list[MainGrad] = []
    holding = list(main_grads)
    for main_grad in holding:
        main_grad._held = held
    try:
        yield held
    finally:
        for main_grad in holding:
            main_grad._held = None


def attach_main_grad(parameter: torch.nn.Parameter, main_grad: MainGrad) -> None:
    """Accumulate a parameter's gradient in ``main_grad``."""
    parameter.main_grad = main_grad  # type: ignore[attr-defined]


def main_grad_of(parameter: torch.Tensor) -> MainGrad | None:
    """Return the main gradient of a parameter, or None if autograd's own ``grad`` is used."""
    return cast("MainGrad | None", parameter.__dict__.get("main_grad"))


def set_gradient_uses(parameter: torch.nn.Parameter, num_uses: int) -> None:
    """Set the number of gradient contributions that one backward pass makes to a parameter."""
    parameter.num_gradient_uses = num_uses  # type: ignore[attr-defined]


def gradient_uses_of(parameter: torch.Tensor) -> int:
    """Return the number of gradient contributions that one backward pass makes to a parameter, by default 1."""
    return int(parameter.__dict__.get("num_gradient_uses", 1))


class Receiver(NamedTuple):
    """Destination of a parameter's gradient: its main gradient, or autograd, in the parameter's dtype."""

    dtype: torch.dtype
    main_grad: MainGrad | None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Receiver:
        """Return a parameter's gradient destination; call it in the forward pass: recomputation copies parameters.

        If several layers share the parameter, autograd sums their gradients, because some may be deferred.
        """
        main_grad = main_grad_of(parameter)
        return cls(parameter.dtype, main_grad if main_grad is not None and main_grad.num_uses == 1 else None)


def leave_parts(grad: torch.Tensor, parts: torch.Tensor) -> None:
    """Attach partial row sums to a gradient, for a consumer that receives the gradient unmodified.

    Shapes: ``grad: [..., width]``, ``parts: [1, n, width]`` in float32.
    """
    grad.column_parts = parts, grad._version  # type: ignore[attr-defined]


class _PendingSums:
    """Partial sums of one backward pass whose totals are computed together, in few launches.

    Gradients do not wait if their memory is allocated for their first contribution, if communication waits for them, or
    if layers are captured one by one.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, MainGrad]] = []

    def put(self, parts: Sequence[torch.Tensor], main_grads: Sequence[MainGrad]) -> None:
        """Add partial sums; if there are more than one launch can sum, earlier ones are summed first."""
        from megatron.core.ops.triton import MAX_TOTALS

        if len(self._pending) + len(main_grads) > MAX_TOTALS:
            self.run()
        self._pending += zip(parts, main_grads, strict=True)

    def run(self) -> None:
        """Sum all pending partial sums, and count the contributions as arrived, in order."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        begun = [main_grad.begin_contribution() for _, main_grad in pending]
        _sum([parts for parts, _ in pending], [total for total, _ in begun], [is_added for _, is_added in begun])
        for _, main_grad in pending:
            main_grad.end_contribution()


class _BackwardPass:
    """Contributions that are computed later in the backward pass than their operands: partial sums, and one matmul."""

    def __init__(self) -> None:
        self.sums = _PendingSums()
        self._delayed: Callable[[], None] | None = None

    def delay(self, contribution: Callable[[], None]) -> None:
        """Delay a contribution; an earlier one is launched first, so that the operands of only one stay in memory."""
        self.launch_delayed()
        self._delayed = contribution

    def launch_delayed(self) -> None:
        """Launch the delayed contribution, if there is one."""
        contribution, self._delayed = self._delayed, None
        if contribution is not None:
            # Without recording: at the end of a backward pass autograd may be on.
            with torch.no_grad():
                contribution()

    def end(self) -> None:
        """Launch everything that is left."""
        self.launch_delayed()
        self.sums.run()


_passes: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()
"""By the number that autograd gives a backward pass. Autograd keeps each until its pass has ended or failed."""
_NO_PASS = -1


def _backward_pass() -> _BackwardPass | None:
    """Return the backward pass that runs on this thread, or None outside of one."""
    number = torch._C._current_graph_task_id()
    if number == _NO_PASS:
        return None
    this_pass = _passes.get(number)
    if this_pass is None:
        this_pass = _passes[number] = _BackwardPass()
        torch.autograd.Variable._execution_engine.queue_callback(this_pass.end)
    return this_pass


def launch_delayed() -> None:
    """Launch the matmul of the running backward pass that was delayed, if any; call it after starting communication.

    The matmul of a row-parallel layer's weight gradient is not needed by the rest of the backward pass. So it can
    overlap with the next all-gather for which the backward pass has to wait.
    """
    this_pass = _passes.get(torch._C._current_graph_task_id())
    if this_pass is not None:
        this_pass.launch_delayed()


def _sum(parts: Sequence[torch.Tensor], totals: Sequence[torch.Tensor], adds: Sequence[bool]) -> None:
    from megatron.core.ops.triton import sum_parts

    with torch.no_grad():
        sum_parts(parts, totals, adds)


def receive_parts(parts: torch.Tensor, receivers: Sequence[Receiver]) -> list[torch.Tensor | None]:
    """Sum the partial sums of up to three gradients; return the totals for autograd, None for the others.

    Totals for main gradients are computed together with the totals of other layers, at the latest at the end of the
    backward pass.

    Shapes: ``parts: [receivers, n, width]`` in float32 ``-> [width]``.
    """
    main_grads = [main_grad for _, main_grad in receivers if main_grad is not None]
    joins = len(main_grads) == len(receivers) and all(
        each.may_wait and each.on_begin is None and not each.is_awaited() for each in main_grads
    )
    this_pass = _backward_pass() if joins else None
    if this_pass is not None:
        this_pass.sums.put(parts.unbind(), main_grads)
        return [None] * len(receivers)
    totals, adds = [], []
    for dtype, main_grad in receivers:
        if main_grad is None:
            total, is_added = parts.new_empty(parts.shape[-1], dtype=dtype), False
        else:
            total, is_added = main_grad.begin_contribution()
        totals.append(total)
        adds.append(is_added)
    _sum(parts.unbind(), totals, adds)
    for main_grad in main_grads:
        main_grad.end_contribution()
    return [total if receiver.main_grad is None else None for receiver, total in zip(receivers, totals)]


def bias_gradient(grad: torch.Tensor, receiver: Receiver) -> torch.Tensor | None:
    """Return the sum over a gradient's rows, or None if it was written to the receiver's main gradient.

    Partial sums attached to the gradient are used if they are valid. If another gradient was added to it, the partial
    sums are missing or outdated (by version), and the rows are summed.

    Shapes: ``[..., width] -> [width]``.
    """
    parts, version = grad.__dict__.get("column_parts", (None, None))
    if parts is None or version != grad._version:
        return grad.reshape(-1, grad.shape[-1]).sum(dim=0)
    return receive_parts(parts, [receiver])[0]
