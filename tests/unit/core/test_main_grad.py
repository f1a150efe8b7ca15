"""Gradients that layers write into their accumulators equal autograd's, deferred ones too."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron.core.main_grad import (
    MainGrad,
    Receiver,
    WeightGradQueue,
    _passes,
    attach_main_grad,
    bias_gradient,
    gradient_uses_of,
    launch_delayed,
    leave_parts,
    main_grad_of,
    receive_parts,
    set_gradient_uses,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.gemm import has_library, product
from megatron.core.process_group import single_rank_group
from tests.harness.closeness import assert_gradients_close
from tests.harness.toy_model import load_global_weights, make_batch, make_model


def toy(**config: Any) -> GPTModel:
    model = make_model(single_rank_group(), **config)
    load_global_weights(model)
    return model


def run_micro_batches(model: GPTModel, count: int = 3) -> None:
    for seed in range(count):
        tokens, labels, positions, _ = make_batch(11, 3, 53, seed)
        model(tokens, positions, labels=labels).mean().backward()


def attach_everywhere(model: GPTModel, dtype: torch.dtype) -> dict[str, int]:
    """Give every parameter a dirty accumulator and return how often each reported that it was complete."""
    completed: dict[str, int] = {}
    for name, parameter in model.named_parameters():

        def on_complete(name: str = name) -> None:
            completed[name] = completed.get(name, 0) + 1

        buffer = torch.full(parameter.shape, float("nan"), dtype=dtype)
        attach_main_grad(parameter, MainGrad(buffer, gradient_uses_of(parameter), on_complete))
    return completed


def accumulated(model: GPTModel) -> dict[str, np.ndarray]:
    """Return every gradient, from the accumulator where a layer wrote there and from autograd elsewhere."""
    result = {}
    for name, parameter in model.named_parameters():
        main_grad = main_grad_of(parameter)
        if main_grad is not None and not main_grad.is_empty:
            assert parameter.grad is None, f"{name} has two gradients"
            result[name] = main_grad.tensor.numpy()
        else:
            assert parameter.grad is not None, name
            result[name] = parameter.grad.numpy()
    return result


CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"untie_embeddings_and_output_weights": True, "swiglu": True, "num_query_groups": 2},
    "recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_main_gradients_equal_autograd(case: str) -> None:
    plain, direct = toy(params_dtype="float64", **CASES[case]), toy(params_dtype="float64", **CASES[case])
    completed = attach_everywhere(direct, torch.float64)
    run_micro_batches(plain)
    run_micro_batches(direct)
    expected = {name: parameter.grad.numpy() for name, parameter in plain.named_parameters()}  # type: ignore[union-attr]
    assert_gradients_close(accumulated(direct), expected, 1e-12)
    written = {
        name for name, parameter in direct.named_parameters() if parameter.dim() == 2 and "layernorm" not in name
    }
    assert completed == dict.fromkeys(written, 3), "each weight reports once a backward pass"


def test_low_precision_weights_accumulate_in_float32() -> None:
    plain, direct = toy(params_dtype="bfloat16"), toy(params_dtype="bfloat16")
    attach_everywhere(direct, torch.float32)
    total: dict[str, torch.Tensor] = {}
    for seed in range(4):
        tokens, labels, positions, _ = make_batch(11, 3, 53, seed)
        for model in (plain, direct):
            model(tokens, positions, labels=labels).mean().backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad.float()
            parameter.grad = None
    for name in ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.self_attention.linear_proj.weight"):
        main_grad = main_grad_of(direct.get_parameter(name))
        assert main_grad is not None
        assert main_grad.tensor.dtype == torch.float32
        assert torch.equal(main_grad.tensor, total[name]), name


def test_tied_weight_gets_two_contributions_and_reports_once() -> None:
    model = toy()
    weight = model.output_weight
    assert gradient_uses_of(weight) == 2
    calls: list[str] = []

    class Recorder(MainGrad):
        def add_matmul(self, *operands: Any, **options: Any) -> None:
            calls.append("output layer")
            super().add_matmul(*operands, **options)

        def add_rows(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
            calls.append("embedding")
            super().add_rows(indices, rows)

    recorder = Recorder(torch.empty_like(weight), gradient_uses_of(weight), lambda: calls.append("complete"))
    attach_main_grad(weight, recorder)
    run_micro_batches(model, 2)
    assert calls == ["output layer", "embedding", "complete"] * 2


def test_reset_makes_the_next_contribution_overwrite() -> None:
    main_grad = MainGrad(torch.full((2, 3), float("nan")))
    ones = torch.ones(2, 3)
    main_grad.add(ones)
    main_grad.add(ones)
    assert torch.equal(main_grad.tensor, 2 * ones)
    main_grad.reset()
    assert main_grad.is_empty
    main_grad.add(3 * ones)
    assert torch.equal(main_grad.tensor, 3 * ones)


def test_reset_forgets_half_of_a_backward_pass() -> None:
    completed: list[bool] = []
    main_grad = MainGrad(torch.zeros(2, 3), num_uses=2, on_complete=lambda: completed.append(True))
    main_grad.add(torch.ones(2, 3))
    main_grad.reset()
    main_grad.add(torch.ones(2, 3))
    assert completed == []
    main_grad.add(torch.ones(2, 3))
    assert completed == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_way_of_adding_adds(dtype: torch.dtype) -> None:
    """Matrix products and scattered rows, first and later contributions, equal and wider accumulators."""
    left, right = torch.randn(4, 5), torch.randn(5, 3)
    indices, rows = torch.tensor([2, 0, 2]), torch.randn(3, 3)
    scattered = torch.zeros(4, 3)
    for index, row in zip(indices.tolist(), rows):
        scattered[index] += row
    for order in (("matmul", "rows"), ("rows", "matmul")):
        main_grad = MainGrad(torch.full((4, 3), float("nan"), dtype=dtype))
        for kind in order:
            if kind == "matmul":
                main_grad.add_matmul(left, right)
            else:
                main_grad.add_rows(indices, rows)
        torch.testing.assert_close(main_grad.tensor, (left @ right + scattered).to(dtype))


def test_products_come_from_the_library_that_is_asked_for() -> None:
    """oneDNN's matmul is rounded before it is added. MKL's matmul accumulates into the sum."""
    if not has_library("onednn", torch.float32):
        pytest.skip("this build of torch has no oneDNN")
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(64, 999, generator=generator), torch.randn(999, 64, generator=generator)
    before = torch.randn(64, 64, generator=generator)
    sums = {}
    for library in ("onednn", "mkl", "mixed"):
        main_grad = MainGrad(torch.empty(64, 64))
        main_grad.add(before)
        main_grad.add_matmul(left, right, library)
        sums[library] = main_grad.tensor
    assert torch.equal(sums["onednn"], before + product(left, right, "onednn"))
    assert torch.equal(sums["mkl"], torch.addmm(before, left, right))
    assert torch.equal(sums["mixed"], sums["mkl"])
    assert not torch.equal(sums["onednn"], sums["mkl"])


def test_a_gradient_that_never_came_is_zero() -> None:
    main_grad = MainGrad(torch.full((2, 3), float("nan")))
    main_grad.fill_if_empty()
    assert not main_grad.tensor.any()
    main_grad.add(torch.ones(2, 3))
    main_grad.fill_if_empty()
    assert torch.equal(main_grad.tensor, torch.ones(2, 3))


def test_parameters_start_without_an_accumulator() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert main_grad_of(parameter) is None
    assert main_grad_of(torch.cat((parameter, parameter))) is None
    assert gradient_uses_of(parameter) == 1
    set_gradient_uses(parameter, 2)
    assert gradient_uses_of(parameter) == 2


def test_an_owner_without_memory_is_asked_for_it_before_the_first_contribution() -> None:
    asked: list[int] = []

    def lend() -> None:
        asked.append(1)
        main_grad.tensor = torch.full((2, 3), float("nan"))

    main_grad = MainGrad(torch.empty(0), on_begin=lend)
    ones = torch.ones(2, 3)
    for contribution in (
        lambda: main_grad.add(ones),
        lambda: main_grad.add_matmul(torch.ones(2, 1), torch.ones(1, 3)),
        lambda: main_grad.add_rows(torch.tensor([0, 1]), ones),
        main_grad.fill_if_empty,
    ):
        main_grad.reset()
        main_grad.tensor = torch.empty(0)
        contribution()
        expected = 0.0 if contribution == main_grad.fill_if_empty else 1.0
        assert main_grad.tensor.eq(expected).all()
        main_grad.add(ones)
        assert main_grad.tensor.eq(expected + 1.0).all()
    assert len(asked) == 4


def test_a_grouped_product_is_a_contribution() -> None:
    completed: list[int] = []
    main_grad = MainGrad(torch.full((2, 3, 4), 7.0), on_complete=lambda: completed.append(1))
    grad, x = torch.randn(5, 3), torch.randn(5, 4)
    for count in (1, 2):
        main_grad.add_grouped_matmul(grad, x, [5, 0])
        assert len(completed) == count
        torch.testing.assert_close(main_grad.tensor, torch.stack((grad.t() @ x * count, torch.zeros(3, 4))))
    assert not main_grad.is_empty


@pytest.fixture
def _sums_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum parts as the program of the device does."""

    def sum_parts(parts: torch.Tensor, totals: list[torch.Tensor], adds: list[bool]) -> None:
        for part, total, is_added in zip(parts, totals, adds, strict=True):
            total.copy_(part.sum(dim=0) + (total if is_added else 0.0))

    module = ModuleType("column_sums")
    module.sum_parts, module.MAX_TOTALS = sum_parts, 8  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.ops.triton.column_sums", module)


@pytest.mark.usefixtures("_sums_without_a_device")
def test_parts_of_gradients_are_summed_where_they_are_received() -> None:
    completed: list[int] = []
    main_grad = MainGrad(torch.full((3,), 7.0), on_complete=lambda: completed.append(1))
    receivers = [Receiver(torch.bfloat16, None), Receiver(torch.float32, main_grad)]
    parts = torch.arange(12.0).view(2, 2, 3)
    for count in (1, 2):
        given, left = receive_parts(parts, receivers)
        assert left is None
        assert given is not None
        assert (given.dtype, given.tolist()) == (torch.bfloat16, [3.0, 5.0, 7.0])
        assert main_grad.tensor.tolist() == [15.0 * count, 17.0 * count, 19.0 * count]
        assert len(completed) == count


@pytest.mark.usefixtures("_sums_without_a_device")
def test_a_bias_has_the_sum_of_the_parts_unless_the_gradient_has_changed_since() -> None:
    grad = torch.ones(2, 4, 3)
    receiver = Receiver(torch.float32, None)
    rows = bias_gradient(grad, receiver)
    assert rows is not None
    assert rows.tolist() == [8.0] * 3
    leave_parts(grad, torch.full((1, 2, 3), 0.25))
    parts = bias_gradient(grad, receiver)
    assert parts is not None
    assert parts.tolist() == [0.5] * 3
    grad.add_(1.0)
    changed = bias_gradient(grad, receiver)
    assert changed is not None
    assert changed.tolist() == [16.0] * 3


def test_only_a_parameter_that_is_used_once_receives_into_its_main_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert Receiver.of(parameter) == (torch.bfloat16, None)
    for num_uses in (1, 2):
        main_grad = MainGrad(torch.zeros(3), num_uses)
        attach_main_grad(parameter, main_grad)
        assert Receiver.of(parameter) == (torch.bfloat16, main_grad if num_uses == 1 else None)


def make_parameter(num_uses: int = 1) -> tuple[nn.Parameter, MainGrad, list[float]]:
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    completions: list[float] = []
    main_grad = MainGrad(
        torch.full((2, 3), torch.nan, dtype=torch.float64),
        num_uses,
        on_complete=lambda: completions.append(main_grad.tensor.sum().item()),
    )
    attach_main_grad(parameter, main_grad)
    return parameter, main_grad, completions


def operands(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 5), value, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64, requires_grad=True)


def test_products_wait_for_their_micro_batch() -> None:
    parameter, main_grad, completions = make_parameter()
    queue = WeightGradQueue([parameter, nn.Parameter(torch.zeros(1))])
    for microbatch in (0, 1):
        with queue.collecting(microbatch):
            main_grad.add_matmul(*operands(10.0**microbatch))
    assert main_grad.is_empty
    queue.run(1)
    assert main_grad.tensor.tolist() == [[50.0] * 3] * 2
    queue.run(0)
    assert main_grad.tensor.tolist() == [[55.0] * 3] * 2
    assert completions == [300.0, 330.0]
    assert not main_grad.tensor.requires_grad


def test_other_contributions_are_made_at_once() -> None:
    parameter, main_grad, completions = make_parameter()
    queue = WeightGradQueue([parameter])
    with queue.collecting(0):
        main_grad.add(torch.ones(2, 3, dtype=torch.float64))
    assert completions == [6.0]
    queue.run(0)
    assert completions == [6.0]


def test_contributions_of_a_parameter_with_two_uses_stay_together() -> None:
    parameter, main_grad, completions = make_parameter(num_uses=2)
    queue = WeightGradQueue([parameter])
    rows = torch.ones(1, 3, dtype=torch.float64)
    for microbatch in (0, 1):
        with queue.collecting(microbatch):
            main_grad.add_matmul(*operands(1.0))
            main_grad.add_rows(torch.tensor([1]), rows)
    assert completions == []
    queue.run(0)
    queue.run(1)
    assert completions == [33.0, 66.0]


def test_outside_of_a_split_pass_nothing_is_put_off() -> None:
    parameter, main_grad, completions = make_parameter()
    queue = WeightGradQueue([parameter])
    main_grad.add_matmul(*operands(1.0))
    assert completions == [30.0]
    with pytest.raises(KeyError):
        queue.run(0)


class Step(torch.autograd.Function):
    """Function whose backward pass calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, in_backward: Callable[[], None]) -> torch.Tensor:
        ctx.in_backward = in_backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.in_backward()
        return grad, None


def run_backward(*steps: Callable[[], None]) -> None:
    """Run a backward pass that calls the functions in their order."""
    x = torch.ones(1, requires_grad=True)
    for step in reversed(steps):
        x = Step.apply(x, step)  # type: ignore[no-untyped-call]
    x.backward()


def test_a_delayed_matmul_waits_for_communication_or_the_next_one_or_the_end() -> None:
    _, first, of_first = make_parameter()
    _, second, of_second = make_parameter()
    seen: list[tuple[int, int]] = []

    def add(main_grad: MainGrad, delays: bool = True) -> Callable[[], None]:
        return lambda: main_grad.add_matmul(*operands(1.0), delays=delays)

    def look() -> None:
        seen.append((len(of_first), len(of_second)))

    run_backward(add(first), look, launch_delayed, look, launch_delayed, look)
    run_backward(add(first), add(second), look)
    look()
    run_backward(add(first, delays=False), look)
    # Outside of a backward pass nothing waits.
    add(first)()
    look()
    assert seen == [(0, 0), (1, 0), (1, 0), (2, 0), (2, 1), (3, 1), (4, 1)]
    assert first.tensor.tolist() == [[20.0] * 3] * 2
    assert second.tensor.tolist() == [[5.0] * 3] * 2
    assert not first.tensor.requires_grad


def test_matmuls_of_captured_layers_and_of_memory_that_is_allocated_for_them_do_not_wait() -> None:
    for name, value in (("may_wait", False), ("on_begin", lambda: None)):
        _, main_grad, completions = make_parameter()
        setattr(main_grad, name, value)
        seen: list[int] = []
        run_backward(
            lambda main_grad=main_grad: main_grad.add_matmul(*operands(1.0), delays=True),
            lambda completions=completions, seen=seen: seen.append(len(completions)),
        )
        assert seen == [1]


def test_a_queue_that_collects_gets_matmuls_that_would_be_delayed() -> None:
    parameter, main_grad, completions = make_parameter()
    queue = WeightGradQueue([parameter])
    with queue.collecting(0):
        run_backward(lambda: main_grad.add_matmul(*operands(1.0), delays=True), launch_delayed)
    assert completions == []
    queue.run(0)
    assert completions == [30.0]


def test_a_pass_inside_a_pass_launches_its_own_matmul() -> None:
    """Recomputed layers run a backward pass inside of the outer one."""
    (_, outer, of_outer), (_, inner, of_inner) = make_parameter(), make_parameter()
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((len(of_outer), len(of_inner)))

    def nested(*steps: Callable[[], None]) -> None:
        with torch.enable_grad():
            run_backward(lambda: inner.add_matmul(*operands(1.0), delays=True), *steps, look)

    def add_to_outer() -> None:
        outer.add_matmul(*operands(1.0), delays=True)

    run_backward(add_to_outer, lambda: nested(launch_delayed), look)
    look()
    assert seen == [(0, 1), (0, 1), (1, 1)]
    seen.clear()
    # Its end launches it too.
    run_backward(add_to_outer, nested, look)
    look()
    assert seen == [(1, 1), (1, 2), (2, 2)]


def test_a_failed_pass_keeps_no_operands() -> None:
    _, main_grad, completions = make_parameter()
    alive: list[weakref.ref[torch.Tensor]] = []

    def add() -> None:
        left, right = operands(1.0)
        alive.append(weakref.ref(right))
        main_grad.add_matmul(left, right, delays=True)
        assert len(_passes) == 1

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run_backward(add, fail)
    assert not _passes
    assert alive[0]() is None
    run_backward(add)
    assert not _passes
    assert completions == [30.0]
