"""What the recorder sees of operations on tensors that have no values."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from megatron.dry_run.pretended_cuda import find_compiler
from tests.harness.dry_runs import REPOSITORY

PROGRAM = """
import json
from megatron.dry_run.pretended_cuda import load_pretended_cuda
load_pretended_cuda()
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from megatron.dry_run.cuda_operators import CudaOperators
from megatron.dry_run.recorder import Recorder

recorder, seen = Recorder(), {}

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
