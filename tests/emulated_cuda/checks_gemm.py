"""Checks of matmuls for which only CUDA has kernels: their values, and each rule of ``gemm_rules.cpp``.

They run in processes whose torch has emulated devices, of several GPU types: see ``tests/unit/emulated_cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from megatron.core.main_grad import MainGrad
from megatron.core.ops.fp8_groups import PaddedGroups
from megatron.core.ops.fp8_quantizers import Float8Recipe, Fp8Quantizers
from megatron.core.ops.fp8_tensor import (
    E4M3,
    E5M2,
    ROWS,
    SEGMENTS_OF_32,
    SEGMENTS_OF_128,
    SQUARES_OF_128,
    WHOLE,
    Blocks,
    device_product,
    quantize,
)
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.ops.gemm import RowEnds
from megatron.core.ops.token_rows import RowOrder
from megatron.core.optimizer.muon import orthogonalize
from megatron.core.parallel_config import Fp8Config
from megatron.core.tensor_parallel.float8_linear import _add_fp8
from megatron.core.transformer.moe.expert_dispatch import run_in_order, sort_choices
from megatron.core.transformer.moe.fp8_experts import ExpertWeights, float8_experts
from megatron.core.transformer.moe.grouped_experts import float8_grouped_linear
from tests.emulated_cuda.activation import load_bindings

GPU = torch.cuda.get_device_capability()[0]
IS_HOPPER, IS_BLACKWELL = GPU == 9, GPU == 10
HAS_FP8 = GPU >= 9
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="an A100 has no fp8")
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="a rule of Hopper")
NOT_SUPPORTED = "CUBLAS_STATUS_NOT_SUPPORTED"


@pytest.fixture(autouse=True)
def is_without_reports() -> Iterator[None]:
    """Let no check leave a report behind."""
    yield
    torch.cuda.synchronize()
    assert load_bindings().reports() == []


def fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").to(dtype)


def scale(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


# ---- 16-bit operands with float32 sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bit_products_are_not_rounded(dtype: torch.dtype) -> None:
    left, right = torch.randn(8, 32, device="cuda").to(dtype), torch.randn(32, 16, device="cuda").to(dtype)
    total = torch.ones(8, 16, device="cuda")
    torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    expected = left.cpu().double() @ right.cpu().double()
    torch.testing.assert_close(total.cpu().double(), expected + 1, rtol=1e-6, atol=1e-5)
    total.fill_(float("nan"))
    torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=total)
    torch.testing.assert_close(total.cpu().double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.mm(left, right, out_dtype=torch.float32).dtype is torch.float32


@pytest.mark.parametrize(
    ("left", "right", "out", "message"),
    [
        (torch.bfloat16, torch.float16, torch.float32, "must have the same dtype|input dtypes must be the same"),
        (torch.float32, torch.float32, torch.bfloat16, "out_dtype must be the same as input dtype or fp32"),
        (torch.bfloat16, torch.bfloat16, torch.float16, "out_dtype must be the same as input dtype or fp32"),
    ],
)
def test_dtypes_of_products_with_an_output_dtype(
    left: torch.dtype, right: torch.dtype, out: torch.dtype, message: str
) -> None:
    a, b = torch.ones(8, 8, device="cuda", dtype=left), torch.ones(8, 8, device="cuda", dtype=right)
    total = torch.zeros(8, 8, device="cuda", dtype=out)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.aten.mm.dtype_out(a, b, out, out=total)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.aten.addmm.dtype_out(total, a, b, out, out=total)


def test_the_addend_has_the_dtype_of_the_sum_or_of_the_operands() -> None:
    a = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros(8, 8, device="cuda")
    with pytest.raises(RuntimeError, match="self dtype must match either out_dtype or mat1 dtype"):
        torch.ops.aten.addmm.dtype_out(total.half(), a, a, torch.float32, out=total)
    with pytest.raises(RuntimeError, match="out_dtype must be the same as the dtype of the provided out tensor"):
        torch.ops.aten.addmm.dtype_out(total, a, a, torch.float32, out=total.bfloat16())
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ops.aten.mm.dtype_out(a, a.cpu(), torch.float32, out=total)


# ---- fp8

RECIPES: dict[str, tuple[Blocks, Blocks, tuple[int, ...]]] = {
    "tensorwise": (WHOLE, WHOLE, (9, 10)),
    "rowwise": (ROWS, ROWS, (9, 10)),
    "blockwise": (SEGMENTS_OF_128, SQUARES_OF_128, (9,)),
    "blockwise weight gradient": (SEGMENTS_OF_128, SEGMENTS_OF_128, (9,)),
    "mxfp8": (SEGMENTS_OF_32, SEGMENTS_OF_32, (10,)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [(128, 256, 128), (48, 640, 256)])
def test_fp8_recipes_on_the_gpus_that_have_them(recipe: str, sizes: tuple[int, int, int]) -> None:
    left_blocks, right_blocks, gpus = RECIPES[recipe]
    m, k, n = sizes
    left = quantize(torch.randn(m, k, device="cuda"), E4M3, left_blocks)
    right = quantize(torch.randn(n, k, device="cuda"), E4M3, right_blocks)
    if GPU not in gpus:
        with pytest.raises(RuntimeError, match=f"only supported|{NOT_SUPPORTED}"):
            device_product(left, right, torch.bfloat16)
        return
    result = device_product(left, right, torch.bfloat16)
    expected = left.values().cpu().double() @ right.values().cpu().double().t()
    torch.testing.assert_close(result.cpu().double(), expected, rtol=2**-7, atol=1e-2)


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_of_the_given_dtype_is_written_by_the_gemm(dtype: torch.dtype) -> None:
    left, right = (quantize(torch.randn(rows, 64, device="cuda"), E4M3, WHOLE) for rows in (48, 32))
    out = torch.full((48, 32), torch.nan, device="cuda", dtype=dtype)
    assert device_product(left, right, dtype, out=out) is out
    assert torch.equal(out, device_product(left, right, dtype))


@needs_fp8
@pytest.mark.parametrize(("recipe", "dtype"), [("tensorwise", torch.float32), ("rowwise", torch.bfloat16)])
def test_the_first_weight_gradient_is_written_by_the_gemm_and_the_next_is_added(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor | None] = []
    multiply = torch._scaled_mm

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        given.append(options.get("out"))
        return multiply(*args, **options)

    blocks = RECIPES[recipe][0]
    grad, x = (quantize(torch.randn(rows, 64, device="cuda"), E4M3, blocks) for rows in (48, 32))
    assert grad.has_device_product(x)
    main_grad = MainGrad(torch.full((48, 32), torch.nan, device="cuda", dtype=dtype))
    monkeypatch.setattr(torch, "_scaled_mm", watched)
    for times in (1, 2):
        assert _add_fp8(main_grad, grad, x, torch.bfloat16, "auto", delays=False) is None
        expected = times * (grad.values().cpu().double() @ x.values().cpu().double().t())
        torch.testing.assert_close(main_grad.tensor.cpu().double(), expected, rtol=2**-6, atol=1e-2)
    assert [out is main_grad.tensor for out in given] == [True, False]
    assert given[1] is None


@needs_fp8
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)])
def test_two_fp8_formats_in_one_product(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = fp8(32, 64, dtypes[0]), fp8(48, 64, dtypes[1])
    result = torch._scaled_mm(a, b.t(), scale(), scale(), out_dtype=torch.float32)
    assert result.shape == (32, 48)
    assert result.isfinite().all()


def call(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: Any) -> torch.Tensor:
    scale_a, scale_b = scales or (scale(), scale())
    return torch._scaled_mm(a, b, scale_a, scale_b, **({"out_dtype": torch.bfloat16} | options))


Fault = tuple[Callable[[], object], str]
FAULTS: dict[str, Fault] = {
    "two matrices of e5m2": (lambda: call(fp8(32, 32, E5M2), fp8(32, 32, E5M2).t()), "two Float8_e5m2 matrices"),
    "16-bit operand": (lambda: call(fp8(32, 32).bfloat16(), fp8(32, 32).t()), "Invalid scaling|to be Float8"),
    "inner size": (lambda: call(fp8(32, 24), fp8(32, 24).t()), "trailing dimension of mat1 to be divisible by 16"),
    "outer size": (lambda: call(fp8(32, 32), fp8(24, 32).t()), r"mat2 shape \(32x24\) must be divisible by 16"),
    "sizes": (lambda: call(fp8(32, 32), fp8(32, 48).t()), "shapes cannot be multiplied"),
    "place": (
        lambda: call(fp8(1, 32 * 32 + 8).view(-1)[8:].view(32, 32), fp8(32, 32).t()),
        "aligned to 16 bytes",
    ),
    "number of scales": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), scale(31, 1), scale(1, 32)),
        "Invalid scaling configuration",
    ),
    "strides of scales of rows": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), scale(32, 2)[:, :1], scale(1, 32)),
        "Invalid scaling configuration",
    ),
    "dtype of scales": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), scale().double(), scale()),
        "Invalid scaling configuration",
    ),
    "scales of the host": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), scale().cpu(), scale()),
        "Expected all tensors to be on the same device",
    ),
    "order of segments' scales": (
        lambda: call(fp8(32, 256), fp8(32, 256).t(), scale(32, 2), scale(2, 32)),
        "Invalid scaling configuration",
    ),
    "bias of another size": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), bias=torch.ones(16, device="cuda").bfloat16()),
        "Bias must be size 32 but got 16",
    ),
    "bias with a float32 result": (
        lambda: call(
            fp8(32, 32), fp8(32, 32).t(), bias=torch.ones(32, device="cuda").bfloat16(), out_dtype=torch.float32
        ),
        "Bias is not supported when out_dtype is set to Float32",
    ),
    "dtype of the bias": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), bias=torch.ones(32, device="cuda").half()),
        "Bias must be BFloat16 to compute",
    ),
    "address of a scale": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), scale(2)[1:].view(1, 1), scale(1, 1)),
        "scales of fp8 matrices are aligned",
    ),
    "fp8 result of scaled rows": (
        lambda: call(fp8(32, 32), fp8(32, 32).t(), scale(32, 1), scale(1, 32), out_dtype=E4M3),
        f"{NOT_SUPPORTED}|Only bf16, fp16, and fp32",
    ),
}


@needs_fp8
@pytest.mark.parametrize("fault", FAULTS)
def test_rules_of_scaled_mm(fault: str) -> None:
    run, message = FAULTS[fault]
    with pytest.raises((RuntimeError, ValueError), match=message):
        run()


@needs_fp8
def test_layouts_of_fp8_operands() -> None:
    a, b = fp8(32, 64), fp8(64, 32)
    if IS_HOPPER:
        with pytest.raises(RuntimeError, match="Only multiplication of row-major and column-major matrices"):
            call(a, b)
        with pytest.raises(RuntimeError, match="Only multiplication of row-major and column-major matrices"):
            call(fp8(64, 32).t(), b.t().contiguous().t())
    else:
        assert call(a, b).shape == (32, 32)
    assert call(a, b.t().contiguous().t()).shape == (32, 32)


def test_a_gpu_without_fp8() -> None:
    if HAS_FP8:
        assert call(fp8(32, 32), fp8(32, 32).t()).shape == (32, 32)
    else:
        with pytest.raises(RuntimeError, match=r"compute capability >= 9\.0 or 8\.9"):
            call(fp8(32, 32), fp8(32, 32).t())


@needs_hopper
def test_named_scales_of_squares_lie_in_rows_of_four() -> None:
    a, b = fp8(128, 640), fp8(256, 640)
    segments, squares = scale(5, 128).t(), scale(2, 8)

    def multiply(scale_b: torch.Tensor, kind: ScalingType = ScalingType.BlockWise128x128) -> torch.Tensor:
        return F.scaled_mm(
            *(a, b.t(), segments, ScalingType.BlockWise1x128, scale_b, kind), output_dtype=torch.bfloat16
        )

    assert multiply(squares.t()).isfinite().all()
    with pytest.raises(ValueError, match="scale_b must have shape 8 x 2 Float elements"):
        multiply(scale(2, 5).t())
    with pytest.raises(ValueError, match=r"scale_b must have strides \(1, 8\)"):
        multiply(scale(8, 2))
    with pytest.raises(ValueError, match="Invalid scaling configuration"):
        multiply(squares.t(), ScalingType.RowWise)
    # torch's other function takes rows of five, of which cuBLAS reads other memory (pytorch/pytorch #166752).
    result = torch._scaled_mm(a, b.t(), segments, scale(2, 5).t(), out_dtype=torch.bfloat16)
    assert result.isnan().all()


@pytest.mark.skipif(not IS_BLACKWELL, reason="mxfp8 is of Blackwell")
def test_scales_of_mxfp8_are_named_as_swizzled() -> None:
    a, b = fp8(128, 128), fp8(128, 128)
    scales = torch.ones(512, device="cuda").to(torch.float8_e8m0fnu)

    def multiply(scale_a: torch.Tensor, swizzle: SwizzleType) -> torch.Tensor:
        kind = ScalingType.BlockWise1x32
        return F.scaled_mm(
            *(a, b.t(), scale_a, kind, scales, kind, swizzle, SwizzleType.SWIZZLE_32_4_4), output_dtype=torch.bfloat16
        )

    expected = a.float() @ b.float().t()
    torch.testing.assert_close(multiply(scales, SwizzleType.SWIZZLE_32_4_4), expected.bfloat16())
    with pytest.raises(ValueError, match="scale_a must be swizzled to SWIZZLE_32_4_4 format"):
        multiply(scales, SwizzleType.NO_SWIZZLE)
    with pytest.raises(ValueError, match="scale_a should have 512 elements, got: 256"):
        multiply(scales[:256], SwizzleType.SWIZZLE_32_4_4)


# ---- groups


def ends(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products(dtype: torch.dtype) -> None:
    x = torch.randn(20, 16, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(3, 8, 16, device="cuda").to(dtype).requires_grad_()
    result = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends(3, 12, 5))
    (result.float() * torch.ones(20, 8, device="cuda")).sum().backward()
    assert weight.grad is not None
    start = 0
    for group, count in enumerate((3, 12, 5)):
        rows = x.detach()[start : start + count].cpu().float()
        expected = rows @ weight.detach()[group].cpu().float().t()
        torch.testing.assert_close(result[start : start + count].cpu().float(), expected, rtol=2**-7, atol=1e-4)
        of_weight = torch.ones(8, count) @ rows
        torch.testing.assert_close(weight.grad[group].cpu().float(), of_weight, rtol=2**-7, atol=1e-4)
        start += count


def test_groups_without_rows_are_left_unwritten() -> None:
    grad, x = torch.ones(24, 8, device="cuda").bfloat16(), torch.ones(24, 16, device="cuda").bfloat16()
    result = torch._grouped_mm(grad.t(), x, offs=ends(8, 0, 16))
    assert result[0].eq(8).all()
    assert result[2].eq(16).all()
    # An A100 has no such kernel: torch multiplies group by group there.
    assert result[1].isnan().all() if GPU >= 9 else result[1].eq(0).all()
    # Rows past the last group are nobody's.
    weight = torch.ones(2, 16, 8, device="cuda").bfloat16()
    result = torch._grouped_mm(x, weight, offs=ends(8, 8))
    assert result[:16].eq(16).all()
    assert result[16:].isnan().all()


def test_only_the_fallback_reads_the_ends_of_groups_on_the_host() -> None:
    x, weight = torch.ones(16, 16, device="cuda").bfloat16(), torch.ones(2, 16, 8, device="cuda").bfloat16()
    offs = ends(8, 8)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    if GPU >= 9:
        with torch.cuda.graph(graph):
            result = torch._grouped_mm(x, weight, offs=offs)
        graph.replay()
        assert result.eq(16).all()
        return
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"), torch.cuda.graph(graph):
        torch._grouped_mm(x, weight, offs=offs)


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, **options: Any) -> torch.Tensor:
    return torch._grouped_mm(a, b, offs=offs, **options)


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda", dtype=torch.bfloat16)


GROUP_FAULTS: dict[str, Fault] = {
    "dtype of the ends": (lambda: grouped(half(16, 16), half(2, 16, 8), ends(8, 8).long()), "Offsets have to be int32"),
    "ends of the host": (
        lambda: grouped(half(16, 16), half(2, 16, 8), ends(8, 8).cpu()),
        "Expected all tensors to be on the same device",
    ),
    "number of ends": (
        lambda: grouped(half(16, 16), half(2, 16, 8), ends(8, 4, 4)),
        "matrix batch sizes have to match",
    ),
    "no ends": (lambda: grouped(half(16, 16), half(2, 16, 8), None), "Have to provide offsets if there is a 2d matrix"),
    "strides": (
        lambda: grouped(half(16, 20)[:, :16], half(2, 16, 8), ends(8, 8)),
        "strides should be multiple of 16 bytes",
    ),
    "place": (
        lambda: grouped(half(16 * 16 + 4)[4:].view(16, 16), half(2, 16, 8), ends(8, 8)),
        "expected data_ptr to be aligned to 16 bytes",
    ),
    "layout": (lambda: grouped(half(16, 32)[:, ::2], half(2, 16, 8), ends(8, 8)), "Invalid strides/sizes"),
    "dtype": (lambda: grouped(half(16, 16).double(), half(2, 16, 8), ends(8, 8)), "Float32, BFloat16 or Float16"),
    "inner size": (
        lambda: grouped(half(16, 24), half(2, 16, 8), ends(8, 8)),
        "contraction dimension of mat_a and mat_b must match",
    ),
    "bias": (lambda: grouped(half(16, 16), half(2, 16, 8), ends(8, 8), bias=half(8)), "Bias not supported yet"),
    "dtype of the result": (
        lambda: grouped(half(16, 16), half(2, 16, 8), ends(8, 8), out_dtype=torch.float32),
        "Grouped gemm output dtype must match",
    ),
    "ends past the rows": (lambda: grouped(half(16, 16), half(2, 16, 8), ends(8, 16)), "do not ascend, or pass"),
}


@pytest.mark.parametrize("fault", GROUP_FAULTS)
def test_rules_of_grouped_mm(fault: str) -> None:
    run, message = GROUP_FAULTS[fault]
    with pytest.raises((RuntimeError, ValueError), match=message):
        run()


def test_scaled_groups() -> None:
    x, weight = fp8(32, 32), fp8(3 * 16, 32).view(3, 16, 32).transpose(1, 2)
    scale_x, scale_weight = scale(32), scale(3, 16)
    offs = ends(8, 16, 8)
    if GPU != 9:
        with pytest.raises(
            (ValueError, RuntimeError), match=r"_scaled_grouped_mm is only supported|with row scales for"
        ):
            torch._scaled_grouped_mm(x, weight, scale_x, scale_weight, offs)
        return
    result = torch._scaled_grouped_mm(x, weight, scale_x, scale_weight, offs)
    expected = (x.float()[8:24] * scale_x[8:24, None]) @ (weight[1].float() * scale_weight[1])
    torch.testing.assert_close(result[8:24], expected.bfloat16(), rtol=2**-7, atol=1e-2)
    with pytest.raises(ValueError, match="Expected mat2 to be transposed"):
        torch._scaled_grouped_mm(x, weight.contiguous(), scale_x, scale_weight, offs)
    with pytest.raises(RuntimeError, match="scale must have the same length as mat for arg 0"):
        torch._scaled_grouped_mm(x, weight, scale(31), scale_weight, offs)
    with pytest.raises(ValueError, match="Expected mat_a to be Float8_e4m3 matrix"):
        torch._scaled_grouped_mm(x.to(E5M2), weight, scale_x, scale_weight, offs)


@pytest.mark.skipif(GPU != 9, reason="torch has this kernel for SM90 only")
def test_experts_that_are_multiplied_at_once_are_those_one_by_one() -> None:
    counts = (5, 0, 33, 16)
    recipe = Float8Recipe.of(Fp8Config(fp8_format="e4m3", fp8_recipe="rowwise"))
    quantizers, activation = [Fp8Quantizers(recipe) for _ in counts], partial(gated_activation, kind="swiglu")
    results = []
    for is_at_once in (True, False):
        torch.manual_seed(5)
        x = torch.randn(sum(counts), 64, device="cuda").bfloat16().requires_grad_()
        first = (torch.randn(4, 32, 64, device="cuda") / 8).bfloat16().requires_grad_()
        second = (torch.randn(4, 48, 16, device="cuda") / 4).bfloat16().requires_grad_()
        if is_at_once:
            ends = RowEnds(torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32))
            groups = PaddedGroups.of(ends, len(x), x.device)
            linears = [ExpertWeights(weight, quantizers[0]) for weight in (first, second)]
            output = float8_experts(x, *linears, activation, groups, None, late=None)
        else:
            options = {"adds_bias": False, "library": "auto"}
            inner = float8_grouped_linear(x, first, None, counts, quantizers, **options)
            output = float8_grouped_linear(activation(inner), second, None, counts, quantizers, **options)
        output.backward(torch.randn(output.shape, device="cuda").bfloat16())
        results.append((output, x.grad, first.grad, second.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-2)
    assert results[0][2][1].eq(0).all()
    assert results[0][3][1].eq(0).all()


@pytest.mark.skipif(GPU != 9, reason="torch has this kernel for SM90 only")
@pytest.mark.parametrize("kind", ["combined", "permuted", "one expert"])
def test_experts_read_tokens_in_the_order_of_their_rows(kind: str) -> None:
    """The experts' layers without copies of the rows equal those of copies, bit for bit."""
    num_experts, per_token = (1, 1) if kind == "one expert" else (4, 2 if kind == "combined" else 1)
    recipe = Float8Recipe.of(Fp8Config(fp8_format="e4m3", fp8_recipe="rowwise"))
    torch.manual_seed(7)
    tokens = torch.randn(37, 64, device="cuda").bfloat16()
    # The last expert has no rows, and choices of one more are dropped.
    chosen = torch.randint(0, max(1, num_experts - 1), (37, per_token), device="cuda")
    if kind == "combined":
        chosen[5, 1] = num_experts
    ordered = sort_choices(chosen, num_experts)
    order = None if kind == "one expert" else ordered.row_order(may_drop=kind == "combined")
    given = torch.rand(37, per_token, device="cuda") if kind == "combined" else None
    first, second = torch.randn(num_experts, 32, 64, device="cuda"), torch.randn(num_experts, 64, 16, device="cuda")
    out_grad = torch.randn(37, 64, device="cuda").bfloat16()
    results = []
    for copies in (True, False):
        x = tokens.clone().requires_grad_()
        weights = None if given is None else given.clone().requires_grad_()
        linears = [(each / 8).bfloat16().requires_grad_() for each in (first, second)]

        def layers(rows: torch.Tensor, groups: PaddedGroups, weights: torch.Tensor | None = None) -> torch.Tensor:
            experts = [ExpertWeights(linear, Fp8Quantizers(recipe)) for linear in linears]  # noqa: B023
            activation = partial(gated_activation, kind="swiglu")
            return float8_experts(rows, *experts, activation, groups, weights, late=None)

        num_rows = 37 * per_token
        if copies:
            # An order of the rows themselves, which one group does not get otherwise.
            rows = torch.arange(num_rows, device="cuda")
            groups = PaddedGroups.of(ordered.row_ends(), num_rows, x.device, RowOrder(rows, rows.unsqueeze(1)))
            assert not groups.pads_end
            output = run_in_order(partial(layers, groups=groups), x, order, weights)
        else:
            groups = PaddedGroups.of(ordered.row_ends(), num_rows, x.device, order)
            assert groups.pads_end == (kind == "one expert")
            output = layers(x, groups, weights)
        output.backward(out_grad)
        results.append([output, x.grad, *(each.grad for each in linears), *([] if weights is None else [weights.grad])])
    for mine, theirs in zip(*results, strict=True):
        assert mine.float().abs().sum() > 0
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_of_muon_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    for shape in ((96, 96), (192, 64), (64, 192)):
        matrix = torch.randn(shape)
        made, wanted = (orthogonalize(each, 5, "quintic", dtype) for each in (matrix.cuda(), matrix))
        assert torch.equal(made.cpu(), wanted)
