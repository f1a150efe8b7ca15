"""Let a CPU build of torch take tensors without memory on CUDA: a small library, built once and loaded before torch.

A CUDA build needs none of it. This module imports no torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron.core.errors import ConfigurationError

_SOURCE = Path(__file__).with_name("cuda_guard.cpp")


# The library is loaded once per process. A call that raises is not cached.
@functools.cache
def load_pretended_cuda(cache: Path | None = None) -> None:
    """Load the library, and build it if ``cache`` (by default a folder for temporary files) has none yet.

    Raises:
        ConfigurationError: torch is imported already, there is no C++ compiler, or the source does not compile.
    """
    if "torch" in sys.modules:
        raise ConfigurationError("the dry run was started in a process that has torch already; start one of its own")
    torch_folder = _torch_folder()
    if not _is_cuda_build(torch_folder):
        ctypes.CDLL(str(_built_library(torch_folder, cache or _default_cache())), mode=ctypes.RTLD_GLOBAL)


def find_compiler() -> str | None:
    """Return the C++ compiler that would build the library, or None where there is none."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None, "the project needs torch"
    assert found.origin is not None, "torch is a package of files"
    return Path(found.origin).parent


def _is_cuda_build(torch_folder: Path) -> bool:
    return any((torch_folder / "lib").glob("*torch_cuda*"))


def _default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"megatron-dry-run-{os.getuid()}"


def _built_library(torch_folder: Path, cache: Path) -> Path:
    """Return the library that fits this source and this torch; one that is there has been built whole."""
    version = (torch_folder / "version.py").read_bytes()
    key = hashlib.sha256(_SOURCE.read_bytes() + version + os.fsencode(torch_folder)).hexdigest()[:16]
    library = cache / f"cuda_guard-{key}.so"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise ConfigurationError(
            f"{cache} belongs to another user, whose library is not loaded; set TMPDIR to a folder"
        )
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise ConfigurationError(
            "the dry run needs a C++ compiler with this CPU build of torch, and none was found; install g++, or use a "
            "CUDA build of torch"
        )
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / library.name
        command = [compiler, "-shared", "-fPIC", "-O0", "-std=c++20", f"-I{torch_folder / 'include'}", str(_SOURCE)]
        command += [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        result = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
            raise ConfigurationError(f"{_SOURCE.name} does not compile with {compiler} against this torch: {first}")
        os.replace(built, library)
    return library
