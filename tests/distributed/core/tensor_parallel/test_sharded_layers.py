"""Layers and mappings over ranks against plain matrix products, in Megatron's model and in a user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.collectives import all_gather_into
from megatron.core.errors import ConfigurationError
from megatron.core.main_grad import MainGrad, attach_main_grad
from megatron.core.ops import Float8Recipe, Fp8Quantizers
from megatron.core.parallel_config import Fp8Config, ParallelConfig
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.comm_overlap_config import LinearOverlap
from megatron.core.tensor_parallel.sharded_layers import ColumnShardedLinear, RowShardedLinear, VocabShardedEmbedding
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import Fragment, fragments, named_values, reassemble, tensor_parallel_group

MAPPINGS: dict[str, Callable[..., torch.Tensor]] = {
    "reduce": lambda tensor, group: mappings.reduce_from_tensor_model_parallel_region(tensor.contiguous(), group),
    "copy": mappings.copy_to_tensor_model_parallel_region,
    "scatter": mappings.scatter_to_tensor_model_parallel_region,
    "gather": mappings.gather_from_tensor_model_parallel_region,
    "scatter_sequence": mappings.scatter_to_sequence_parallel_region,
    "gather_sequence": mappings.gather_from_sequence_parallel_region,
    "reduce_scatter": mappings.reduce_scatter_to_sequence_parallel_region,
}


def values(rank: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def forward_and_backward() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tp = tensor_parallel_group()
    results = {}
    for name, mapping in MAPPINGS.items():
        x = values(tp.rank, (6, 2, 9), seed=1).requires_grad_()
        # A transposed view, but where the sum is written in place: no collective may take its memory for the tensor.
        entering = x.clone() if name == "reduce" else x.transpose(0, 2).contiguous().transpose(0, 2)
        output = mapping(entering, group=tp)
        output.backward(values(tp.rank, tuple(output.shape), seed=2))
        assert x.grad is not None
        results[name] = (output.detach().clone(), x.grad)
    return results


def test_mappings_over_three_ranks() -> None:
    xs = [values(rank, (6, 2, 9), seed=1) for rank in range(3)]
    total = torch.stack(xs).sum(dim=0)

    def grads(shape: tuple[int, ...]) -> list[torch.Tensor]:
        return [values(rank, shape, seed=2) for rank in range(3)]

    same, short, long = grads((6, 2, 9)), grads((2, 2, 9)), grads((18, 2, 9))
    narrow, wide = grads((6, 2, 3)), grads((6, 2, 27))
    for rank, results in enumerate(run_distributed(3, forward_and_backward)):
        expected = {
            "reduce": (total, same[rank]),
            "copy": (xs[rank], torch.stack(same).sum(dim=0)),
            "scatter": (xs[rank].chunk(3, dim=-1)[rank], torch.cat(narrow, dim=-1)),
            "gather": (torch.cat(xs, dim=-1), wide[rank].chunk(3, dim=-1)[rank]),
            "scatter_sequence": (xs[rank].chunk(3)[rank], torch.cat(short)),
            "gather_sequence": (torch.cat(xs), sum(long).chunk(3)[rank]),  # type: ignore[union-attr]
            "reduce_scatter": (total.chunk(3)[rank], torch.cat(short)),
        }
        for name, (output, gradient) in expected.items():
            torch.testing.assert_close(results[name][0], output, msg=f"{name} forward")
            torch.testing.assert_close(results[name][1], gradient, msg=f"{name} backward")


@pytest.mark.parametrize("name", MAPPINGS)
def test_one_rank_passes_the_tensor_through(name: str) -> None:
    x = torch.randn(6, 2, 9, requires_grad=True)
    assert MAPPINGS[name](x, single_rank_group()) is x


@pytest.mark.parametrize(("name", "dim"), [("scatter", -1), ("scatter_sequence", 0)])
def test_what_cannot_be_cut_evenly_is_refused(name: str, dim: int) -> None:
    tp = Group(axes=("tp",), ranks=(0, 1), rank=0)
    with pytest.raises(ConfigurationError, match=rf"dim {dim} of a tensor \[7, 2, 9\] is not divisible by .* size 2"):
        MAPPINGS[name](torch.zeros(7, 2, 9), tp)


LENGTH, BATCH, WIDTH = 6, 3, 10


def fill(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            spec = spec_of(parameter)
            parameter.zero_()
            for shard in spec.shards:
                whole = torch.from_numpy(named_values(spec))
                parameter[shard.local_box.slices] = whole[shard.global_box.slices]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return ``[s, b, n]`` values whose memory is laid out ``[b, s, n]``."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def column(tp: Group, sequence_parallel: bool, stride: int = 1, bias: bool = True) -> ColumnShardedLinear:
    layer = ColumnShardedLinear(
        WIDTH,
        16,
        tp,
        config=ParallelConfig(params_dtype="float64", sequence_parallel=sequence_parallel),
        init_std=0.1,
        bias=bias,
        stride=stride,
    )
    fill(layer)
    return layer


def row(tp: Group, sequence_parallel: bool) -> RowShardedLinear:
    layer = RowShardedLinear(
        16,
        WIDTH,
        tp,
        config=ParallelConfig(params_dtype="float64", sequence_parallel=sequence_parallel),
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


def order_of_backward(overlaps_chunks: bool, delays: bool, in_fp8: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the order of gathers and weight gradients in the backward pass of two pairs, and the gradients."""
    tp = tensor_parallel_group()
    layers = {f"{name} {pair}": make(tp, True) for pair in (1, 2) for name, make in (("column", column), ("row", row))}
    events: list[str] = []
    for name, layer in layers.items():
        if overlaps_chunks:
            layer.overlap = LinearOverlap(backward=True)
        if in_fp8:
            layer.quantizers = Fp8Quantizers(Float8Recipe.of(Fp8Config(fp8_format="hybrid", fp8_recipe="tensorwise")))
        main_grad = MainGrad(torch.zeros_like(layer.weight), on_complete=functools.partial(events.append, name))
        main_grad.may_wait = delays
        attach_main_grad(layer.weight, main_grad)
    x = values(tp.rank, (LENGTH // tp.size, BATCH, WIDTH), seed=3)
    y = x.requires_grad_()
    for layer in layers.values():
        y = layer(y)

    def gather(*arguments: Any, **options: Any) -> Any:
        events.append("gather")
        return all_gather_into(*arguments, **options)

    with patch.object(mappings, "all_gather_into", gather):
        y.square().sum().backward()
    grads = {name: layer.weight.main_grad.tensor for name, layer in layers.items()}  # type: ignore[union-attr]
    assert x.grad is not None
    return events, {"x": x.grad, **grads}


IN_ORDER = ["gather", "row 2", "column 2", "gather", "row 1", "column 1"]
DELAYED = ["gather", "column 2", "gather", "row 2", "column 1", "row 1"]


@pytest.mark.parametrize("in_fp8", [False, True])
def test_weight_gradients_of_row_parallel_layers_wait_for_the_next_gather(in_fp8: bool) -> None:
    cases = ((False, True, in_fp8), (False, False, in_fp8), (True, True, in_fp8))
    for late, plain, chunked in zip(*(run_distributed(2, order_of_backward, *case) for case in cases)):
        assert late[0] == DELAYED
        assert plain[0] == IN_ORDER
        # A gather that overlaps with its own matmul hides nothing else. Without symmetric memory FP8 has no chunks.
        assert chunked[0] == (DELAYED if in_fp8 else [event for event in IN_ORDER if event != "gather"])
        for name, gradient in plain[1].items():
            assert torch.equal(late[1][name], gradient), name
            torch.testing.assert_close(chunked[1][name], gradient)


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
    layer = VocabShardedEmbedding(
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
    (gradient,) = reassemble(shards for _, shards in results).values()
    (expected_gradient,) = reassemble([whole]).values()
    torch.testing.assert_close(torch.from_numpy(gradient), torch.from_numpy(expected_gradient))


def rows_of_the_gradient() -> list[int]:
    """Return the row of this rank's table to which each token of every rank's gives its gradient."""
    tp = tensor_parallel_group()
    layer = VocabShardedEmbedding(
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


STANDALONE_LENGTH, STANDALONE_BATCH, INNER, OUTER = 4, 3, 6, 10
FLOAT64 = ParallelConfig(params_dtype="float64")
SEQUENCE_PARALLEL = ParallelConfig(sequence_parallel=True)
TWO_RANKS = Group(axes=("tp",), ranks=(0, 1), rank=0)
Result = tuple[list[torch.Tensor], torch.Tensor, list[Fragment]]


def standalone_values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run_layer(kind: str, settings: dict[str, Any]) -> Result:
    """Return what a layer gives (one tensor or two), the input's gradient, and the parameters' by their place."""
    tp = tensor_parallel_group()
    widths = {"input_size": INNER, "output_size": OUTER}
    layer: Any
    if kind == "column":
        layer = ColumnShardedLinear(**widths, tp_group=tp, config=FLOAT64, **settings)
    else:
        layer = RowShardedLinear(**widths, tp_group=tp, config=FLOAT64, **settings)
    fill(layer)
    x = standalone_values(STANDALONE_LENGTH, STANDALONE_BATCH, INNER, seed=1)
    if kind == "row" and settings.get("input_is_parallel", True):
        x = x.chunk(tp.size, dim=-1)[tp.rank]
    x = x.clone().requires_grad_()
    given = layer(x)
    outputs = list(given) if isinstance(given, tuple) else [given]
    total = outputs[0] if len(outputs) == 1 or outputs[1] is None else outputs[0] + outputs[1]
    grad = standalone_values(STANDALONE_LENGTH, STANDALONE_BATCH, OUTER, seed=2)
    total.backward(grad if total.shape[-1] == OUTER else grad.chunk(tp.size, dim=-1)[tp.rank])
    assert x.grad is not None
    kept = [output.detach().clone() for output in outputs if output is not None]
    return kept, x.grad, fragments((spec_of(p), p.grad) for p in layer.parameters() if p.grad is not None)


def plain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return a plain map's product, its bias, the input's gradient and the parameters'."""
    layer = ColumnShardedLinear(INNER, OUTER, single_rank_group(), config=FLOAT64)
    weight = torch.from_numpy(named_values(spec_of(layer.weight))).requires_grad_()
    assert layer.bias is not None
    bias = torch.from_numpy(named_values(spec_of(layer.bias))).requires_grad_()
    x = standalone_values(STANDALONE_LENGTH, STANDALONE_BATCH, INNER, seed=1).requires_grad_()
    F.linear(x, weight, bias).backward(standalone_values(STANDALONE_LENGTH, STANDALONE_BATCH, OUTER, seed=2))
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return F.linear(x, weight).detach(), bias.detach(), x.grad, {"weight": weight.grad, "bias": bias.grad}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("column", {"gather_output": True}),
    ("column", {"skip_bias_add": True}),
    ("column", {"gather_output": True, "skip_bias_add": True}),
    ("column", {"gather_output": True, "padded_output_size": 12}),
    ("row", {"input_is_parallel": False}),
    ("row", {"skip_bias_add": True}),
    ("row", {"input_is_parallel": False, "skip_bias_add": True}),
]


def run_cases() -> list[Result]:
    return [run_layer(kind, settings) for kind, settings in CASES]


def test_every_flag_gives_what_a_plain_product_gives() -> None:
    product, bias, x_grad, gradients = plain()
    results = run_distributed(2, run_cases)
    for number, (kind, settings) in enumerate(CASES):
        is_cut = kind == "column" and not settings.get("gather_output", False)
        for rank in range(2):
            outputs, own_x_grad, _ = results[rank][number]
            expected = [product, bias] if settings.get("skip_bias_add") else [product + bias]
            if is_cut:
                expected = [tensor.chunk(2, dim=-1)[rank] for tensor in expected]
            assert len(outputs) == len(expected), settings
            for ours, theirs in zip(outputs, expected, strict=True):
                torch.testing.assert_close(ours, theirs, msg=f"{kind} {settings}")
            cut_grad = kind == "row" and settings.get("input_is_parallel", True)
            wanted = x_grad.chunk(2, dim=-1)[rank] if cut_grad else x_grad
            torch.testing.assert_close(own_x_grad, wanted, msg=f"{kind} {settings}: input's gradient")
        found = reassemble([results[rank][number][2] for rank in range(2)], copy_tolerance=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), gradient, msg=f"{kind} {settings}: {name}")


def test_a_layer_without_a_bias_gives_none_for_it() -> None:
    for layer in (
        ColumnShardedLinear(INNER, OUTER, single_rank_group(), bias=False, skip_bias_add=True),
        RowShardedLinear(INNER, OUTER, single_rank_group(), bias=False, skip_bias_add=True),
    ):
        output, bias = layer(torch.zeros(STANDALONE_LENGTH, STANDALONE_BATCH, INNER))
        assert output.shape == (STANDALONE_LENGTH, STANDALONE_BATCH, OUTER)
        assert bias is None


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        (ColumnShardedLinear, {"output_size": 7}, "7 output features are not divisible by tensor-parallel size 2;"),
        (ColumnShardedLinear, {"stride": 2}, "10 output features .* size 2 x 2 stacked tensors;"),
        (
            ColumnShardedLinear,
            {"gather_output": True, "config": SEQUENCE_PARALLEL},
            ("but they are True and 1; omit one"),
        ),
        (RowShardedLinear, {"input_size": 5}, "5 input features are not divisible by tensor-parallel size 2;"),
        (
            RowShardedLinear,
            {"input_is_parallel": False, "config": SEQUENCE_PARALLEL},
            "needs the whole input",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(layer: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        layer(**{"input_size": INNER, "output_size": OUTER, "tp_group": TWO_RANKS} | settings)
    assert "\n" not in str(caught.value)
