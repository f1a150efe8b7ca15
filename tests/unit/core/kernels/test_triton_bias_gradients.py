"""Biases' gradients that come with a gradient which is written anyway, interpreted on the CPU, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron.core.main_grad import MainGrad, Receiver, attach_main_grad, bias_gradient, leave_parts, receive_parts
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.mlp import ACTIVATIONS, MLP
from megatron.core.transformer.rotary_pos_embedding import split_projection
from tests.harness.toy_model import make_model
from tests.unit.core.kernels.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton
DTYPES = [torch.float32, torch.bfloat16]


def check_activations(dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import activation as programs

    torch.manual_seed(11)
    # Parts of 4, 4, 4 and 3 rows; blocks of 32, 32 and 6 columns.
    programs._BLOCK, programs._MAX_PARTS = 32, 4
    for kind in programs.PLAIN_KINDS:
        activation = ACTIVATIONS[kind]
        x = (2 * torch.randn(5, 3, 70)).to(dtype).requires_grad_()
        bias = torch.zeros(70, dtype=dtype, requires_grad=True)
        # As it comes from a product: transposed.
        grad = torch.randn(3, 5, 70).to(dtype).transpose(0, 1)
        expected = activation(x.double() + bias.double())
        actual = programs.activate_with_bias(x, bias, activation, kind)
        assert torch.equal(actual, activation(x))
        for one, other in zip(
            torch.autograd.grad(actual, (x, bias), grad), torch.autograd.grad(expected, (x, bias), grad.double())
        ):
            close(one, other)
    empty = torch.zeros(0, 3, 70, requires_grad=True)
    (of_nothing,) = torch.autograd.grad(programs.activate_with_bias(empty, bias, F.gelu, "gelu").sum(), bias)
    assert torch.equal(of_nothing, torch.zeros(70, dtype=dtype))


@pytest.mark.default(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_the_bias_before_them(dtype: torch.dtype) -> None:
    interpret(check_activations, dtype)


def check_split(dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import query_key_value as programs

    torch.manual_seed(12)
    # Tiles of two heads; parts of 2, 2 and 1 tokens.
    programs._TILE, programs._MAX_PARTS = 64, 3
    for groups, members in [(5, 1), (3, 2), (1, 3)]:
        mixed = torch.randn(5, 1, groups, members + 2, 20).to(dtype).requires_grad_()
        for of_batch in (mixed, mixed.expand(5, 2, groups, members + 2, 20)):
            bias = torch.zeros(groups * (members + 2) * 20, dtype=dtype, requires_grad=True)
            actual = split_projection(of_batch, bias)
            # As they come from attention that has the heads before the sequence, but for one.
            grads = [torch.randn(x.shape[1], x.shape[2], 5, 20).to(dtype).permute(2, 0, 1, 3) for x in actual]
            grads[-1] = grads[-1].contiguous()
            expected = split_projection(of_batch.double() + bias.double().view(mixed.shape[2:]))
            wide_grads = torch.autograd.grad(expected, (mixed, bias), [grad.double() for grad in grads])
            for one, other in zip(torch.autograd.grad(actual, (mixed, bias), grads), wide_grads):
                close(one, other)


@pytest.mark.default(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_in_parts_and_its_bias(dtype: torch.dtype) -> None:
    interpret(check_split, dtype)


def check_receivers() -> None:
    torch.manual_seed(13)
    parameters = [torch.zeros(70, dtype=torch.bfloat16) for _ in range(3)]
    events: list[str] = []
    totals = [torch.full((70,), 7.0) for _ in range(2)]
    for name, parameter, total in zip(("first", "third"), parameters[::2], totals):
        attach_main_grad(parameter, MainGrad(total, on_complete=partial(events.append, name)))
    expected = torch.zeros(3, 70, dtype=torch.float64)
    for num_parts in (130, 3):
        parts = torch.randn(3, num_parts, 70)
        first, second, third = receive_parts(parts, [Receiver.of(parameter) for parameter in parameters])
        assert first is None
        assert third is None
        assert second is not None
        assert second.dtype == torch.bfloat16
        close(second, parts[1].double().sum(0))
        # The first contribution overwrites what was there, the second is added.
        expected += parts.double().sum(1)
        close(totals[0], expected[0])
        close(totals[1], expected[2])
    assert events == ["first", "third", "first", "third"]
    # Several layers' contributions meet in autograd.
    attach_main_grad(parameters[1], MainGrad(torch.zeros(70), num_uses=2))
    assert Receiver.of(parameters[1]).main_grad is None


def test_sums_go_into_main_gradients_or_to_autograd() -> None:
    interpret(check_receivers)


def check_parts_left_with_a_gradient() -> None:
    grad = torch.randn(5, 3, 70)
    # A third of the true sum, so that it shows what was summed.
    parts = grad.view(1, 15, 70)[:, :5]
    to_autograd = Receiver(torch.float32, None)
    leave_parts(grad, parts)
    close(bias_gradient(grad, to_autograd), parts[0].double().sum(0))
    main_grad = MainGrad(torch.zeros(70))
    assert bias_gradient(grad, Receiver(torch.float32, main_grad)) is None
    close(main_grad.tensor, parts[0].double().sum(0))
    # Somebody else's gradient was added to it, in place or into another tensor.
    rows = grad.view(15, 70)
    close(bias_gradient(grad + 0, to_autograd), rows.double().sum(0))
    grad.add_(1.0)
    close(bias_gradient(grad, to_autograd), rows.double().sum(0))


def test_parts_are_summed_only_of_an_unchanged_gradient() -> None:
    interpret(check_parts_left_with_a_gradient)


def check_activation_of_another_kind(is_registered: bool) -> None:
    """Compare with autograd in float64, which sees the same two matmuls with the function itself between them."""
    model = make_model(single_rank_group(), openai_gelu=True, num_layers=1)
    mlp = next(module for module in model.modules() if isinstance(module, MLP))
    mlp.activation = F.mish
    if is_registered:
        mlp.kind, ACTIVATIONS["mish"] = "mish", F.mish
    parameters = [*mlp.linear_fc1.parameters(), *mlp.linear_fc2.parameters()]
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, 28)
    weight, bias, weight_2, bias_2 = (parameter.detach().double().requires_grad_() for parameter in parameters)
    expected = F.mish(x.double() @ weight.t() + bias) @ weight_2.t() + bias_2
    expected_grads = torch.autograd.grad(expected.sum(), [weight, bias, weight_2, bias_2])
    with cpu_runs_on_triton():
        actual = mlp(x).hidden
        grads = torch.autograd.grad(actual.sum(), parameters)
    close(actual, expected)
    for one, other in zip(grads, expected_grads, strict=True):
        close(one, other)


@pytest.mark.parametrize("is_registered", [False, True])
def test_an_activation_without_a_program_keeps_its_own_gradient(is_registered: bool) -> None:
    interpret(check_activation_of_another_kind, is_registered)
