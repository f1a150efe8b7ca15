"""Linear maps in chunks or in fp8 over ranks: the numbers of whole products, bits of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import collectives
from megatron.core.ops.fp8_quantizers import Float8Recipe, Float8State, Fp8Quantizers
from megatron.core.parallel_config import Fp8Config, Fp8TensorIndex, ParallelConfig
from megatron.core.process_group import CollectiveCall, Group, single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel import overlapped_linear, symmetric_memory
from megatron.core.tensor_parallel.comm_overlap_config import WHOLE, LinearOverlap
from megatron.core.tensor_parallel.sharded_layers import ColumnShardedLinear, RowShardedLinear
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, tensor_parallel_group

LENGTH, BATCH, WIDTH, INNER = 12, 3, 10, 16
CHUNKED = LinearOverlap(forward=True, backward=True)
VARIANTS = (
    CHUNKED,
    LinearOverlap(forward=True),
    LinearOverlap(backward=True),
    LinearOverlap(forward=True, backward=True, bulk_gather=False, bulk_scatter=False),
)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run_pair(tp: Group, overlap: LinearOverlap, brings_bias: bool) -> dict[str, torch.Tensor]:
    """Run a column-parallel layer and a row-parallel one under sequence parallelism, forward and backward."""
    config = ParallelConfig(params_dtype="float64", sequence_parallel=True)
    first = ColumnShardedLinear(WIDTH, INNER, tp, config=config)
    second = RowShardedLinear(INNER, WIDTH, tp, config=config)
    first.overlap = second.overlap = overlap
    second.brings_bias_into_sum = brings_bias
    with torch.no_grad():
        for seed, parameter in enumerate((*first.parameters(), *second.parameters())):
            parameter.copy_(draw(seed + 10 * (tp.rank if parameter is not second.bias else 0), *parameter.shape))
    # What comes in is not contiguous, forward and backward.
    x = draw(50 + tp.rank, BATCH, LENGTH // tp.size, WIDTH).transpose(0, 1).requires_grad_()
    output = second(first(x).square())
    output.backward(draw(60 + tp.rank, BATCH, LENGTH // tp.size, WIDTH).transpose(0, 1))
    gradients = {f"{index}": p.grad for index, p in enumerate((*first.parameters(), *second.parameters()))}
    return {"output": output.detach(), "x": x.grad, **gradients}  # type: ignore[dict-item]


def differences() -> list[float]:
    """Return how far each variant is from whole collectives, and these with each way of adding the bias."""
    tp, found = tensor_parallel_group(), []
    for brings_bias in (False, True):
        expected = run_pair(tp, WHOLE, brings_bias)
        for overlap in VARIANTS:
            results = run_pair(tp, overlap, brings_bias)
            found.append(max(float((results[name] - expected[name]).abs().max()) for name in expected))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_chunks_compute_what_whole_collectives_do(size: int) -> None:
    for found in run_distributed(size, differences):
        assert max(found) < 1e-12, found


def order_of_events() -> list[list[str]]:
    """Return what happens in which order: messages that begin and arrive, and products."""
    events: list[str] = []

    def observe(call: CollectiveCall) -> None:
        assert call.num_bytes == LENGTH // plain.size * BATCH * WIDTH * 8
        events.append(call.operation)

    plain = tensor_parallel_group()
    tp = Group(plain.axes, plain.ranks, plain.rank, plain.handle, observe)
    wait = collectives.RingExchange.wait

    def noted_wait(exchange: collectives.RingExchange) -> torch.Tensor:
        events.append("wait")
        return wait(exchange)

    def multiply(output: torch.Tensor, x: torch.Tensor) -> None:
        events.append("product")
        output.copy_(x)

    orders = []
    collectives.RingExchange.wait = noted_wait  # type: ignore[method-assign]
    overlapped_linear.gather_and_multiply(draw(1, LENGTH // tp.size, BATCH, WIDTH), multiply, WIDTH, tp)
    orders.append(list(events))
    events.clear()
    overlapped_linear.multiply_and_scatter(draw(1, LENGTH, BATCH, WIDTH), multiply, WIDTH, tp)
    return [*orders, events]


def test_every_message_is_under_way_while_a_chunk_is_multiplied() -> None:
    gathered = ["send", "product", "wait", "send", "product", "wait", "product"]
    scattered = ["product", "send", "product", "wait", "send", "product", "wait"]
    assert run_distributed(3, order_of_events) == [[gathered, scattered]] * 3


def differences_in_symmetric_memory() -> list[float]:
    """Let collectives stand in for torch's operators, which only CUDA has, under their signatures."""
    tp, calls = tensor_parallel_group(), []

    def gather(
        x: torch.Tensor, weights: list[torch.Tensor], dim: int, name: str, *, return_A: bool = True
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        assert tp.handle is not None
        assert (dim, name, x.is_contiguous()) == (0, tp.handle.group_name, True)
        calls.append("gather")
        whole = collectives.all_gather_first_dim(x, tp)
        return whole if return_A else None, [whole @ weight for weight in weights]

    def scatter(x: torch.Tensor, weight: torch.Tensor, op: str, dim: int, name: str) -> torch.Tensor:
        assert (op, dim) == ("sum", 0)
        calls.append("scatter")
        return collectives.reduce_scatter_first_dim(x @ weight, tp)

    expected = run_pair(tp, WHOLE, brings_bias=True)
    assert symmetric_memory.why_no_symmetric_memory(tp, has_peers=True) is None
    torch.ops.symm_mem.fused_all_gather_matmul = gather
    torch.ops.symm_mem.fused_matmul_reduce_scatter = scatter
    overlap = LinearOverlap(forward=True, backward=True, uses_symmetric_memory=True)
    results = run_pair(tp, overlap, brings_bias=True)
    assert calls == ["gather", "scatter", "gather", "scatter"]
    return [float((results[name] - expected[name]).abs().max()) for name in expected]


def test_symmetric_memory_is_called_for_both_products_and_both_gradients() -> None:
    for found in run_distributed(2, differences_in_symmetric_memory):
        assert max(found) < 1e-12, found
    assert run_distributed(2, why_without_peers) == ["torch or the devices do not support it"] * 2


def why_without_peers() -> str | None:
    tp = tensor_parallel_group()
    return symmetric_memory.why_no_symmetric_memory(tp, has_peers=tp.rank == 0)


FLOAT8_LENGTH, FLOAT8_BATCH, FLOAT8_WIDTH, FLOAT8_INNER = 12, 2, 10, 16
WORLD = single_rank_group(("world",))


def whole_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_float8_pair(
    recipe: str,
    sequence_parallel: bool,
    brings_bias: bool,
    is_frozen: bool = False,
    in_fp8: bool = True,
    overlap: LinearOverlap = WHOLE,
) -> dict[str, Any]:
    """Run two steps, and return of the second what comes out, all gradients, and what delayed scaling saw."""
    tp = tensor_parallel_group()
    of_layers = ParallelConfig(sequence_parallel=sequence_parallel)
    first = ColumnShardedLinear(FLOAT8_WIDTH, FLOAT8_INNER, tp, config=of_layers)
    second = RowShardedLinear(FLOAT8_INNER, FLOAT8_WIDTH, tp, config=of_layers)
    second.brings_bias_into_sum = brings_bias
    first.overlap = second.overlap = overlap
    layers = torch.nn.ModuleList((first, second))
    load_global_weights(layers, lambda spec: whole_numbers(len(spec.global_shape), *spec.global_shape).numpy())  # type: ignore[arg-type]
    config = Fp8Config(fp8_format="hybrid", fp8_recipe=recipe, fp8_wgrad=in_fp8)
    state = Float8State(config, Fp8TensorIndex(1), "cpu") if recipe == "delayed" else None
    for place, layer in enumerate((first, second)):
        layer.quantizers = Fp8Quantizers(Float8Recipe.of(config), state, (0, place))
        layer.weight.requires_grad_(not is_frozen)
    found: dict[str, Any] = {}
    for step in range(2):
        x, grad = (
            whole_numbers(10 + step, FLOAT8_LENGTH, FLOAT8_BATCH, FLOAT8_WIDTH),
            whole_numbers(20 + step, FLOAT8_LENGTH, FLOAT8_BATCH, FLOAT8_WIDTH),
        )
        if sequence_parallel:
            x, grad = x.chunk(tp.size)[tp.rank], grad.chunk(tp.size)[tp.rank]
        x = x.clone().requires_grad_()
        layers.zero_grad()
        output = second(first(x).relu())
        output.backward(grad)
        found = {"output": output.detach(), "x": x.grad}
        if state is not None:
            if tp.size > 1:
                dist.all_reduce(state.amax, dist.ReduceOp.MAX)
            found["amax"] = state.amax.clone()
            state.update(WORLD, step)
    for name, parameter in layers.named_parameters():
        if parameter.grad is not None:
            if tp.size > 1 and spec_of(parameter).gradient_sum_axes:
                dist.all_reduce(parameter.grad)
            found[name] = parameter.grad
    return found


def whole(name: str, results: list[dict[str, Any]], sequence_parallel: bool) -> torch.Tensor:
    """Return a tensor of one rank from its parts."""
    cut = {"0.weight": 0, "0.bias": 0, "1.weight": 1} | ({"output": 0, "x": 0} if sequence_parallel else {})
    parts = [result[name] for result in results]
    return torch.cat(parts, dim=cut[name]) if name in cut else parts[0]


@pytest.mark.default(5)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("sequence_parallel", "brings_bias", "is_frozen"),
    [(False, False, False), (True, False, False), (True, True, False), (True, False, True)],
)
def test_two_ranks_compute_the_bits_of_one(
    recipe: str, sequence_parallel: bool, brings_bias: bool, is_frozen: bool
) -> None:
    expected = run_float8_pair(recipe, sequence_parallel=False, brings_bias=False, is_frozen=is_frozen)
    results = run_distributed(2, run_float8_pair, recipe, sequence_parallel, brings_bias, is_frozen)
    assert len(results[0]) == len(expected) == (4 if is_frozen else 6) + (recipe == "delayed")
    for name, values in expected.items():
        assert torch.equal(whole(name, results, sequence_parallel), values), name


def run_float8_pair_in_symmetric_memory(recipe: str, overlap: LinearOverlap) -> tuple[dict[str, Any], list[str]]:
    """Let collectives stand in for torch's operators under their signatures, and return which were called."""
    tp, calls = tensor_parallel_group(), []

    def multiply(
        x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        assert x.is_contiguous()
        assert weight.t().is_contiguous()
        per_row = (len(x), 1), (1, weight.shape[1])
        assert (x_scale.shape, scale.shape) == (per_row if recipe == "rowwise" else ((), ()))
        return ((x.float() * x_scale) @ (weight.float() * scale)).to(dtype)

    def gather(
        x: torch.Tensor,
        weights: list[torch.Tensor],
        x_scale: torch.Tensor,
        scales: list[torch.Tensor],
        dim: int,
        name: str,
        biases: list[None],
        result_scales: list[None],
        dtypes: list[torch.dtype],
        fast: list[bool],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        assert tp.handle is not None
        assert (dim, name, biases, result_scales, fast) == (0, tp.handle.group_name, [None], [None], [False])
        calls.append("gather")
        whole = collectives.all_gather_first_dim(x.view(torch.uint8), tp).view(x.dtype)
        x_scale = collectives.all_gather_first_dim(x_scale, tp) if x_scale.dim() else x_scale
        return whole, [multiply(whole, weights[0], x_scale, scales[0], dtypes[0])]

    def scatter(
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        scale: torch.Tensor,
        op: str,
        dim: int,
        flat_dim: int,
        name: str,
        shape: list[int],
        *,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert (op, dim, flat_dim, shape) == ("sum", 0, 0, [len(x), weight.shape[1]])
        calls.append("scatter")
        return collectives.reduce_scatter_first_dim(multiply(x, weight, x_scale, scale, out_dtype), tp)

    torch.ops.symm_mem.fused_all_gather_scaled_matmul = gather
    torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter = scatter
    return run_float8_pair(recipe, True, True, overlap=overlap), calls


@pytest.mark.default(2)
@pytest.mark.parametrize(
    ("recipe", "overlap", "calls"),
    [
        # Forward of both layers, and backward of both.
        ("tensorwise", CHUNKED, ["gather", "scatter", "gather", "scatter"]),
        # The row-parallel layer gathers its output gradient in 16 bits.
        ("rowwise", CHUNKED, ["gather", "scatter"]),
        ("delayed", CHUNKED, ["gather", "scatter", "gather", "scatter"]),
        ("tensorwise", LinearOverlap(forward=True), ["gather", "scatter"]),
        ("tensorwise", LinearOverlap(backward=True), ["gather", "scatter"]),
        ("blockwise", CHUNKED, []),
    ],
)
def test_symmetric_memory_in_fp8_computes_the_bits_of_one_rank(
    recipe: str, overlap: LinearOverlap, calls: list[str]
) -> None:
    overlap = replace(overlap, uses_symmetric_memory=True)
    expected = run_float8_pair(recipe, sequence_parallel=False, brings_bias=False)
    results, called = zip(*run_distributed(2, run_float8_pair_in_symmetric_memory, recipe, overlap))
    # Two steps.
    assert called == (calls * 2,) * 2
    for name, values in expected.items():
        assert torch.equal(whole(name, list(results), True), values), name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_weight_gradient_outside_fp8_is_a_product_of_unrounded_values(recipe: str) -> None:
    layer = ColumnShardedLinear(FLOAT8_WIDTH, FLOAT8_INNER, tensor_parallel_group(), bias=False)
    recipe_of_layer = Float8Recipe.of(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe, fp8_wgrad=False))
    layer.quantizers = Fp8Quantizers(recipe_of_layer, None, (0, 0))
    # These values are rounded in fp8, and sums of their products are exact in float32.
    x, grad = (
        40 + whole_numbers(1, FLOAT8_LENGTH, FLOAT8_BATCH, FLOAT8_WIDTH),
        40 + whole_numbers(2, FLOAT8_LENGTH, FLOAT8_BATCH, FLOAT8_INNER),
    )
    layer(x.requires_grad_()).backward(grad)
    expected = grad.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    assert torch.equal(layer.weight.grad.double(), expected)
