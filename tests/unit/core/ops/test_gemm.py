"""Products by whichever kernel is chosen, against float64, and sums into memory that is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.arguments import resolve_arguments
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.host_memory import ReusedMemory
from megatron.core.main_grad import MainGrad, main_grad_of
from megatron.core.ops import gemm
from megatron.core.ops.gemm import (
    add_rows,
    adds_wide_products,
    grouped_gradient,
    grouped_product,
    has_library,
    linear,
    product,
    uses_onednn,
)
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_shards
from megatron.core.transformer.moe.grouped_experts import grouped_linear
from megatron.training.model_setup import describe_rounded_gradients
from tests.unit.config.command_lines import MINIMAL

LIBRARIES = [name for name in ("onednn", "mkl", "mixed") if has_library(name, torch.float32)]


def close(actual: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """The product of two matrices in float32, within what rounding allows: a share of the summed magnitudes.

    A bound by the result would not do, because a sum may cancel to nearly nothing.
    """
    left, right = left.double(), right.double()
    torch.testing.assert_close(
        actual.double(), left @ right, rtol=0.0, atol=1e-6 * float((left.abs() @ right.abs()).max())
    )


def with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors whose product is ``x weight^T + bias``: one more column of ones, and the bias as one more row."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1), torch.cat([weight.t(), bias[None]])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("leading", [(1,), (31,), (32,), (5, 13)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_with_any_strides(leading: tuple[int, ...], has_bias: bool, library: str) -> None:
    x, weight = torch.randn(*leading, 48), torch.randn(70, 48)
    bias = torch.randn(70) if has_bias else None
    rows, columns = (x, weight.t()) if bias is None else with_bias(x, weight, bias)
    close(linear(x, weight, bias, library), rows, columns)
    transposed = torch.randn(48, 70)
    close(linear(x, transposed.t(), library=library), x, transposed)
    strided = torch.randn(*leading, 96)[..., ::2]
    close(linear(strided, weight, library=library), strided, weight.t())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("a", "b"), [(40, 56), (56, 40), (3, 70), (70, 3), (1, 1)])
def test_product_of_a_transposed_matrix(a: int, b: int, library: str) -> None:
    left, right = torch.randn(65, a), torch.randn(65, b)
    result = product(left.t(), right, library)
    assert result.shape == (a, b)
    close(result, left.t(), right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_only_float32_goes_to_onednn_unasked(dtype: torch.dtype) -> None:
    assert not uses_onednn(torch.zeros(64, 8, dtype=dtype))
    assert not uses_onednn(torch.zeros(64, 8, device="meta"))
    assert not uses_onednn(torch.zeros(0, 8))
    assert uses_onednn(torch.zeros(64, 8)) == gemm._HAS_ONEDNN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_library_that_is_asked_for_counts(dtype: torch.dtype) -> None:
    x = torch.zeros(64, 8, dtype=dtype)
    assert not uses_onednn(x, "mkl")
    assert uses_onednn(x, "onednn") == has_library("onednn", dtype)
    assert not has_library("onednn", torch.float16)


@pytest.mark.parametrize("has_operator", [False, True])
@pytest.mark.parametrize("has_instructions", [False, True])
def test_onednn_takes_bfloat16_with_its_operator_and_the_instructions(
    monkeypatch: pytest.MonkeyPatch, has_operator: bool, has_instructions: bool
) -> None:
    monkeypatch.setattr(gemm, "_HAS_ONEDNN", has_operator)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    assert has_library("onednn", torch.bfloat16) == (has_operator and has_instructions)
    assert has_library("onednn", torch.float32) == has_operator
    assert has_library("mixed", torch.bfloat16) == (has_operator and has_instructions)
    assert not has_library("mixed", torch.float64)


def test_bfloat16_products_of_both_libraries() -> None:
    x, weight = torch.randn(65, 48).bfloat16(), torch.randn(70, 48).bfloat16()
    for library in ("onednn", "mkl"):
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(linear(x, weight, library=library).double(), expected, rtol=0.0, atol=0.15)
        torch.testing.assert_close(product(x, weight.t(), library).double(), expected, rtol=0.0, atol=0.15)


def test_float64_keeps_its_precision() -> None:
    x, weight = torch.randn(64, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[37, 0, 100, 1, 83], [5, 75, 33, 0, 0], [0, 0, 130, 33, 41], [33]])
def test_a_group_has_its_own_rows_alone(counts: list[int], dtype: torch.dtype, library: str) -> None:
    """Rows are rounded up: the groups before and behind one are NaN here, and nothing of them may come through."""
    x, grad = torch.randn(sum(counts), 40).to(dtype), torch.randn(sum(counts), 48).to(dtype)
    weight, tolerance = torch.randn(len(counts), 48, 40).to(dtype), 1e-5 if dtype is torch.float32 else 1e-2
    for number, (start, count) in enumerate(zip([0, *itertools.accumulate(counts)], counts)):
        rows = slice(start, start + count)
        alone, alone_grad = torch.full_like(x, torch.nan), torch.full_like(grad, torch.nan)
        alone[rows], alone_grad[rows] = x[rows], grad[rows]
        for left, right in ((alone, weight), (alone_grad, weight.transpose(1, 2))):
            result = grouped_product(left, right, counts, library)
            expected = left[rows].double() @ right[number].double().t()
            bound = tolerance * (left[rows].double().abs() @ right[number].double().abs().t())
            assert ((result[rows].double() - expected).abs() <= bound).all()
            assert result.isnan().sum() == result[:start].numel() + result[rows.stop :].numel()
        gradient = grouped_gradient(alone_grad, alone, counts, library)[number].double()
        bound = tolerance * (grad[rows].double().abs().t() @ x[rows].double().abs())
        assert ((gradient - grad[rows].double().t() @ x[rows].double()).abs() <= bound).all()


@pytest.mark.skipif("onednn" not in LIBRARIES, reason="this torch has no oneDNN")
def test_groups_of_any_size_have_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else oneDNN would write a program for each of them."""
    multiplied: set[int] = set()
    summed: set[int] = set()

    def note_product(left: torch.Tensor, right: torch.Tensor, library: str) -> torch.Tensor:
        summed.add(len(right))
        return left.new_zeros(len(left), right.shape[1])

    monkeypatch.setattr(gemm, "linear_into", lambda output, x, *_, **__: multiplied.add(len(x)))
    monkeypatch.setattr(gemm, "product", note_product)
    for count in range(512, 1025):
        rows = torch.empty(2 * count, 40)
        grouped_product(rows, torch.empty(2, 8, 40), [count, count], "onednn")
        grouped_gradient(rows, rows, [count, count], "onednn")
    assert multiplied == summed == {512 + 32 * step for step in range(17)}


@pytest.mark.parametrize(("count", "rounded"), [(0, 0), (1, 1), (31, 31), (32, 32), (33, 34), (63, 64), (65, 68)])
def test_small_groups_are_rounded_little_or_not_at_all(count: int, rounded: int) -> None:
    assert len(gemm._lengthened(torch.ones(count, 3))) == rounded


def test_the_ends_of_groups_are_made_once_of_the_numbers_on_the_device_where_they_are() -> None:
    cpu = torch.device("cpu")
    counts = gemm.row_counts([2, 0, 5])
    assert counts.ends(cpu).tolist() == [2, 2, 7]
    assert counts.ends(cpu).dtype == torch.int32
    assert counts.ends(cpu) is counts.ends(cpu)
    assert gemm.row_counts(counts) is counts
    # The numbers differ here to show which of them count.
    assert gemm.RowCounts([2, 0], torch.tensor([3, 4])).ends(cpu).tolist() == [3, 7]


@pytest.mark.parametrize("is_empty", [True, False])
def test_gradients_of_groups_are_added_in_their_own_dtype(is_empty: bool) -> None:
    counts = [33, 0, 70]
    grad, x = torch.randn(103, 48).bfloat16(), torch.randn(103, 40).bfloat16()
    start = torch.full((3, 48, 40), 2.0, dtype=torch.bfloat16)
    main_grad = MainGrad(start.clone())
    main_grad.is_empty = is_empty
    main_grad.add_grouped_matmul(grad, x, counts, "mkl")
    expected = grouped_gradient(grad, x, counts, "mkl") + (0 if is_empty else start)
    torch.testing.assert_close(main_grad.tensor, expected, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize(
    ("capability", "counts", "width", "expected"),
    [
        pytest.param((9, 0), [16, 0, 33], 64, True, id="hopper"),
        pytest.param(None, [16, 0, 33], 64, True, id="a device that does not say what it is"),
        pytest.param((10, 3), [16, 0, 33], 64, True, id="blackwell"),
        pytest.param((9, 0), [16, 0, 33], 60, False, id="sizes that are not aligned"),
        pytest.param((9, 0), [0, 0, 0], 64, False, id="no rows"),
        # torch has no kernel there: it would read each group's end from the device, in every product.
        pytest.param((8, 0), [16, 0, 33], 64, False, id="ampere"),
        pytest.param((12, 0), [16, 0, 33], 64, False, id="blackwell of workstations"),
    ],
)
def test_groups_are_one_launch_where_torch_has_a_kernel_for_them(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    counts: list[int],
    width: int,
    expected: bool,
) -> None:
    monkeypatch.setattr(gemm, "compute_capability", lambda device: capability)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, grad = (torch.empty(sum(counts), size, dtype=torch.bfloat16, device="cuda") for size in (width, 32))
        weight = torch.empty(3, 32, width, dtype=torch.bfloat16, device="cuda")
        pairs = ((x, weight), (grad, weight.transpose(1, 2)), (grad, x))
        assert [gemm._is_one_launch(*pair) for pair in pairs] == [expected] * 3
        assert not any(gemm._is_one_launch(*(each.float() for each in pair)) for pair in pairs)
        if expected:
            # Torch's own rules for what it is given, those for distances in memory among them.
            assert grouped_product(*pairs[0], counts).shape == (sum(counts), 32)
            assert grouped_product(*pairs[1], counts).shape == (sum(counts), width)
            assert grouped_gradient(*pairs[2], counts).shape == (3, 32, width)


def blackwell_grouped_mm(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Stand in for a kernel that writes nothing for groups without rows: there is NaN in the memory of its result."""
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends))
    if left.dim() == right.dim() == 2:
        result = torch.full((len(ends), left.shape[0], right.shape[1]), torch.nan, dtype=left.dtype)
        for of_group, (start, end) in zip(result, groups):
            if end > start:
                of_group.copy_(left[:, start:end] @ right[start:end])
        return result
    result = torch.full((left.shape[0], right.shape[2]), torch.nan, dtype=left.dtype)
    for of_group, (start, end) in zip(right, groups):
        if end > start:
            result[start:end] = left[start:end] @ of_group
    return result


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 8], [8, 0, 0], [0, 0, 0]])
def test_a_group_without_rows_has_a_gradient_of_zero_whatever_the_kernel_leaves(
    monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(3)
    x, grad = (torch.randn(sum(counts), width, generator=generator).bfloat16() for width in (16, 24))
    weight = torch.randn(3, 24, 16, generator=generator).bfloat16().requires_grad_()
    x.requires_grad_()

    def differentiated() -> list[torch.Tensor]:
        output = grouped_linear(x, weight, None, counts)
        return [output, *torch.autograd.grad(output, (x, weight), grad), grouped_gradient(grad, x.detach(), counts)]

    expected = differentiated()
    monkeypatch.setattr(gemm, "_is_one_launch", lambda left, right: True)
    monkeypatch.setattr(torch, "_grouped_mm", blackwell_grouped_mm)
    for actual, wanted in zip(differentiated(), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2**-6, atol=2**-6)
    gradient = grouped_gradient(grad, x.detach(), counts)
    assert all(count or not of_group.any() for count, of_group in zip(counts, gradient))


class RecordedMemory(ReusedMemory):
    """Record what is lent."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[tuple[tuple[int, ...], torch.dtype]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.lent.append((tuple(shape), dtype))
        return super().empty(shape, dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "library", "is_lent"),
    [
        (torch.float32, "mkl", True),
        (torch.float32, "onednn", not has_library("onednn", torch.float32)),
        (torch.bfloat16, "mkl", True),
        (torch.bfloat16, "onednn", True),
    ],
)
def test_the_product_lies_in_the_memory_unless_the_operator_cannot_write_there(
    dtype: torch.dtype, library: str, is_lent: bool, has_bias: bool
) -> None:
    memory = RecordedMemory()
    bias = torch.randn(5).to(dtype) if has_bias else None
    x, weight = torch.randn(8, 8, 16).to(dtype), torch.randn(5, 16).to(dtype)
    with torch.no_grad():
        result = linear(x, weight, bias, library, memory)
    assert memory.lent == ([((8, 8, 5), dtype)] if is_lent else [])
    torch.testing.assert_close(result, torch.nn.functional.linear(x, weight, bias))


ROWS, WIDTH, LENGTH = 5, 3, 7


class Recorder(TorchDispatchMode):
    """Name the operations; products into wider sums, which a build for CPU cannot even pretend, are left out."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten."))
        if self.names[-1].endswith("mm.dtype_out"):
            if self.refuses:
                raise RuntimeError("self and mat2 must have the same dtype")
            total, *_ = args if len(args) == 4 else (kwargs["out"],)
            assert total.dtype is kwargs["out"].dtype is args[-1] is torch.float32
            assert args[-2].dtype is args[-3].dtype is torch.bfloat16
            assert total is kwargs["out"]
            return kwargs["out"]
        assert self.names[-1] != "index_put_.default" or args[3], "equal indices must add up"
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended_cuda(refuses: bool = False) -> Iterator[Recorder]:
    with FakeTensorMode(), Recorder(refuses) as recorder:
        yield recorder


def weight_gradient(fuses: bool) -> list[str]:
    """Return what two contributions to a bf16 weight's float32 gradient run, on meta tensors."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta"))
    attach_spec(model.weight, ParamSpec("weight", (ROWS, WIDTH), full_shards((ROWS, WIDTH))))
    config = DistributedDataParallelConfig(gradient_accumulation_fusion=fuses)
    DistributedDataParallel(model, config, describe_parallel_state(0, 1))
    main_grad = main_grad_of(model.weight)
    assert main_grad is not None
    left = torch.empty(ROWS, LENGTH, dtype=torch.bfloat16, device="meta")
    right = torch.empty(LENGTH, WIDTH, dtype=torch.bfloat16, device="meta")
    with Recorder(refuses=False) as recorder:
        main_grad.add_matmul(left, right)
        main_grad.add_matmul(left, right)
    return [name for name in recorder.names if name != "detach.default"]


def test_a_product_is_added_to_wider_sums_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, torch.dtype, torch.device]] = []

    def can(*question: Any) -> bool:
        asked.append(question)
        return True

    monkeypatch.setattr("megatron.core.distributed.param_and_grad_buffer.adds_wide_products", can)
    assert weight_gradient(fuses=True) == ["mm.dtype_out", "addmm.dtype_out"]
    assert asked == [(torch.bfloat16, torch.float32, torch.device("meta"))]


def test_it_is_rounded_where_the_device_or_the_user_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = ["mm.default", "copy_.default", "mm.default", "add_.Tensor"]
    assert weight_gradient(fuses=True) == rounded
    monkeypatch.setattr("megatron.core.distributed.param_and_grad_buffer.adds_wide_products", lambda *_: True)
    assert weight_gradient(fuses=False) == rounded


def test_a_release_that_refuses_is_found_out() -> None:
    with pretended_cuda(refuses=True):
        assert not adds_wide_products(torch.bfloat16, torch.float32, torch.device("cuda"))


@pytest.mark.parametrize(
    ("flags", "refuses", "says"),
    [
        ("--bf16", True, True),
        ("--bf16", False, False),
        ("--bf16 --no-gradient-accumulation-fusion", True, False),
        ("--bf16 --grad-reduce-in-bf16", True, False),
        ("", True, False),
    ],
)
def test_a_run_says_that_gradients_are_rounded_against_its_flags(flags: str, refuses: bool, says: bool) -> None:
    config = resolve_arguments([*MINIMAL, *flags.split()], 1).config
    with pretended_cuda(refuses=refuses):
        line = describe_rounded_gradients(config, torch.device("cuda"))
    assert (line is not None) is says
    if line is not None:
        assert line.startswith("WARNING: the gradients of bfloat16 weights are rounded to bfloat16 before ")
    assert describe_rounded_gradients(config, torch.device("cpu")) is None


def test_only_half_precision_on_cuda_is_asked_about() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    with pretended_cuda() as recorder:
        assert adds_wide_products(torch.bfloat16, torch.float32, cuda)
        assert "addmm.dtype_out" in recorder.names, "a release may write wide products and not add them"
        recorder.names.clear()
        assert not adds_wide_products(torch.float32, torch.float32, cuda)
        assert not adds_wide_products(torch.bfloat16, torch.bfloat16, cuda)
        assert not adds_wide_products(torch.bfloat16, torch.float32, cpu)
        assert recorder.names == []


def test_rows_are_added_in_one_order_on_cuda() -> None:
    with pretended_cuda() as recorder:
        total, rows = torch.zeros(ROWS, WIDTH, device="cuda"), torch.zeros(LENGTH, WIDTH, device="cuda")
        add_rows(total, torch.zeros(LENGTH, dtype=torch.int64, device="cuda"), rows)
    assert "index_put_.default" in recorder.names
    assert not any(name.startswith(("index_add", "scatter_add")) for name in recorder.names)


def test_rows_are_added_where_they_belong() -> None:
    indices = torch.tensor([4, 1, 4, 0, 4, 2, 1])
    rows = torch.randn(LENGTH, WIDTH, dtype=torch.bfloat16)
    total = torch.ones(ROWS, WIDTH)
    add_rows(total, indices, rows)
    expected = torch.ones(ROWS, WIDTH)
    for index, row in zip(indices.tolist(), rows.float()):
        expected[index] += row
    torch.testing.assert_close(total, expected)
