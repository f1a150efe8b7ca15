"""The emulator's C++ libraries, built at set-up or at first use. This module imports no torch.

``python -m tests.emulated_cuda.build`` builds them if they are not built yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("core")
CORE = "libemulated_cuda.so"
BINDINGS = "emulated_cuda_bindings.so"
BINDINGS_MODULE = "emulated_cuda_bindings"
_FLAGS = ("-O1", "-std=c++20", "-fPIC")
_MAX_JOBS = 2
_OWN_HEADER = re.compile(rb'^#include "([a-z0-9_]+\.h)"$', re.MULTILINE)


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


def built_libraries(log: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder with the libraries for this source, compiler, Python and torch, and build them if need be.

    Ranks that come at the same time build once: the first one holds a lock. A folder appears complete, by a rename.
    Objects are cached on their own: a change of one source compiles that source only.
    A build is announced to ``log``.

    Raises:
        BuildError: there is no C++ compiler, this torch is a CUDA build, or the source does not compile.
    """
    torch = torch_folder()
    if any((torch / "lib").glob("*torch_cuda*")):
        raise BuildError("this torch is a CUDA build; the emulator needs the CPU build (torch==2.13.0+cpu)")
    compiler = _find_compiler()
    cache = cache_folder()
    base = _base_key(torch, compiler)
    objects = {
        source: cache / f"{source.stem}-{_object_key(base, source)}.o" for source in sorted(SOURCES.glob("*.cpp"))
    }
    folder = cache / _digest(path.name.encode() for path in objects.values())
    if folder.is_dir():
        return folder
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            log(f"== compiling emulated CUDA devices into {cache} (about two minutes of processor time)")
            with tempfile.TemporaryDirectory(dir=cache) as place:
                built = Path(place) / "built"
                built.mkdir()
                _compile(torch, compiler, objects, Path(place))
                _link(torch, compiler, objects, built)
                built.rename(folder)
    return folder


def _find_compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if found is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX")
    return found


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _base_key(torch: Path, compiler: str) -> bytes:
    """Identify all on which every object depends besides its source: compiler, torch, Python and flags."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = (version, (torch / "version.py").read_bytes(), os.fsencode(torch), sys.version.encode())
    return _digest((*parts, " ".join(_FLAGS).encode())).encode()


def _object_key(base: bytes, source: Path) -> str:
    """Return the key of a source's object: its text and the text of the headers that it includes, at any depth."""
    found = {source.name: source.read_bytes()}
    unread = [source.name]
    while unread:
        for name in _OWN_HEADER.findall(found[unread.pop()]):
            header = name.decode()
            if header not in found:
                found[header] = (SOURCES / header).read_bytes()
                unread.append(header)
    return _digest((base, *(name.encode() + b"\0" + text for name, text in sorted(found.items()))))


def _compile(torch: Path, compiler: str, objects: Mapping[Path, Path], work: Path) -> None:
    """Compile the sources whose objects are absent."""
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    include.append(f"-I{sysconfig.get_path('include')}")
    define = f"-DTORCH_EXTENSION_NAME={BINDINGS_MODULE}"
    base = _base_key(torch, compiler)

    def compile_source(source: Path) -> None:
        unfinished = work / objects[source].name
        _run([compiler, "-c", *_FLAGS, define, *include, str(source), "-o", str(unfinished)])
        if objects[source].stem != f"{source.stem}-{_object_key(base, source)}":
            raise BuildError(f"{source.name} or a header of it has changed while it was compiled: build again")
        unfinished.rename(objects[source])

    with ThreadPoolExecutor(_MAX_JOBS) as pool:
        list(pool.map(compile_source, [source for source, path in objects.items() if not path.exists()]))


def _link(torch: Path, compiler: str, objects: Mapping[Path, Path], target: Path) -> None:
    libraries = torch / "lib"
    link = [compiler, "-shared", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,-rpath,$ORIGIN"]
    bindings = [str(path) for source, path in objects.items() if source.stem == "bindings"]
    others = [str(path) for source, path in objects.items() if source.stem != "bindings"]
    core = target / CORE
    # Without a name of its own the bindings would look for it where it was built.
    own_name = f"-Wl,-soname,{CORE}"
    _run([*link, own_name, *others, "-lc10", "-ltorch_cpu", "-lpthread", "-o", str(core)])
    _run([*link, *bindings, str(core), "-lc10", "-ltorch_cpu", "-ltorch_python", "-o", str(target / BINDINGS)])


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        raise BuildError(f"the emulator does not compile: {errors[0] if errors else result.stderr[:500]}")


def main() -> None:
    """Build the libraries. Where they cannot be built, say so in a line: the tests on emulated devices are skipped."""
    try:
        built_libraries(lambda line: print(line, flush=True))
    except BuildError as error:
        print(f"== no emulated CUDA devices: {error}")


if __name__ == "__main__":
    main()
