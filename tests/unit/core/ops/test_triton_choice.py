"""Triton where it works; anything else means torch, with one warning if the package is there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.ops import triton_support
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.ops.triton_support import runs_on_triton, triton_works
from tests.unit.core.ops.interpreted import needs_triton

PROGRAMS = "megatron.core.ops.triton"


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test look for the package anew, and take tensors on the CPU for those that Triton serves."""
    for name in [name for name in sys.modules if name.startswith(f"{PROGRAMS}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(triton_support, "_DEVICE", "cpu")
    triton_works.cache_clear()
    yield
    triton_works.cache_clear()


def test_absent_package_is_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "triton":
                raise ModuleNotFoundError("No module named 'triton'", name="triton")

    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_on_triton(torch.zeros(1))


def test_hidden_package_is_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_on_triton(torch.zeros(1))


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcuda.so.1: cannot open shared object file"),
        ModuleNotFoundError("No module named 'filelock'", name="filelock"),
        RuntimeError("Failed to find C compiler"),
        OSError("ptxas is not executable"),
    ],
)
def test_a_failing_package_means_one_warning_and_torch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == f"{PROGRAMS}.probe":
                raise error

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    x = torch.randn(3, 10)
    with pytest.warns(UserWarning, match="triton") as caught:
        results = [gated_activation(x, "swiglu") for _ in range(5)]
    assert [str(warning.message) for warning in caught] == [
        f"triton is installed but cannot be used, so torch's operations are used: {error}"
    ]
    assert torch.equal(results[4], torch.nn.functional.silu(x[:, :5]) * x[:, 5:])


@needs_triton
def test_a_machine_without_a_gpu_fails_the_probe() -> None:
    """The package imports there: only a launch shows that it is of no use."""
    if torch.version.cuda is not None:
        pytest.skip("this torch may find a GPU")
    with pytest.warns(UserWarning, match="triton is installed but cannot be used"):
        assert not triton_works()


def test_float64_and_tensors_without_memory_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "triton_works", lambda: True)
    x = torch.zeros(2)
    assert runs_on_triton(x, x.half(), x.bfloat16(), torch.nn.Parameter(x))
    assert not runs_on_triton(x, x.double())
    assert not runs_on_triton(x.int())
    assert not runs_on_triton(x.to("meta"))
    with FakeTensorMode():
        assert not runs_on_triton(torch.zeros(2))
    monkeypatch.setattr(triton_support, "_DEVICE", "cuda")
    assert not runs_on_triton(x)
