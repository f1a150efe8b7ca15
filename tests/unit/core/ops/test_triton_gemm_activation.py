"""GEMMs with an activation in the epilogue, interpreted on the CPU, against their torch twins and float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.ops import FusedActivation, activation_input_gradient, linear_with_activation
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.mlp import ACTIVATIONS, FeedForward
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group
from tests.unit.core.ops.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)]


def use_small_tiles() -> None:
    """Let GEMMs of some dozen rows and columns have several tiles, more than one group of them, and cut ones."""
    from megatron.core.ops.triton import gemm_activation as programs

    programs.TILES = (programs.Tile(16, 32, 16, 4, 2),)
    programs.TILE_OF_FLOAT32, programs._GROUP = programs.TILES[0], 2


def check_gemms(dtype: torch.dtype, has_small_tiles: bool) -> None:
    torch.manual_seed(21)
    if has_small_tiles:
        use_small_tiles()
    # Rows (a product of two), inner size, columns: all cut, in two groups of tiles; one row; whole tiles.
    for (length, batch), inner_size, columns, kind, has_bias in [
        ((19, 2), 21, 43, "gelu_tanh", True),
        ((5, 2), 19, 37, "gelu", False),
        ((1, 1), 16, 35, "squared_relu", True),
        ((16, 1), 16, 32, "gelu", True),
    ]:
        activation = FusedActivation(ACTIVATIONS[kind], kind, has_bias)
        x = torch.randn(length, batch, inner_size).to(dtype)
        weight = (torch.randn(columns, inner_size) / inner_size**0.5).to(dtype)
        compare_forward(x, weight, torch.randn(columns).to(dtype) if has_bias else None, activation)
        # As it comes from a reduction over ranks or a permutation: transposed.
        grad = torch.randn(batch, length, inner_size).to(dtype).transpose(0, 1)
        weight = (torch.randn(inner_size, columns) / inner_size**0.5).to(dtype)
        compare_gradient(grad, weight, (2 * torch.randn(length, batch, columns)).to(dtype), activation)


def compare_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: FusedActivation
) -> None:
    multiply = partial(linear_with_activation, activation=activation)
    wide_bias = None if bias is None else bias.double()
    expected_inner, _ = multiply(x.double(), weight.double(), wide_bias, keeps_input=True)
    with cpu_runs_on_triton():
        inner, actual = multiply(x, weight, bias, keeps_input=True)
        nothing, alone = multiply(x, weight, bias, keeps_input=False)
    assert nothing is None
    assert torch.equal(alone, actual)
    assert inner is not None
    assert expected_inner is not None
    close(inner, expected_inner)
    # The activation is that of the rounded input, which the backward pass reads.
    close(actual, activation.function(inner.double()))


def compare_gradient(
    grad: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor, activation: FusedActivation
) -> None:
    expected, no_parts = activation_input_gradient(grad.double(), weight.double(), inner.double(), activation)
    assert no_parts is None
    with cpu_runs_on_triton():
        actual, parts = activation_input_gradient(grad, weight, inner, activation)
    close(actual, expected)
    assert (parts is not None) == activation.sums_rows
    if parts is not None:
        close(parts.sum(dim=(0, 1)), expected.flatten(0, -2).sum(dim=0), units=2)


@needs_triton
@pytest.mark.default(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemms_with_an_activation_or_its_derivative(dtype: torch.dtype) -> None:
    interpret(check_gemms, dtype, True)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemms_with_their_own_tiles(dtype: torch.dtype) -> None:
    interpret(check_gemms, dtype, False)


def check_tiles() -> None:
    from megatron.core.ops.triton import gemm_activation as programs

    x = torch.empty(0, dtype=torch.bfloat16)
    assert programs._tile_for(8192, 4096, x) == programs.TILES[0]
    assert programs._tile_for(2048, 1024, x) == programs.TILES[1]
    assert programs._tile_for(1, 4096, x) == programs.TILES[-1]
    assert programs._tile_for(8192, 4096, x.float()) == programs.TILE_OF_FLOAT32


def check_kinds() -> None:
    from megatron.config.checks.model import _IN_GEMMS
    from megatron.core.ops.triton.activation import PLAIN_KINDS

    assert set(_IN_GEMMS) == set(PLAIN_KINDS)


@needs_triton
def test_the_flag_accepts_the_activations_that_have_a_kernel() -> None:
    interpret(check_kinds)


@needs_triton
def test_large_gemms_have_large_tiles() -> None:
    interpret(check_tiles)


def check_layer(dtype: torch.dtype, has_bias: bool) -> None:
    """Compare a layer's output and all its gradients with float64, on some ranks with sequence parallelism."""
    torch.manual_seed(22)
    use_small_tiles()
    tp = tensor_parallel_group()
    settings = {"openai_gelu": True, "num_layers": 1, "add_bias_linear": has_bias, "sequence_parallel": tp.size > 1}
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
    whole = torch.randn(6, 2, 28, dtype=torch.float64).to(dtype)
    whole_grad = torch.randn(6, 2, 28, dtype=torch.float64).to(dtype)

    def run(of: torch.dtype, is_fused: bool) -> list[torch.Tensor]:
        given = settings | {"gemm_activation_fusion": is_fused, "params_dtype": names[of]}
        model = make_model(tp, **given)
        load_global_weights(model)
        mlp = next(module for module in model.modules() if isinstance(module, FeedForward))
        for parameter in mlp.parameters():
            parameter.data.copy_(parameter.data.to(dtype))
        x = whole.chunk(tp.size)[tp.rank].to(of).requires_grad_()
        output = mlp(x).hidden
        grads = torch.autograd.grad(output, [x, *mlp.parameters()], whole_grad.chunk(tp.size)[tp.rank].to(of))
        return [output.detach(), *grads]

    expected = run(torch.float64, False)
    # No kernel computes float64: the twin is the same sequence of operations.
    assert all(map(torch.equal, run(torch.float64, True), expected))
    with cpu_runs_on_triton():
        actual = run(dtype, True)
    for one, other in zip(actual, expected, strict=True):
        close(one, other, units=4 if dtype is torch.bfloat16 else 2)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "has_bias", "world_size"),
    [
        (torch.float32, True, 1),
        (torch.bfloat16, True, 1),
        pytest.param(torch.float32, False, 1, marks=pytest.mark.long),
        (torch.float32, True, 2),
        pytest.param(torch.bfloat16, True, 2, marks=pytest.mark.long),
    ],
)
def test_a_layer_and_its_gradients(dtype: torch.dtype, has_bias: bool, world_size: int) -> None:
    interpret(check_layer, dtype, has_bias, world_size=world_size)


def losses_and_gradients(is_fused: bool, **settings: object) -> list[torch.Tensor]:
    model = make_model(single_rank_group(), params_dtype="float64", gemm_activation_fusion=is_fused, **settings)
    load_global_weights(model)
    tokens, labels, positions, _ = make_batch(8, 3, 53)
    losses = model(tokens, positions, labels=labels)
    return [losses.detach(), *torch.autograd.grad(losses.mean(), list(model.parameters()))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias_gelu_fusion": False, "add_bias_linear": False},
        {"squared_relu": True, "recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    ],
    ids=["gelu, tanh form", "gelu, no bias", "squared ReLU, recomputed"],
)
def test_a_step_in_float64_does_not_change(settings: dict[str, object]) -> None:
    expected = losses_and_gradients(False, **settings)
    assert all(map(torch.equal, losses_and_gradients(True, **settings), expected))
