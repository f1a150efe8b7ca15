"""DeepEP is used where its package can be imported; a broken package means one warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.transformer.moe.deepep import load_deepep, why_no_deepep

STAND_IN = (Path(__file__).parents[2] / "ops" / "deep_ep_stand_in.py").read_text()
BROKEN = {
    "shared object": ("raise OSError('libnvshmem.so: cannot open shared object file')", "cannot open"),
    "needed package": ("import surely_not_installed_package", "surely_not_installed_package"),
    "no Buffer": ("", "Buffer"),
    "without the older interface": ("Buffer = None", "built without the class Buffer"),
}


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test look for the package anew, and leave no module behind."""
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # so that the old state comes back, whatever is imported
    monkeypatch.delitem(sys.modules, "deep_ep")
    load_deepep.cache_clear()
    yield
    load_deepep.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Put a package named deep_ep before every other."""
    (folder / "deep_ep.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_means_one_warning_and_alltoall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    source, reason = BROKEN[kind]
    install(monkeypatch, tmp_path, source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load_deepep() is None
        assert why_no_deepep(2, "cuda") == "the package deep_ep cannot be imported"
    assert len(caught) == 1
    assert "DeepEP is installed but cannot be used, so alltoall is used: " in str(caught[0].message)
    assert reason in str(caught[0].message)


def test_an_absent_package_means_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why_no_deepep(2, "cuda") == "the package deep_ep cannot be imported"


def test_a_working_package_is_used_on_several_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, STAND_IN)
    assert why_no_deepep(2, "cuda:1") is None
    assert why_no_deepep(2, "cpu") == "it needs CUDA"
    assert why_no_deepep(1, "cuda:1") == "all experts are on each rank"
