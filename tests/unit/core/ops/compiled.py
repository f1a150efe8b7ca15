"""Compile Triton's programs for A100, H100 and B200: it needs none of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of which a program may take all (CUDA C++ Programming Guide, technical specifications per compute capability)."""
Program = tuple[str, Any, dict[str, Any], dict[str, Any], int]
"""Name, program, types of the arguments that are no bf16 pointers, compile-time sizes, warps."""


@dataclass(frozen=True)
class Compiled:
    """Hold what a program takes of a GPU, and how many instructions move 16 bytes and how many 2.

    Copies are asynchronous ones to shared memory. Matmuls are instructions of tensor cores.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    wide_loads: int
    wide_stores: int
    narrow_accesses: int
    wide_copies: int
    narrow_copies: int
    matmuls: int


def compile_programs(
    of: Callable[[int], Iterator[Program]], capability: int, folder: Path, odd_is_one: bool = False, **options: int
) -> list[Compiled]:
    """Compile the programs of a capability.

    With ``odd_is_one`` every "odd" number is 1, which is built in, as at a launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton.knobs.cache.dir = str(folder / "cache")
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    results = []
    for name, program, kinds, sizes, num_warps in of(capability):
        signature, constants, attributes = {}, dict(sizes), {}
        for place, argument in enumerate(program.arg_names):
            kind = "constexpr" if argument in sizes else kinds.get(argument, "*bf16")
            if kind is None:
                constants[argument] = None
            elif kind == "odd" and odd_is_one:
                kind, constants[argument] = "constexpr", 1
            # As at a launch: pointers, and numbers that are no "odd" ones, are multiples of 16.
            elif kind in ("i32", "i64", "*bf16", "*fp32", "*fp64", "*i32", "*i64", "*u8"):
                attributes[(place,)] = [["tt.divisibility", 16]]
            signature[argument] = {None: "constexpr", "odd": "i32"}.get(kind, kind)
        source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=attributes)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": num_warps, **options})
        binary = folder / "program.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([disassembler, "--dump-resource-usage", binary], capture_output=True, text=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found is not None, usage
        accesses = re.findall(r"(ld|st)\.global(\S*)", compiled.asm["ptx"])
        wide = [direction for direction, width in accesses if width.endswith(".v4.b32")]
        narrow = sum(width.endswith("b16") for _, width in accesses)
        registers, stack = map(int, found.groups())
        shared = compiled.metadata.shared
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global\S* .*?, (0x[0-9a-f]+|\d+)", compiled.asm["ptx"])
        wide_copies = sum(int(size, 0) == 16 for size in copies)
        moved = wide.count("ld"), wide.count("st"), narrow, wide_copies, len(copies) - wide_copies
        matmuls = len(re.findall(r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", compiled.asm["ptx"]))
        results.append(Compiled(name, registers, stack, shared, *moved, matmuls))
    return results
