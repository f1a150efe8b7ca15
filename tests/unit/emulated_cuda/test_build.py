"""The build of the emulator at set-up: announced once, cheap afterwards, and no failure where it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.emulated_cuda import build


@pytest.fixture
def cpu_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the build see a CPU build of torch and an empty cache; return the folder of this torch."""
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '1'\n")
    monkeypatch.setattr(build, "torch_folder", lambda: torch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return torch


def compile_nothing(torch: Path, compiler: str, objects: Mapping[Path, Path], work: Path) -> None:
    for path in objects.values():
        path.touch()


def link_nothing(torch: Path, compiler: str, objects: Mapping[Path, Path], target: Path) -> None:
    assert all(path.exists() for path in objects.values())


def test_set_up_compiles_once_and_says_so(
    cpu_torch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "_compile", compile_nothing)
    monkeypatch.setattr(build, "_link", link_nothing)
    monkeypatch.setattr(build, "_find_compiler", lambda: "true")
    build.main()
    assert capsys.readouterr().out.startswith("== compiling emulated CUDA devices into ")
    build.main()
    assert capsys.readouterr().out == ""
    (cpu_torch / "version.py").write_text("__version__ = '2'\n")
    build.main()
    assert capsys.readouterr().out.count("\n") == 1


def test_set_up_passes_over_a_machine_without_a_compiler(
    cpu_torch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    build.main()
    expected = "== no emulated CUDA devices: no C++ compiler was found: install g++, or set CXX\n"
    assert capsys.readouterr().out == expected


def test_set_up_passes_over_a_cuda_build_of_torch(cpu_torch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cpu_torch / "lib" / "libtorch_cuda.so").touch()
    build.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("== no emulated CUDA devices: this torch is a CUDA build")
