"""Versions of what a run is made of, whether optional packages can be imported, and the compiled extensions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from megatron.doctor.finding import Finding

_IMPORT_TIMEOUT_S = 120.0
_OPTIONAL: Mapping[str, tuple[str, str]] = {
    "triton": ("triton", "fused kernels"),
    "flash_attn": ("flash-attn", "attention"),
    "apex": ("apex", "the fused optimizer"),
    "transformer_engine": ("transformer-engine", "attention and norms with --transformer-impl transformer_engine"),
}
"""Packages by the name of their module: the name of the distribution, and what they are used for."""
_EXTENSIONS: Mapping[str, str] = {
    "megatron.core.datasets._helpers": "indices of data sets are built by NumPy, some ten times slower",
    "megatron.core.datasets._bus_error": "a data file that is cut while it is read ends a run without a word",
    "megatron.corpus._json_lines": "preprocessing reads JSON with Python, several times slower",
}


def examine_software(try_import: Callable[[str], str | None] | None = None) -> Iterator[Finding]:
    """Yield versions and imports; ``try_import`` returns why a module cannot be imported, or None."""
    fails = try_import or why_not_importable
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    reason = fails("torch")
    if reason is not None:
        yield Finding(
            "wrong", "torch", f"cannot be imported: {reason}", "install it again: bash requirements/install.sh"
        )
    else:
        yield Finding("ok", "torch", importlib.metadata.version("torch"))
    for module, (distribution, use) in _OPTIONAL.items():
        yield _examine_package(module, distribution, use, fails)
    for module, loss in _EXTENSIONS.items():
        if importlib.util.find_spec(module) is None:
            remedy = "pip install --no-build-isolation --no-deps -e ."
            yield Finding("warning", module, f"not built: {loss}", remedy)
        elif (reason := fails(module)) is not None:
            remedy = "build it with this Python: pip install --no-build-isolation --no-deps -e ."
            yield Finding("wrong", module, f"cannot be imported: {reason}", remedy)
        else:
            yield Finding("ok", module, "compiled")


def why_not_importable(module: str) -> str | None:
    """Return the last line of what a fresh process says of importing a module, or None where it can.

    An extension that was built for another torch may end the process that imports it.
    """
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the import did not end within {_IMPORT_TIMEOUT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else lines[-1] if lines else f"the process ended with {done.returncode}"


def _examine_package(module: str, distribution: str, use: str, fails: Callable[[str], str | None]) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding("ok", module, f"not installed: it is optional, for {use}")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    reason = fails(module)
    if reason is not None:
        remedy = f"build it for this torch, or pip uninstall {distribution}"
        return Finding("warning", module, f"{version} cannot be imported: {reason}", remedy)
    return Finding("ok", module, f"{version}, for {use}")
