"""The library that replaces the CUDA driver, and the quick mode of fake tensors against torch's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.errors import ConfigurationError
from megatron.planner.simulation import fake_cuda
from megatron.planner.simulation.fake_cuda import find_compiler
from tests.harness.dry_runs import REPOSITORY

COMPILER = """#!/bin/sh
echo built >> "$0.log"
for word; do last=$word; done
echo library > "$last"
"""


def test_it_is_built_once_and_nothing_is_left_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    monkeypatch.setattr(fake_cuda, "find_compiler", lambda: str(compiler))
    torch_folder = fake_cuda._torch_folder()
    built = [fake_cuda._built_library(torch_folder, cache) for _ in range(2)]
    assert built == [*cache.iterdir()] * 2
    assert built[0].read_text() == "library\n"
    assert Path(f"{compiler}.log").read_text() == "built\n"


def test_a_source_that_does_not_compile_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'a.cpp:3: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(fake_cuda, "find_compiler", lambda: str(compiler))
    with pytest.raises(ConfigurationError, match=r"cuda_guard\.cpp does not compile .*: error: no such thing"):
        fake_cuda._built_library(fake_cuda._torch_folder(), tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == []


def test_a_machine_without_a_compiler_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda, "find_compiler", lambda: None)
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler, .* install g\+\+"):
        fake_cuda._built_library(fake_cuda._torch_folder(), tmp_path)


def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr("megatron.planner.simulation.fake_cuda.os.getuid", lambda: owner + 1)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        fake_cuda._built_library(fake_cuda._torch_folder(), tmp_path)


def test_a_process_that_has_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.load_fake_cuda.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.raises(ConfigurationError, match="torch is already imported"):
        fake_cuda.load_fake_cuda()


@pytest.fixture
def cuda_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a CUDA build of torch that nothing has imported."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    fake_cuda.load_fake_cuda.cache_clear()
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libtorch_cuda.so").touch()
    (folder / "version.py").write_text("cuda = '13.0'")
    monkeypatch.setattr(fake_cuda, "_torch_folder", lambda: folder)
    return folder


def test_a_cuda_build_on_a_node_with_a_gpu_needs_no_library(
    cuda_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cuda, "has_gpu", lambda: True)
    monkeypatch.setattr(fake_cuda, "find_compiler", lambda: None)
    fake_cuda.load_fake_cuda(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_cuda_build_without_a_gpu_loads_the_library_after_the_libraries_of_torch(
    cuda_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, loaded = tmp_path / "cuda_guard.so", list[str]()
    monkeypatch.setattr(fake_cuda, "has_gpu", lambda: False)
    monkeypatch.setattr(fake_cuda, "_built_library", lambda *_: library)
    monkeypatch.setattr("ctypes.CDLL", lambda path, mode: loaded.append(path))
    fake_cuda.load_fake_cuda(tmp_path)
    folder = cuda_build / "lib"
    assert loaded == [str(folder / "libtorch_global_deps.so"), str(folder / "libtorch_cuda.so"), str(library)]


def test_a_node_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", fail)
    assert not fake_cuda.has_gpu()


def test_a_library_that_was_not_built_is_not_taken_for_a_loaded_one(
    cuda_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cuda, "has_gpu", lambda: False)
    monkeypatch.setattr(fake_cuda, "find_compiler", lambda: None)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="install g"):
            fake_cuda.load_fake_cuda(tmp_path)
    monkeypatch.setattr(fake_cuda, "has_gpu", lambda: True)
    fake_cuda.load_fake_cuda(tmp_path)
    assert fake_cuda.load_fake_cuda.cache_info().currsize == 1
    fake_cuda.load_fake_cuda.cache_clear()


PROGRAM = """
import json, sys
from unittest.mock import patch
from megatron.planner.simulation.fake_cuda import load_fake_cuda
load_fake_cuda()
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from megatron.cli.planner_arguments import read_planned_run
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner import memory
from megatron.planner.plan import Plan
from megatron.planner.simulation import fake_device
from megatron.planner.simulation import piece_tracer
from megatron.planner.simulation.fake_device import QuickFakeTensorMode

def described(result):
    if isinstance(result, torch.Tensor):
        storage = result.untyped_storage()
        where = result.device, result.dtype, storage.nbytes(), result.storage_offset()
        return [list(result.shape), list(result.stride()), *map(str, where)]
    return [described(each) for each in result] if isinstance(result, (tuple, list)) else str(result)

x, y = torch.empty(4, 6, device="meta"), None
calls = {
    "view": lambda x: x.view(6, 4),
    "slice": lambda x: x[1:3, ::2],
    "select": lambda x: x.select(1, 2),
    "unbind": lambda x: x.unbind(0),
    "split": lambda x: x.split([1, 3]),
    "int": lambda x: x.int() + 1,
    "float": lambda x: x.int() + 1.0,
    "bool": lambda x: x.int() + True,
    "strided": lambda x: torch.exp(x.t()),
    "number on the host": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "two devices": lambda x: x.to("cpu"),
    "like": lambda x: torch.empty_like(x.t(), dtype=torch.bfloat16),
    "new": lambda x: x.new_zeros(3, device="cpu"),
    "in place": lambda x: x.add_(1).mul_(2),
    "topk": lambda x: torch.topk(x, 2),
    "cat": lambda x: torch.cat([x, x], 1),
    "dtype": lambda x: x.view(torch.int16),
    "foreach": lambda x: torch._foreach_mul([x, x.t()], 2.0),
    "where": lambda x: torch.where(x > 0, x, torch.zeros((), device=x.device)),
    "scalar": lambda x: torch.scalar_tensor(2.0, device=x.device),
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)],
}
both = {}
for mode in (FakeTensorMode, QuickFakeTensorMode):
    with mode(allow_non_fake_inputs=True):
        for name, call in calls.items():
            # Twice: the second result is made from the first one's layout.
            for _ in range(2):
                x = torch.empty(4, 6, device="cuda")
                result = call(x)
                shares = isinstance(result, torch.Tensor) and (
                    result.untyped_storage()._cdata == x.untyped_storage()._cdata
                )
                both.setdefault(name, []).append([described(result), shares])

flags = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 1"
    " --global-batch-size 64 --vocab-size 999 --tokenizer-type NullTokenizer --bf16 --mock-data"
    " --train-iters 1 --lr 1e-4 --tensor-model-parallel-size 2"
)
for name, more in json.loads(sys.argv[1]).items():
    plan = Plan.of(read_planned_run([*flags.split(), *more.split()], 8).config)
    contents = StageContents((0,)), StageContents((), has_embedding=True), StageContents((), has_loss=True)
    capability = memory._typical_capability(plan)
    requests = {str(number): memory._request(plan, capability, each) for number, each in enumerate(contents)}
    both[name] = [piece_tracer.take_traces(requests)]
    with patch.object(fake_device, "QuickFakeTensorMode", FakeTensorMode):
        both[name].append(piece_tracer.take_traces(requests))
print(json.dumps(both))
"""
MODELS = {
    "dense": "--sequence-parallel",
    "fp8": "--fp8-format hybrid --sequence-parallel",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1 --sequence-parallel",
    "ring": "--context-parallel-size 4",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "experts": "--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2",
}


@pytest.mark.skipif(find_compiler() is None, reason="a simulated GPU needs a C++ compiler here")
def test_results_and_traces_are_those_of_the_mode_of_torch() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(MODELS)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert finished.returncode == 0, finished.stderr
    for name, results in json.loads(finished.stdout).items():
        assert all(result == results[0] for result in results), name
        assert len(results) == (2 if name in MODELS else 4)
    kinds = json.loads(finished.stdout)
    dtypes = {name: kinds[name][0][0][3] for name in ("int", "float", "bool")}
    assert dtypes == {"int": "torch.int32", "float": "torch.float32", "bool": "torch.int32"}
