"""What the recorder sees of operations on tensors without values, torch's choice of an attention kernel included."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.planner.simulation.operators import AttentionCall, choose_attention_kernel
from megatron.planner.simulation.recorder import Recorder
from tests.harness.dry_runs import REPOSITORY
from tests.unit.core.ops.interpreted import needs_triton

PROGRAM = """
import json
from dataclasses import asdict
from importlib.util import find_spec
from megatron.planner.simulation.fake_cuda import load_fake_cuda
load_fake_cuda()
import torch
from torch import library
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import register_flop_formula
from megatron.planner.simulation.operators import CudaOperators
from megatron.planner.simulation.fake_triton import recorded_programs
from megatron.planner.simulation.recorder import Recorder

recorder, seen = Recorder(), {}

@library.custom_op("mine::multiplied", mutates_args=())
def multiplied(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y.t()

@library.custom_op("mine::counted", mutates_args=())
def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y.t()

for operator in (multiplied, counted):
    operator.register_fake(lambda x, y: x.new_empty(len(x), len(y)))

@register_flop_formula(torch.ops.mine.counted)
def flops_of_counted(x, y, *, out_val=None, out_shape=None, **kwargs):
    return 2 * x[0] * x[1] * y[0]

def note(name):
    seen[name] = [wait.what for wait in recorder.record.waits]
    recorder.start()

with FakeTensorMode(allow_non_fake_inputs=True), recorder, CudaOperators(recorder, (8, 0)):
    x = torch.ones(1000, device="cuda")
    x.tolist(); note("tolist")
    x.cpu(); note("cpu")
    x.to("cpu", non_blocking=True); note("unwaited")
    x[x > 0] = x[0]; note("mask")
    float(x.sum()); note("float")
    torch.tensor([1.0, 2.0], device="cuda"); note("tensor")
    seen["host"] = (torch.arange(3) * 2).tolist()
    try:
        x + torch.ones(1000)
        seen["mixed"] = "nothing"
    except RuntimeError as error:
        seen["mixed"] = str(error)
    recorder.start()
    before = recorder.memory.num_bytes
    y = torch.empty(3, 129, device="cuda")
    seen["more"] = recorder.memory.num_bytes - before
    view = y[1:]
    del y
    seen["viewed"] = recorder.memory.num_bytes - before
    del view
    seen["freed"] = recorder.memory.num_bytes - before
    left = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    right = torch.empty(8, 16, device="cuda", dtype=torch.bfloat16)
    recorder.start()
    F.silu(F.rms_norm(left @ right, (16,))).sum().backward()
    seen["operations"] = [(each.name, each.num_bytes, each.flops) for each in recorder.record.operations]
    total = torch.empty(4, 16, device="cuda")
    inner = torch.empty(8, 16, device="cuda", dtype=torch.bfloat16)
    recorder.start()
    torch.ops.aten.addmm.dtype_out(total, left.detach(), inner, torch.float32, out=total)
    torch.ops.aten.mm.dtype_out(left.detach(), inner, torch.float32, out=total)
    seen["wide"] = [(e.name, e.num_bytes, e.flops, e.itemsize, e.shapes[-2:]) for e in recorder.record.operations]
    recorder.start()
    rows = torch.empty(24, 16, device="cuda", dtype=torch.bfloat16)
    weights = torch.empty(3, 16, 32, device="cuda", dtype=torch.bfloat16)
    ends = torch.empty(3, device="cuda", dtype=torch.int32)
    wide = torch._grouped_mm(rows, weights, offs=ends)
    torch._grouped_mm(rows.t(), wide, offs=ends)
    torch._grouped_mm(wide.t().contiguous().t()[:8].reshape(1, 8, 32).expand(3, 8, 32), weights.transpose(1, 2))
    torch.baddbmm(weights, weights, torch.empty(3, 32, 32, device="cuda", dtype=torch.bfloat16))
    torch.mv(rows, rows[0])
    seen["gemms"] = [(e.name, e.flops, e.gemm and asdict(e.gemm)) for e in recorder.record.operations if e.flops]
    recorder.start()
    torch.ops.mine.multiplied(rows, rows)
    torch.ops.mine.counted(rows, rows)
    seen["custom"] = [(e.name, e.flops, e.is_uncounted) for e in recorder.record.operations if "::" in e.name]
    recorder.start()
    torch._foreach_copy_([inner], [total.new_empty(8, 16)])
    total.index_put_((torch.zeros(2, dtype=torch.int64, device="cuda"),), total.new_empty(2, 16), accumulate=True)
    seen["written"] = [(e.name, e.num_bytes) for e in recorder.record.operations if "empty" not in e.name]
    query = torch.empty(3, 8, 4, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key = torch.empty(3, 12, 2, 16, device="cuda", dtype=torch.bfloat16)
    recorder.start()
    flash = (query, key, key, None, None, 8, 12, 0.0, True, False)
    out = torch.ops.aten._flash_attention_forward(*flash, window_size_left=2, window_size_right=0)[0]
    out.backward(out)
    seen["flash"] = [(e.name, e.flops, e.shapes[0]) for e in recorder.record.operations if e.flops]
    if find_spec("triton"):
        from megatron.core.ops.cross_entropy import overwrite_with_gradient
        from megatron.core.ops.gated_activation import gated_activation
        from megatron.core.transformer.rotary_pos_embedding import RotaryAngles, apply_rotary_to_both
        logits = torch.empty(6, 32, device="cuda", dtype=torch.bfloat16)
        labels = torch.empty(6, device="cuda", dtype=torch.int64)
        rows = torch.empty(6, device="cuda")
        heads = torch.empty(6, 1, 4, 16, device="cuda", dtype=torch.bfloat16)
        angles = RotaryAngles(*torch.empty(2, 6, 1, 1, 16, device="cuda"), interleaved=False)
        recorder.start()
        with recorded_programs(recorder):
            gated_activation(logits, "swiglu")
            overwrite_with_gradient(logits, labels, 30, rows, rows, rows.clone())
            apply_rotary_to_both(heads, heads[:, :, :2], angles)
        seen["programs"] = [(e.name, e.num_bytes) for e in recorder.record.operations if "." in e.name]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    if find_compiler() is None:
        pytest.skip("a CPU build of torch needs a C++ compiler for this")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("tolist", ["value read"]),
        ("cpu", ["copy from cuda to cpu"]),
        ("unwaited", []),
        ("mask", ["index by a mask"]),
        ("float", ["value read"]),
        ("tensor", ["copy from cpu to cuda"]),
    ],
)
def test_waits(seen: dict[str, Any], name: str, waits: list[str]) -> None:
    assert seen[name] == waits


@pytest.mark.full
def test_tensors_of_the_cpu_keep_their_values_and_do_not_mix(seen: dict[str, Any]) -> None:
    assert seen["host"] == [0, 2, 4]
    assert "device" in seen["mixed"]


def test_memory_lives_as_long_as_the_last_view_of_it(seen: dict[str, Any]) -> None:
    assert (seen["more"], seen["viewed"], seen["freed"]) == (2048, 2048, 0)


def test_operations_have_the_kernels_of_cuda_with_their_bytes(seen: dict[str, Any]) -> None:
    operations = {name: (num_bytes, flops) for name, num_bytes, flops in seen["operations"]}
    assert operations["_fused_rms_norm"] == (2 * 4 * 16 * 2, 0)
    # The gradient of a sum is one number for all elements.
    assert operations["silu_backward"] == (2 * 4 * 16 * 2 + 2, 0)
    assert [name for name, *_ in seen["operations"]].count("mm") == 2
    assert operations["mm"] == (2 * (4 * 16 + 16 * 8 + 4 * 8), 2 * 4 * 8 * 16)
    assert "rsqrt" not in operations


def test_a_copy_reads_one_side_and_rows_are_added_where_indices_say(seen: dict[str, Any]) -> None:
    moved = dict(seen["written"])
    assert moved["_foreach_copy_"] == 8 * 16 * (4 + 2)
    # Of 2 rows: what is added, and what it is added to, read and written.
    assert moved["index_put_"] == 3 * 2 * 16 * 4


def test_a_product_summed_in_float32_is_one_product_of_16_bits(seen: dict[str, Any]) -> None:
    operands, total = 2 * (4 * 8 + 8 * 16), 4 * 4 * 16
    assert seen["wide"] == [
        ["addmm", operands + 2 * total, 2 * 4 * 8 * 16, 2, [[4, 8], [8, 16]]],
        ["mm", operands + total, 2 * 4 * 8 * 16, 2, [[4, 8], [8, 16]]],
    ]


def test_grouped_and_batched_products_are_counted(seen: dict[str, Any]) -> None:
    def gemm(batch: int, rows: int, inner: int, columns: int) -> dict[str, int]:
        return {"batch": batch, "rows": rows, "inner": inner, "columns": columns}

    # 24 rows in 3 groups: their products with a matrix each, and the gradients of these matrices.
    assert seen["gemms"] == [
        ["_grouped_mm", 2 * 24 * 16 * 32, gemm(3, 8, 16, 32)],
        ["_grouped_mm", 2 * 24 * 16 * 32, gemm(3, 16, 8, 32)],
        ["_grouped_mm", 2 * 3 * 8 * 32 * 16, gemm(3, 8, 32, 16)],
        ["baddbmm", 2 * 3 * 16 * 32 * 32, gemm(3, 16, 32, 32)],
        ["mv", 2 * 24 * 16, gemm(1, 24, 16, 1)],
    ]


def test_a_custom_operator_is_counted_by_its_formula_or_said_to_be_unknown(seen: dict[str, Any]) -> None:
    assert seen["custom"] == [["mine::multiplied", 0, True], ["mine::counted", 2 * 24 * 16 * 24, False]]


def test_the_flash_kernel_computes_what_a_window_shows(seen: dict[str, Any]) -> None:
    # Eight queries at the end of twelve keys see three keys each.
    forward = 4 * 3 * 4 * 16 * 8 * 3
    assert seen["flash"] == [
        ["_flash_attention_forward", forward, [3, 4, 8, 16]],
        ["_flash_attention_backward", 2.5 * forward, [3, 4, 8, 16]],
    ]


@needs_triton
def test_a_program_moves_what_its_source_loads_and_stores(seen: dict[str, Any]) -> None:
    logits, heads, angles = 2 * 6 * 32, 2 * 6 * (4 + 2) * 16, 2 * 4 * 6 * 16
    assert seen["programs"] == [
        ["activation.gated_forward_program", logits + logits // 2],
        # The logits are read and written; the labels and two numbers a row are read.
        ["cross_entropy.gradient_program", 2 * logits + 6 * (8 + 4 + 4)],
        ["query_key_value.rotate_program", 2 * heads + angles],
    ]


AMPERE, ADA, HOPPER, BLACKWELL, TURING = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5)
CALL = AttentionCall("bfloat16", head_size=64, num_queries=1024, num_keys=1024, is_causal=True)


@pytest.mark.parametrize(
    ("changes", "ampere", "hopper"),
    [
        ({}, "flash", "cudnn"),
        ({"dtype": "float16"}, "flash", "cudnn"),
        ({"head_size": 256}, "flash", "flash"),
        ({"head_size": 264}, "efficient", "efficient"),
        ({"head_size": 100}, "flash", "flash"),
        ({"dropout": 0.1}, "flash", "flash"),
        ({"dropout": 0.125}, "flash", "cudnn"),
        ({"dropout": 0.0625, "is_deterministic": True}, "flash", "flash"),
        ({"is_causal": False, "num_queries": 1, "dropout": 0.125}, "flash", "flash"),
        ({"is_causal": False, "has_mask": True}, "efficient", "cudnn"),
        ({"is_causal": False, "has_mask": True, "has_groups": True}, "math", "cudnn"),
        ({"is_causal": False, "has_mask": True, "head_size": 100}, "math", "math"),
        ({"has_groups": True}, "flash", "cudnn"),
        ({"num_queries": 512}, "efficient", "cudnn"),
        ({"dtype": "float32"}, "efficient", "efficient"),
        ({"dtype": "float32", "head_size": 6}, "math", "math"),
        ({"dtype": "float32", "has_groups": True}, "math", "math"),
        ({"dtype": "float64"}, "math", "math"),
    ],
)
def test_kernel_on_ampere_and_hopper(changes: dict[str, object], ampere: str, hopper: str) -> None:
    call = replace(CALL, **changes)
    assert choose_attention_kernel(call, AMPERE) == ampere
    assert choose_attention_kernel(call, HOPPER) == choose_attention_kernel(call, BLACKWELL) == hopper


def test_older_and_smaller_gpus() -> None:
    assert choose_attention_kernel(CALL, TURING) == "math"
    assert choose_attention_kernel(replace(CALL, dtype="float16"), TURING) == "efficient"
    assert choose_attention_kernel(replace(CALL, head_size=200), ADA) == "efficient"
    assert choose_attention_kernel(replace(CALL, head_size=256), ADA) == "flash"
    assert choose_attention_kernel(replace(CALL, head_size=256, dropout=0.1), ADA) == "efficient"


@pytest.mark.parametrize("operation", [torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out], ids=str)
def test_a_product_into_wider_sums_is_not_traced(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 decomposes it and multiplies a dtype by a tensor."""

    def traced(*args: Any, **kwargs: Any) -> None:
        raise TypeError("unsupported operand type(s) for *: 'torch.dtype' and 'FakeTensor'")

    monkeypatch.setattr(type(operation), "__call__", traced)
    sums = torch.zeros(2, 3)
    recorder = Recorder.__new__(Recorder)
    given = (sums, torch.zeros(2, 4), torch.zeros(4, 3), torch.float32)
    assert recorder._result(operation, operation._schema.name, given, {"out": sums}) is sums
