"""Tests of the library that replaces the CUDA driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.core.errors import ConfigurationError
from megatron.planner.simulation import fake_cuda

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
    with pytest.raises(ConfigurationError, match="torch is imported already"):
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
