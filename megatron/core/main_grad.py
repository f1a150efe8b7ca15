"""Gradient accumulation: where a parameter's gradient is summed over micro-batches.

Layers write weight gradients straight into it, so that no second gradient tensor of the weight's size exists. The
first contribution of a step overwrites the gradient of the step before, so that nothing has to be zeroed.
"""

from __future__ import annotations

import contextlib
import functools
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
    """Hold the accumulated gradient of one parameter, and tell its owner when a micro-batch's is complete.

    ``tensor`` has the parameter's shape and the accumulation dtype; usually it is a view into a flat buffer.
    ``num_uses`` is how many contributions one backward pass brings (two for a word embedding that is also the output
    layer); ``on_complete`` is called when all of them have arrived. ``on_begin`` is called before the first one after a
    reset: an owner that keeps no memory in between sets ``tensor`` there. ``fuses_products`` says that the device sums
    products of the parameter's dtype in that of ``tensor`` (see `adds_wide_products`).
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        num_uses: int = 1,
        on_complete: Callable[[], None] | None = None,
        on_begin: Callable[[], None] | None = None,
        fuses_products: bool = False,
    ) -> None:
        self.tensor = tensor
        self.num_uses = num_uses
        self.on_complete = on_complete
        self.on_begin = on_begin
        self.fuses_products = fuses_products
        self.queue: WeightGradQueue | None = None
        self.is_empty = True
        self._num_arrived = 0

    def reset(self) -> None:
        """Forget what was accumulated; the next contribution overwrites it."""
        self.is_empty = True
        self._num_arrived = 0

    def fill_if_empty(self) -> None:
        """Set the gradient to zero where no contribution came since the last reset."""
        self._begin()
        if self.is_empty:
            self.tensor.zero_()
            self.is_empty = False

    def begin_contribution(self) -> tuple[torch.Tensor, bool]:
        """Return the gradient, to be written by the caller, and whether what is there is to be added to.

        The caller launches that at once, and calls ``end_contribution``. Nothing is deferred.
        """
        self._begin()
        return self.tensor, not self.is_empty

    def end_contribution(self) -> None:
        """Count a contribution as arrived, and tell the owner where it is the last of a micro-batch."""
        self.is_empty = False
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
        if self.is_empty:
            self.tensor.copy_(grad)
        else:
            self.tensor.add_(grad)
        self.end_contribution()

    def add_matmul(self, left: torch.Tensor, right: torch.Tensor, library: str = "auto") -> None:
        """Add the matrix product ``left @ right``, computed on CPU by a library (see `linear`).

        Shapes: ``left: [out, n]``, ``right: [n, in]``.
        """
        # Detached: the products of the queue are run outside of a backward pass, where autograd would record them.
        left, right = left.detach(), right.detach()
        if not self._defer(self._add_matmul_now, left, right, library):
            self._add_matmul_now(left, right, library)

    def _add_matmul_now(self, left: torch.Tensor, right: torch.Tensor, library: str) -> None:
        self._begin()
        if self.fuses_products:
            add_wide_product(self.tensor, left, right, overwrite=self.is_empty)
        elif self.tensor.dtype != left.dtype or uses_onednn(left, gradient_library(library)):
            self._add_now(product(left, right, library))
            return
        elif self.is_empty:
            torch.mm(left, right, out=self.tensor)
        else:
            self.tensor.addmm_(left, right)
        self.end_contribution()

    def add_grouped_matmul(
        self, grad: torch.Tensor, x: torch.Tensor, counts: Sequence[int], library: str = "auto"
    ) -> None:
        """Add to each matrix of the gradient the product ``grad.T @ x`` of its own group of rows.

        Shapes: ``grad: [n, out]``, ``x: [n, in]``, counts that sum to n, for a gradient ``[groups, out, in]``.
        """
        grad, x = grad.detach(), x.detach()
        if not self._defer(self._add_grouped_matmul_now, grad, x, counts, library):
            self._add_grouped_matmul_now(grad, x, counts, library)

    def _add_grouped_matmul_now(self, grad: torch.Tensor, x: torch.Tensor, counts: Sequence[int], library: str) -> None:
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
        """Add what ``compute`` returns: a product of another kind, of the parameter's shape."""
        if not self._defer(self._add_computed_now, compute):
            self._add_computed_now(compute)

    def _add_computed_now(self, compute: Callable[[], torch.Tensor]) -> None:
        self._add_now(compute())

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

    def _defer(self, contribution: Callable[..., None], *operands: Any) -> bool:
        """Defer a contribution if the queue is collecting, and return whether it was deferred.

        Only matrix products are worth it. A parameter with several uses defers all its contributions, since otherwise
        nothing would tell when those of a micro-batch are complete.
        """
        if self.queue is None or not self.queue.is_collecting:
            return False
        self.queue.put(functools.partial(contribution, *operands))
        return True

    def complete(self) -> None:
        """Tell the owner that a micro-batch's gradient is complete."""
        if self.on_complete is not None:
            self.on_complete()


class WeightGradQueue:
    """Defer weight gradients, micro-batch by micro-batch, so that a backward pass can be split in two.

    While the queue collects, the main gradients that it serves leave their matrix products here. The operands stay
    alive until ``run`` computes the products.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter] = ()) -> None:
        self._pending: dict[int, list[Callable[[], None]]] = {}
        self._open: list[Callable[[], None]] | None = None
        self.attach(parameters)

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Serve the main gradients of parameters; those without one compute their gradients at once."""
        for parameter in parameters:
            main_grad = main_grad_of(parameter)
            if main_grad is not None:
                main_grad.queue = self

    @property
    def is_collecting(self) -> bool:
        return self._open is not None

    @contextlib.contextmanager
    def collecting(self, microbatch: int) -> Iterator[None]:
        """Defer the contributions inside until ``run`` is called for the micro-batch."""
        assert self._open is None
        assert microbatch not in self._pending
        self._open = self._pending[microbatch] = []
        try:
            yield
        finally:
            self._open = None

    @contextlib.contextmanager
    def diverted(self) -> Iterator[list[Callable[[], None]]]:
        """Put what is deferred inside into the list that this gives, which is empty where nothing is deferred."""
        contributions: list[Callable[[], None]] = []
        outer = self._open
        self._open = None if outer is None else contributions
        try:
            yield contributions
        finally:
            self._open = outer

    def put(self, contribution: Callable[[], None]) -> None:
        """Keep a contribution of the micro-batch that is being collected."""
        assert self._open is not None
        self._open.append(contribution)

    def run(self, microbatch: int) -> None:
        """Run the deferred contributions of a micro-batch, in the order in which they came."""
        # A backward pass works without a graph of its own; its saved operands still belong to one.
        with torch.no_grad():
            for contribution in self._pending.pop(microbatch):
                contribution()


@contextlib.contextmanager
def completions_held(main_grads: Iterable[MainGrad]) -> Iterator[list[MainGrad]]:
    """Tell no owner inside that a gradient is complete: list those main gradients, whose owners the caller tells."""
    held: list[MainGrad] = []
    owners = [(main_grad, main_grad.on_complete) for main_grad in main_grads]
    for main_grad, _ in owners:
        main_grad.on_complete = functools.partial(held.append, main_grad)
    try:
        yield held
    finally:
        for main_grad, on_complete in owners:
            main_grad.on_complete = on_complete


def attach_main_grad(parameter: torch.nn.Parameter, main_grad: MainGrad) -> None:
    """Direct a parameter's gradient contributions into ``main_grad``."""
    parameter.main_grad = main_grad  # type: ignore[attr-defined]


def main_grad_of(parameter: torch.Tensor) -> MainGrad | None:
    """Return where a parameter's gradient is accumulated, or None where autograd's own ``grad`` is used."""
    return cast("MainGrad | None", parameter.__dict__.get("main_grad"))


def set_gradient_uses(parameter: torch.nn.Parameter, num_uses: int) -> None:
    """Say how many gradient contributions one backward pass brings to a parameter."""
    parameter.num_gradient_uses = num_uses  # type: ignore[attr-defined]


def gradient_uses_of(parameter: torch.Tensor) -> int:
    """Return how many gradient contributions one backward pass brings to a parameter: one unless set."""
    return int(parameter.__dict__.get("num_gradient_uses", 1))


class Receiver(NamedTuple):
    """Say where a parameter's gradient goes: into its main gradient, or to autograd in the parameter's dtype."""

    dtype: torch.dtype
    main_grad: MainGrad | None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Receiver:
        """Return a parameter's receiver; to be asked in the forward pass, as recompute copies parameters.

        Where several layers use a parameter autograd adds their gradients, of which some may be deferred.
        """
        main_grad = main_grad_of(parameter)
        return cls(parameter.dtype, main_grad if main_grad is not None and main_grad.num_uses == 1 else None)


def leave_parts(grad: torch.Tensor, parts: torch.Tensor) -> None:
    """Leave with a gradient what parts of its rows sum to, for whom it reaches unchanged.

    Shapes: ``grad: [..., width]``, ``parts: [1, n, width]`` in float32.
    """
    grad.column_parts = parts, grad._version  # type: ignore[attr-defined]


def receive_parts(parts: torch.Tensor, receivers: Sequence[Receiver]) -> list[torch.Tensor | None]:
    """Sum the parts of up to three gradients in one launch, and return those that autograd is to have, None for others.

    Shapes: ``parts: [receivers, n, width]`` in float32 ``-> [width]``.
    """
    from megatron.core.ops.triton import sum_parts

    totals, adds = [], []
    for dtype, main_grad in receivers:
        if main_grad is None:
            total, is_added = parts.new_empty(parts.shape[-1], dtype=dtype), False
        else:
            total, is_added = main_grad.begin_contribution()
        totals.append(total)
        adds.append(is_added)
    sum_parts(parts, totals, adds)
    for receiver in receivers:
        if receiver.main_grad is not None:
            receiver.main_grad.end_contribution()
    return [total if receiver.main_grad is None else None for receiver, total in zip(receivers, totals)]


def bias_gradient(grad: torch.Tensor, receiver: Receiver) -> torch.Tensor | None:
    """Return the sum over a gradient's rows, or None where the receiver's main gradient has it already.

    Parts that were left with the gradient are summed. A gradient that another one was added to has none, or another
    version than when they were left: then its rows are read.

    Shapes: ``[..., width] -> [width]``.
    """
    parts, version = grad.__dict__.get("column_parts", (None, None))
    if parts is None or version != grad._version:
        return grad.reshape(-1, grad.shape[-1]).sum(dim=0)
    return receive_parts(parts, [receiver])[0]
