"""The Triton kernel of NVFP4 against torch's operations, interpreted on the CPU, and compiled for Blackwell."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.harness.distributed import run_distributed
from tests.unit.core.ops.interpreted import interpret, needs_triton

pytestmark = needs_triton


def check_bits() -> None:
    from megatron.core.ops.dropout import RowKeys, keyed_words
    from megatron.core.ops.fp8_tensor import SEGMENTS_OF_16
    from megatron.core.ops.nvfp4_tensor import SIGNS, hadamard, quantize_nvfp4, tensor_scale_of
    from megatron.core.ops.triton.nvfp4_cast import nvfp4_amax, quantize_segments

    generator = torch.Generator().manual_seed(3)
    for rows, width, dtype in ((64, 64, torch.bfloat16), (80, 144, torch.float32), (16, 208, torch.bfloat16)):
        x = torch.randn(rows, width, generator=generator) * torch.logspace(-9, 3, rows).unsqueeze(1)
        x[3], x[5, 7] = 0.0, -0.0
        x = x.to(dtype)
        keys = torch.randint(-(2**31), 2**31, (2, rows), generator=generator).to(torch.int32)
        features = torch.randperm(4 * width, generator=generator)[:width]
        words = keyed_words(RowKeys(keys[0], keys[1]), features)
        for turned in (False, True):
            matrix = hadamard(x.t()) if turned else x
            amax = nvfp4_amax(x, turned, SIGNS)
            assert torch.equal(amax, matrix.abs().amax().float())
            tensor_scale = tensor_scale_of(amax)
            for random in (None, (keys[0], keys[1], features)):
                given = None if random is None else words.t() if turned else words
                expected = quantize_nvfp4(matrix, SEGMENTS_OF_16, tensor_scale, given)
                data, scale = quantize_segments(x, tensor_scale, turned, SIGNS, random)
                assert torch.equal(scale.view(torch.uint8), expected.scale.view(torch.uint8))
                assert torch.equal(data, expected.data)
    x = torch.ones(16, 32)
    x[3, 20] = math.nan
    assert nvfp4_amax(x, False, SIGNS).isinf()
    assert nvfp4_amax(x, True, SIGNS).isinf()
    nothing = torch.full((1, 1), math.nan)
    data, scale = quantize_segments(x, nothing, False, SIGNS, None)
    assert scale.float().isnan().all()


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


def test_the_kernel_has_the_bits_of_torchs_operations() -> None:
    interpret(check_bits)


def compile_for(capability: int, folder: Path) -> list[tuple[str, int, int]]:
    import re
    import subprocess

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.core.ops.triton import nvfp4_cast

    triton.knobs.cache.dir = str(folder / "cache")
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    kinds = {"x": "*bf16", "tensor_scale": "*fp32", "first_key": "*i32", "second_key": "*i32", "features": "*i64"}
    kinds |= {"data": "*u8", "scale": "*u8", "amax": "*fp32", "num_rows": "i32", "width": "i32"}
    without = {
        "amax": ("tensor_scale", "first_key", "second_key", "features", "data", "scale"),
        "nearest": ("first_key", "second_key", "features", "amax"),
        "stochastic": ("amax",),
    }
    results = []
    for name, missing in without.items():
        for turned in (False, True):
            constants = {"IS_TURNED": turned, "SIGNS": 0b1011, "BLOCK": nvfp4_cast._BLOCK, **dict.fromkeys(missing)}
            program = nvfp4_cast.nvfp4_program
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
            results.append((f"{name} {turned}", int(found.group(1)), int(found.group(2))))
    return results


@pytest.mark.full
def test_the_kernel_compiles_for_blackwell_without_spilling(tmp_path: Path) -> None:
    (results,) = run_distributed(1, compile_for, 100, tmp_path, timeout_s=120.0)
    assert len(results) == 6
    for name, registers, stack in results:
        assert stack == 0, name
        assert registers <= 168, f"{name}: {registers} registers leave less than three programs on a multiprocessor"
