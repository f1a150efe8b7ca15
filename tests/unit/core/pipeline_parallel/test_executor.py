"""The executor on one rank: divisors, gradient synchronization, chunks that hold nothing, and evaluation."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.main_grad import MainGrad, WeightGradQueue, attach_main_grad
from megatron.core.pipeline_parallel.executor import MicrobatchLoss, ModelChunk, run_schedule
from megatron.core.pipeline_parallel.schedule_actions import (
    Action,
    Pass,
    forward_only,
    interleaved,
    with_delayed_weight_grads,
    with_late_output_grads,
    without_pipelining,
    zero_bubble,
)
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.mappings import InputRegion
from megatron.core.tensor_parallel.sharded_layers import tensor_parallel_linear

CPU = torch.device("cpu")
NUM_TOKENS = (3.0, 0.0, 5.0)


def loss_of(weight: torch.Tensor, microbatch: int) -> MicrobatchLoss:
    """Return a loss sum whose gradient is the micro-batch's number of tokens times (1, 10, 100)."""
    count = NUM_TOKENS[microbatch]
    return MicrobatchLoss(weight.double().sum() * count * 10.0**microbatch, torch.tensor(count))


@pytest.mark.parametrize(
    ("per_token", "expected"),
    [(False, 2.0 * (1 + 100) / 3), (True, 2.0 * (3 + 500))],
)
def test_divisors_and_loss_scale(per_token: bool, expected: float) -> None:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    result = run_schedule(
        without_pipelining(1, 0, 3),
        [ModelChunk(lambda microbatch, hidden: loss_of(weight, microbatch))],
        device=CPU,
        calculate_per_token_loss=per_token,
        loss_scale=2.0,
    )
    assert result.loss_sum.item() == 2 * (3 + 500)
    assert result.num_tokens.item() == 8
    assert weight.grad.tolist() == pytest.approx([expected] * 2)
    assert result.timeline is None


class CountedOperations(TorchDispatchMode):
    """Count the operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def count_operations(num_microbatches: int, num_tokens: torch.Tensor) -> tuple[Counter[str], list[float]]:
    weight = torch.ones(2, requires_grad=True)

    def forward_step(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        return MicrobatchLoss(weight.sum(), num_tokens)

    with CountedOperations() as counted:
        actions = without_pipelining(1, 0, num_microbatches)
        run_schedule(actions, [ModelChunk(forward_step)], device=CPU, loss_scale=4.0)
    return counted.counts, weight.grad.tolist()


def test_few_operations_divide_and_scale_the_loss_of_a_microbatch() -> None:
    """Two sums, and the gradient of the loss: without autograd's operations for its division and its scale."""
    (more, grad), (fewer, _) = (count_operations(number, torch.tensor(8)) for number in (5, 4))
    of_the_model = {"sum": 1, "expand": 1, "add_": 1, "detach": 1}
    found = more - fewer - Counter(of_the_model)
    assert {name: found[name] for name in found if name != "detach"} == {"add_": 2, "clamp": 1, "mul": 1, "div": 1}
    assert grad == [4.0 / 8] * 2
    assert count_operations(2, torch.tensor(0))[1] == [4.0] * 2


@pytest.mark.parametrize("per_token", [False, True])
def test_a_parameter_added_to_the_loss_has_the_gradient_of_all_microbatches(per_token: bool) -> None:
    added, weight = torch.zeros(1, requires_grad=True), torch.ones(2, requires_grad=True)

    def forward_step(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        return MicrobatchLoss((weight.sum() + added).reshape(()), torch.tensor(1))

    run_schedule(
        without_pipelining(1, 0, 4), [ModelChunk(forward_step)], device=CPU, calculate_per_token_loss=per_token
    )
    expected = 4.0 if per_token else 1.0
    assert added.grad.tolist() == [expected]
    assert weight.grad.tolist() == [expected] * 2


def test_evaluation_keeps_nothing() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = []

    def forward_step(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        outputs.append(loss_of(weight, microbatch))
        return outputs[-1]

    result = run_schedule(forward_only(1, 0, 3), [ModelChunk(forward_step)], device=CPU)
    assert result.loss_sum.item() == 2 * (3 + 500)
    assert not any(output.loss_sum.requires_grad for output in outputs)
    assert weight.grad is None


@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_synchronized_in_each_chunks_last_passes(split: bool) -> None:
    log: list[str] = []
    weight = torch.ones(2, requires_grad=True)

    @contextlib.contextmanager
    def no_sync(*, ends_microbatch: bool = True) -> Iterator[None]:
        opening, closing = "[]" if ends_microbatch else "()"
        log.append(opening)
        yield
        log.append(closing)

    def forward_step(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        loss = loss_of(weight, microbatch)
        loss.loss_sum.register_hook(lambda grad: log.append(f"B{microbatch}"))
        return loss

    class LoggedQueue(WeightGradQueue):
        def run(self, microbatch: int) -> None:
            log.append(f"W{microbatch}")
            super().run(microbatch)

    chunk = ModelChunk(forward_step, no_sync, LoggedQueue())
    # As on the third rank of a pipeline, where weight gradients are deferred by two micro-batches.
    actions = zero_bubble(3, 2, 3) if split else without_pipelining(1, 0, 3)
    run_schedule(actions, [chunk], device=CPU)
    expected = "( B0 ) ( B1 ) B2 [ W0 ] [ W1 ] W2" if split else "[ B0 ] [ B1 ] B2"
    assert " ".join(log) == expected


def test_chunks_on_one_rank_hand_over_and_may_hold_nothing() -> None:
    first = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    last = torch.full((2,), 5.0, dtype=torch.float64, requires_grad=True)

    def close(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        return MicrobatchLoss((hidden * last).sum(), torch.tensor(2.0))

    chunks = [
        ModelChunk(lambda microbatch, hidden: first * (microbatch + 1)),
        ModelChunk(lambda microbatch, hidden: hidden),
        ModelChunk(close),
    ]
    result = run_schedule(interleaved(1, 0, 3, 3), chunks, device=CPU, calculate_per_token_loss=True)
    assert result.loss_sum.item() == 2 * 3 * 5 * (1 + 2 + 3)
    assert first.grad.tolist() == [5.0 * 6] * 2
    assert last.grad.tolist() == [3.0 * 6] * 2


@pytest.mark.parametrize("per_token", [False, True])
def test_auxiliary_losses_have_their_gradient_where_they_arise(per_token: bool) -> None:
    first = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    last = torch.full((2,), 5.0, dtype=torch.float64, requires_grad=True)

    def open_model(microbatch: int, hidden: torch.Tensor | None) -> LayerOutput:
        square, num_tokens = first.square().sum(), torch.tensor(4)
        measured = AuxiliaryLoss("measured", first.detach().sum(), num_tokens, 0.0)
        return LayerOutput(first * 1.0, (AuxiliaryLoss("square", square, num_tokens, 0.5), measured))

    def close(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        later = AuxiliaryLoss("square", last.square().sum(), torch.tensor(6), 0.25)
        return MicrobatchLoss((hidden * last).sum(), torch.tensor(2), (later,))

    result = run_schedule(
        interleaved(1, 0, 3, 2),
        [ModelChunk(open_model), ModelChunk(close)],
        device=CPU,
        calculate_per_token_loss=per_token,
        loss_scale=8.0,
    )
    # Divided by the loss's own number of tokens and the 3 micro-batches, which all are the same.
    main, square, later = (3 * 8.0, 3 * 8.0, 3 * 8.0) if per_token else (8.0 / 2, 8.0 / 4, 8.0 / 6)
    assert first.grad.tolist() == pytest.approx([5.0 * main + 0.5 * 2 * 3.0 * square] * 2)
    assert last.grad.tolist() == pytest.approx([3.0 * main + 0.25 * 2 * 5.0 * later] * 2)
    sums = {name: values.tolist() for name, values in result.auxiliary.items()}
    assert sums == {"square": [3 * (18.0 + 50.0), 3 * (4 + 6)], "measured": [3 * 6.0, 3 * 4]}
    assert result.loss_sum.item() == 3 * 30.0


def test_the_last_chunk_alone_returns_the_loss() -> None:
    chunks = [ModelChunk(lambda microbatch, hidden: torch.ones(1, requires_grad=True))]
    with pytest.raises(AssertionError, match="the last chunk, and no other, returns the loss"):
        run_schedule([Action(Pass.FORWARD, 0)], chunks, device=CPU)


@pytest.mark.parametrize(("max_microbatches", "late"), [(0, [0, 1, 2]), (2, [1, 2]), (7, [0, 1, 2])])
def test_late_gradients_follow_all_passes_and_the_last_completes_them(max_microbatches: int, late: list[int]) -> None:
    log: list[str] = []
    weight = torch.nn.Parameter(torch.ones(1, 2, dtype=torch.float64))
    main_grad = MainGrad(torch.zeros(1, 2, dtype=torch.float64), on_complete=lambda: log.append("complete"))
    attach_main_grad(weight, main_grad)

    @contextlib.contextmanager
    def no_sync(*, ends_microbatch: bool = True) -> Iterator[None]:
        log.append("[")
        yield
        log.append("]")

    def forward_step(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        log.append(f"F{microbatch}")
        x = torch.full((1, 1, 2), 10.0**microbatch, dtype=torch.float64, requires_grad=True)
        x.register_hook(lambda grad: log.append(f"B{microbatch}"))
        product = tensor_parallel_linear(x, weight, None, InputRegion.SPLIT, single_rank_group())
        return MicrobatchLoss(product.sum(), torch.tensor(1.0))

    chunk = ModelChunk(forward_step, no_sync, late_grads=WeightGradQueue([weight]))
    actions = with_late_output_grads(without_pipelining(1, 0, 3), 0, max_microbatches)
    run_schedule(actions, [chunk], device=CPU)
    # A third of each of 1, 10 and 100: how often it is rounded on the way is the processor's.
    assert main_grad.tensor.tolist() == [pytest.approx([37.0, 37.0], rel=1e-15)]
    early = "F0 [ complete B0 ]" if 0 not in late else "F0 [ B0 ]"
    drained = "[ complete ] " * (len(late) - 1) + "complete"
    assert " ".join(log) == f"{early} F1 [ B1 ] F2 B2 {drained}"


def test_delayed_weight_gradients_follow_the_input_gradient_at_once() -> None:
    plain = interleaved(2, 0, 4, 2)
    split = with_delayed_weight_grads(plain)
    assert [action for action in split if action.kind is Pass.FORWARD] == [a for a in plain if a.kind is Pass.FORWARD]
    places = [index for index, action in enumerate(split) if action.kind is Pass.BACKWARD_INPUT]
    assert len(places) == sum(action.kind is Pass.BACKWARD for action in plain) == 8
    assert [split[index + 1] for index in places] == [split[i]._replace(kind=Pass.BACKWARD_WEIGHT) for i in places]
    assert with_delayed_weight_grads(zero_bubble(2, 0, 4)) == zero_bubble(2, 0, 4)


@pytest.mark.parametrize("has_queue", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_weights_have_their_gradients_with_and_without_a_queue(has_queue: bool, split: bool) -> None:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    queue = WeightGradQueue() if has_queue else None
    was_collecting: list[bool] = []

    def forward_step(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
        loss = loss_of(weight, microbatch)
        loss.loss_sum.register_hook(lambda grad: was_collecting.append(queue is not None and queue.is_collecting))
        return loss

    actions = zero_bubble(3, 2, 3) if split else without_pipelining(1, 0, 3)
    run_schedule(actions, [ModelChunk(forward_step, weight_grad_queue=queue)], device=CPU)
    assert was_collecting == [split and has_queue] * 3
    assert weight.grad is not None
