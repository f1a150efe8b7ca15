"""The emulator's C++ libraries, built at first use. This module imports no torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("core")
CORE = "libemulated_cuda.so"
BINDINGS = "emulated_cuda_bindings.so"
BINDINGS_MODULE = "emulated_cuda_bindings"
_FLAGS = ("-O1", "-std=c++20", "-fPIC")
_MAX_JOBS = 2


class BuildError(Exception):
    """The libraries cannot be built."""


def torch_folder() -> Path:
    """Return the folder of the installed torch package."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed: the emulator needs a CPU build of torch")
    return Path(found.origin).parent


def cache_folder() -> Path:
    """Return the folder in which libraries are cached: XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-emulated-cuda"


def built_libraries() -> Path:
    """Return the folder with the libraries for this source, compiler, Python and torch, and build them if need be.

    Ranks that come at the same time build once: the first one holds a lock. A folder appears complete, by a rename.

    Raises:
        BuildError: there is no C++ compiler, this torch is a CUDA build, or the source does not compile.
    """
    torch = torch_folder()
    if any((torch / "lib").glob("*torch_cuda*")):
        raise BuildError("this torch is a CUDA build; the emulator needs the CPU build (torch==2.13.0+cpu)")
    compiler = _find_compiler()
    cache = cache_folder()
    folder = cache / _key(torch, compiler)
    if folder.is_dir():
        return folder
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as place:
                built = Path(place) / "built"
                built.mkdir()
                _build(torch, compiler, built, Path(place))
                built.rename(folder)
    return folder


def _find_compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if found is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX")
    return found


def _key(torch: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = [
        version,
        (torch / "version.py").read_bytes(),
        os.fsencode(torch),
        sys.version.encode(),
        Path(__file__).read_bytes(),
    ]
    parts += [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _build(torch: Path, compiler: str, target: Path, work: Path) -> None:
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    include.append(f"-I{sysconfig.get_path('include')}")
    define = f"-DTORCH_EXTENSION_NAME={BINDINGS_MODULE}"
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = {source.stem: work / f"{source.stem}.o" for source in sources}

    def compile_source(source: Path) -> None:
        _run([compiler, "-c", *_FLAGS, define, *include, str(source), "-o", str(objects[source.stem])])

    with ThreadPoolExecutor(_MAX_JOBS) as pool:
        list(pool.map(compile_source, sources))
    libraries = torch / "lib"
    link = [compiler, "-shared", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,-rpath,$ORIGIN"]
    bindings = str(objects.pop("bindings"))
    core = target / CORE
    # Without a name of its own the bindings would look for it where it was built.
    own_name = f"-Wl,-soname,{CORE}"
    _run([*link, own_name, *map(str, objects.values()), "-lc10", "-ltorch_cpu", "-lpthread", "-o", str(core)])
    _run([*link, bindings, str(core), "-lc10", "-ltorch_cpu", "-ltorch_python", "-o", str(target / BINDINGS)])


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        raise BuildError(f"the emulator does not compile: {errors[0] if errors else result.stderr[:500]}")
