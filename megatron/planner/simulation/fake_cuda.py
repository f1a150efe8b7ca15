"""Let torch run autograd on fake CUDA tensors on a node without a GPU.

A small library replaces the CUDA driver. It is compiled once, and loaded before torch is imported. It is not needed
with a CUDA build of torch on a node with a GPU. This module does not import torch.
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
def load_fake_cuda(cache: Path | None = None) -> None:
    """Load the library, and build it first if it is not in ``cache`` (by default in the folder for temporary files).

    Raises:
        ConfigurationError: torch is already imported, there is no C++ compiler, or the source does not compile.
    """
    if "torch" in sys.modules:
        raise ConfigurationError(
            "torch is already imported, so this process cannot simulate a GPU; start a new process"
        )
    torch_folder = _torch_folder()
    cuda = torch_folder / "lib" / "libtorch_cuda.so"
    if cuda.exists() and has_gpu():
        return
    library = _built_library(torch_folder, cache or _default_cache())
    if cuda.exists():
        # The library replaces what a CUDA build registers, so a CUDA build has to be loaded first.
        for path in (cuda.with_name("libtorch_global_deps.so"), cuda):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def find_compiler() -> str | None:
    """Return the C++ compiler that would build the library, or None if none is found."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None, "the project needs torch"
    assert found.origin is not None, "torch is a package of files"
    return Path(found.origin).parent


def has_gpu() -> bool:
    """Return whether the CUDA driver finds a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"megatron-dry-run-{os.getuid()}"


def _built_library(torch_folder: Path, cache: Path) -> Path:
    """Return the library for this source and this torch, built if it is not in the cache."""
    version = (torch_folder / "version.py").read_bytes()
    key = hashlib.sha256(_SOURCE.read_bytes() + version + os.fsencode(torch_folder)).hexdigest()[:16]
    library = cache / f"cuda_guard-{key}.so"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise ConfigurationError(
            f"{cache} belongs to another user, and its library is not trusted; set TMPDIR to a different folder"
        )
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise ConfigurationError(
            "a simulated GPU needs a C++ compiler, but none was found; install g++, or use a CUDA build of torch on a "
            "node with a GPU"
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
