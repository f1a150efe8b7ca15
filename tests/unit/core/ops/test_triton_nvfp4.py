"""The Triton kernels of NVFP4 against torch's operations, interpreted on the CPU, and compiled for Blackwell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.distributed import run_distributed
from tests.unit.core.ops.interpreted import interpret, needs_triton

pytestmark = needs_triton


def assert_same(found: Any, expected: Any) -> None:
    """Compare codes, scales of segments in two dimensions, and scales of tensors."""
    assert torch.equal(found.data, expected.data)
    scales = (each.block_scales().view(torch.uint8) for each in (found, expected))
    assert torch.equal(*scales)
    assert torch.equal(found.tensor_scale, expected.tensor_scale)


def matrices() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((64, 64, torch.bfloat16), (80, 144, torch.float32), (16, 208, torch.bfloat16), (256, 128, torch.bfloat16))
    for rows, width, dtype in sizes:
        x = torch.randn(rows, width, generator=generator) * torch.logspace(-9, 3, rows).unsqueeze(1)
        x[3], x[5, 7] = 0.0, -0.0
        yield x.to(dtype)


def check_bits() -> None:
    from megatron.core.ops.dropout import RowKeys
    from megatron.core.ops.nvfp4_tensor import amaxes, quantize_segments
    from tests.unit.core.ops.interpreted import cpu_runs_on_triton

    generator = torch.Generator().manual_seed(4)
    for x in matrices():
        rows, width = x.shape
        features = torch.randperm(4 * width, generator=generator)[:width]
        for plain, transpose in ((True, True), (True, False), (False, True)):
            wanted = {"plain": plain, "transpose": transpose}
            num_results = sum(wanted.values())
            keys = torch.randint(-(2**31), 2**31, (2, num_results, rows), generator=generator).to(torch.int32)
            amax = amaxes(x, **wanted)
            for random in (None, (RowKeys(*keys), features)):
                expected = quantize_segments(x, amax, random, **wanted)
                with cpu_runs_on_triton():
                    assert torch.equal(amaxes(x, **wanted), amax)
                    found = quantize_segments(x, amax, random, **wanted)
                assert len(found) == num_results
                for one, other in zip(found, expected, strict=True):
                    assert one.has_tiles is (rows == 256)
                    assert not other.has_tiles
                    assert_same(one, other)
    x = torch.ones(16, 32)
    for value in (math.nan, math.inf):
        x[3, 20] = value
        with cpu_runs_on_triton():
            amax = amaxes(x, plain=True, transpose=True)
            assert amax.isinf().all()
            for each in quantize_segments(x, amax, plain=True, transpose=True):
                assert each.values().isnan().all()


def check_squares() -> None:
    from megatron.core.ops.fp8_tensor import SEGMENTS_OF_16, SQUARES_OF_16
    from megatron.core.ops.nvfp4_tensor import Nvfp4Matrix, quantize_squares
    from tests.unit.core.ops.interpreted import cpu_runs_on_triton

    for matrix in matrices():
        for plain, transpose in ((True, True), (True, False), (False, True)):
            expected = quantize_squares(matrix, plain=plain, transpose=transpose)
            with cpu_runs_on_triton():
                found = quantize_squares(matrix, plain=plain, transpose=transpose)
            for one, other in zip(found, expected, strict=True):
                assert (one.blocks, other.blocks) == (SEGMENTS_OF_16, SQUARES_OF_16)
                scale = other.scale.view(torch.uint8).repeat_interleave(16, 0).view(other.scale.dtype)
                assert_same(one, Nvfp4Matrix(other.data, scale, SEGMENTS_OF_16, other.tensor_scale))
                assert torch.equal(one._device_scales().view(torch.uint8), other._device_scales().view(torch.uint8))
    x = torch.ones(32, 16)
    x[3, 4] = math.inf
    with cpu_runs_on_triton():
        for each in quantize_squares(x, plain=True, transpose=True):
            assert each.values().isnan().all()


def check_quantizers() -> None:
    from megatron.core.ops.dropout import DropoutKeys, DropoutSamples
    from megatron.core.ops.fp8_quantizers import Float8Recipe
    from megatron.core.ops.nvfp4_quantizers import Nvfp4Quantizers
    from megatron.core.parallel_config import Fp8Config
    from tests.unit.core.ops.interpreted import cpu_runs_on_triton

    quantizers = Nvfp4Quantizers(Float8Recipe.of(Fp8Config(fp4_format="e2m1")), (2, 1), torch.arange(32, 80))
    quantizers.keys = DropoutKeys(DropoutSamples.at(1, 2, 0, 2, "cpu"), torch.arange(16), slice(None), range(4))
    x = torch.randn(32, 48).bfloat16()
    for operand in ("input", "grad"):
        expected = [*quantizers.matrix(operand, x, transpose=True, records=False), quantizers.columns(operand, x)]
        with cpu_runs_on_triton():
            found = [*quantizers.matrix(operand, x, transpose=True, records=False), quantizers.columns(operand, x)]
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one.values(), other.values())


def test_quantizers_have_the_same_bits_on_triton() -> None:
    interpret(check_quantizers)


def test_the_kernels_have_the_bits_of_torchs_operations() -> None:
    interpret(check_bits)


def test_the_kernels_quantize_weights_like_torchs_operations() -> None:
    interpret(check_squares)


def compile_for(capability: int, folder: Path) -> list[tuple[str, int, int]]:
    import re
    import subprocess

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.core.ops.triton import nvfp4_cast

    triton.knobs.cache.dir = str(folder / "cache")
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    kinds = {"x": "*bf16", "first_key": "*i32", "second_key": "*i32", "features": "*i64", "tensor_scale": "*fp32"}
    kinds |= dict.fromkeys(("data", "scale", "turned", "turned_scale"), "*u8")
    kinds |= {"amax": "*fp32", "num_rows": "i32", "width": "i32"}
    keys, plain, turned = ("first_key", "second_key", "features"), ("data", "scale"), ("turned", "turned_scale")
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        (f"amax {flags}", nvfp4_cast.nvfp4_amax_program, dict(zip(("IS_PLAIN", "IS_TURNED"), flags)))
        for flags in ((True, True), (True, False), (False, True))
    ]
    layout = {"IS_SQUARE": False, "STRIDE": nvfp4_cast.SCALE_STRIDE}
    for tiled in (False, True):
        for name, missing in {
            "nearest": keys,
            "nearest, plain": (*keys, *turned),
            "nearest, turned": (*keys, *plain),
            "stochastic": (),
            "stochastic, plain": turned,
        }.items():
            constants = layout | {"IS_TILED": tiled} | dict.fromkeys(missing)
            cases.append((f"{name} {tiled}", nvfp4_cast.nvfp4_program, constants))
        for name, missing in {"weight": keys, "weight, turned": (*keys, *plain)}.items():
            constants = layout | {"IS_TILED": tiled, "IS_SQUARE": True} | dict.fromkeys(missing)
            cases.append((f"{name} {tiled}", nvfp4_cast.nvfp4_program, constants))
    results = []
    for name, program, constants in cases:
        constants |= {"BLOCK": nvfp4_cast._BLOCK, "SIGNS": 0b1011}
        signature = {each: "constexpr" if each in constants else kinds[each] for each in program.arg_names}
        attributes = {
            (place,): [["tt.divisibility", 16]]
            for place, each in enumerate(program.arg_names)
            if signature[each] != "constexpr"
        }
        source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        binary = folder / "program.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([disassembler, "--dump-resource-usage", binary], capture_output=True, text=True)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
        assert found is not None, usage.stdout
        results.append((name, int(found.group(1)), int(found.group(2))))
    return results


@pytest.mark.full
def test_the_kernels_compile_for_blackwell_without_spilling(tmp_path: Path) -> None:
    (results,) = run_distributed(1, compile_for, 100, tmp_path, timeout_s=120.0)
    assert len(results) == 17
    for name, registers, stack in results:
        assert stack == 0, name
        assert registers <= 168, f"{name}: {registers} registers leave less than three programs on a multiprocessor"
