"""Single layers cut over two ranks against plain matrix products, with inputs that are not contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.main_grad import MainGrad, attach_main_grad
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import Fragment, fragments, named_values, reassemble, tensor_parallel_group

LENGTH, BATCH, WIDTH = 6, 3, 10


def fill(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            spec = spec_of(parameter)
            parameter.zero_()
            for piece in spec.pieces:
                whole = torch.from_numpy(named_values(spec))
                parameter[piece.local_box.slices] = whole[piece.global_box.slices]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return ``[s, b, n]`` values whose memory is laid out ``[b, s, n]``."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def column(tp: Group, sequence_parallel: bool, stride: int = 1, bias: bool = True) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(
        WIDTH,
        16,
        tp,
        config=ModelParallelConfig(params_dtype="float64", sequence_parallel=sequence_parallel),
        init_std=0.1,
        bias=bias,
        stride=stride,
    )
    fill(layer)
    return layer


def row(tp: Group, sequence_parallel: bool) -> RowParallelLinear:
    layer = RowParallelLinear(
        16,
        WIDTH,
        tp,
        config=ModelParallelConfig(params_dtype="float64", sequence_parallel=sequence_parallel),
        init_std=0.1,
    )
    fill(layer)
    return layer


def column_then_row(sequence_parallel: bool, brings_bias_into_sum: bool = False) -> dict[str, Any]:
    """Run the pair as a feed-forward layer does; the gradient that comes back is not contiguous either."""
    tp = tensor_parallel_group()
    first, second = column(tp, sequence_parallel), row(tp, sequence_parallel)
    second.brings_bias_into_sum = brings_bias_into_sum
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grad = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if sequence_parallel:
        x, grad = x.chunk(tp.size)[tp.rank], grad.chunk(tp.size)[tp.rank]
    x = x.clone().requires_grad_()
    middle = first(transposed(x)).square()
    output = second(transposed(middle))
    output.backward(transposed(grad))
    parameters = [*first.parameters(), *second.parameters()]
    partial = []
    for parameter in parameters:
        assert parameter.grad is not None
        if spec_of(parameter).gradient_sum_axes and tp.size > 1:
            dist.all_reduce(parameter.grad)
        # The two layers' parameters have the same names: tell them apart by the layer.
        spec = spec_of(parameter).with_prefix("first." if parameter in set(first.parameters()) else "second.")
        partial.append((spec, parameter.grad))
    return {"output": output.detach().clone(), "x_grad": x.grad, "gradients": fragments(partial)}


@pytest.mark.parametrize(("sequence_parallel", "brings_bias_into_sum"), [(False, False), (True, False), (True, True)])
def test_column_then_row_equals_one_rank(sequence_parallel: bool, brings_bias_into_sum: bool) -> None:
    expected = column_then_row(False)
    results = run_distributed(2, column_then_row, sequence_parallel, brings_bias_into_sum)
    for name in ("output", "x_grad"):
        if sequence_parallel:
            torch.testing.assert_close(torch.cat([result[name] for result in results]), expected[name])
        else:
            for result in results:
                torch.testing.assert_close(result[name], expected[name])
    gradients = reassemble([result["gradients"] for result in results], copy_tolerance=1e-12)
    for name, gradient in reassemble([expected["gradients"]]).items():
        torch.testing.assert_close(torch.from_numpy(gradients[name]), torch.from_numpy(gradient))


class Additions(TorchDispatchMode):
    """Count additions that are passes of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.add.Tensor
        return func(*args, **(kwargs or {}))


def additions_of_row_layer() -> list[int]:
    layer, counts = row(tensor_parallel_group(), True), []
    for layer.brings_bias_into_sum in (False, True):
        with Additions() as additions:
            layer(torch.ones(LENGTH, BATCH, 8, dtype=torch.float64))
        counts.append(additions.count)
    return counts


def test_a_bias_in_the_sum_costs_no_pass() -> None:
    assert run_distributed(2, additions_of_row_layer) == [[1, 0]] * 2


def stacked_output() -> torch.Tensor:
    layer = column(tensor_parallel_group(), False, stride=2)
    return layer(torch.linspace(-1, 1, WIDTH, dtype=torch.float64).expand(2, 1, WIDTH)).detach().clone()


def test_stacked_column_layer_keeps_its_parts_side_by_side() -> None:
    whole = stacked_output()
    first, second = run_distributed(2, stacked_output)
    joined = torch.cat([torch.cat(pair, dim=-1) for pair in zip(first.chunk(2, -1), second.chunk(2, -1))], dim=-1)
    torch.testing.assert_close(joined, whole)


def test_one_rank_equals_plain_products() -> None:
    tp = single_rank_group()
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    for sequence_parallel in (False, True):
        first, second = column(tp, sequence_parallel), row(tp, sequence_parallel)
        torch.testing.assert_close(first(x), F.linear(x, first.weight, first.bias))
        y = first(x)
        torch.testing.assert_close(second(y), F.linear(y, second.weight, second.bias))
        assert not any(spec_of(p).gradient_sum_axes for p in (*first.parameters(), *second.parameters()))


def test_frozen_weight_and_input_get_no_gradient() -> None:
    layer = column(single_rank_group(), False, bias=False)
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.weight.grad = None
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(dim=0).expand_as(x))


def embed(vocab_size: int, padded: int, sequence_parallel: bool) -> tuple[torch.Tensor, list[Fragment]]:
    tp = tensor_parallel_group()
    layer = VocabParallelEmbedding(
        vocab_size,
        padded,
        WIDTH,
        tp,
        sequence_parallel=sequence_parallel,
        init_std=0.1,
        dtype=torch.float64,
        device="cpu",
    )
    fill(layer)
    tokens = torch.randint(0, vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    tokens[0, 0], tokens[-1, -1] = 0, vocab_size - 1
    output = layer(tokens)
    grad = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    output.backward(grad.chunk(tp.size)[tp.rank] if sequence_parallel else grad)
    assert layer.weight.grad is not None
    return output.detach().clone(), fragments([(spec_of(layer.weight), layer.weight.grad)])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("vocab_size", "padded"), [(22, 22), (19, 24), (11, 24)])
def test_embedding_rows_come_from_the_rank_that_holds_them(
    vocab_size: int, padded: int, sequence_parallel: bool
) -> None:
    expected, whole = embed(vocab_size, padded, False)
    results = run_distributed(2, embed, vocab_size, padded, sequence_parallel)
    outputs = [output for output, _ in results]
    if sequence_parallel:
        assert torch.equal(torch.cat(outputs), expected)
    else:
        assert all(torch.equal(output, expected) for output in outputs)
    (gradient,) = reassemble(pieces for _, pieces in results).values()
    (expected_gradient,) = reassemble([whole]).values()
    torch.testing.assert_close(torch.from_numpy(gradient), torch.from_numpy(expected_gradient))


def rows_of_the_gradient() -> list[int]:
    """Return the row of this rank's table to which each token of every rank's gives its gradient."""
    tp = tensor_parallel_group()
    layer = VocabParallelEmbedding(
        8, 8, WIDTH, tp, sequence_parallel=False, init_std=0.1, dtype=torch.float64, device="cpu"
    )
    main_grad = MainGrad(torch.zeros_like(layer.weight))
    attach_main_grad(layer.weight, main_grad)
    given: list[int] = []
    main_grad.add_rows = lambda indices, rows: given.extend(indices.tolist())  # type: ignore[method-assign]
    layer(torch.arange(8)[None]).sum().backward()
    return given


def test_tokens_of_other_ranks_do_not_pile_up_on_one_row() -> None:
    assert run_distributed(2, rows_of_the_gradient) == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2
