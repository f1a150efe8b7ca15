"""Put the emulator under torch while torch is imported. This module imports no torch."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.emulated_cuda.build import BINDINGS, BINDINGS_MODULE, CORE, built_libraries


def activate() -> None:
    """Let the next import of torch find emulated devices.

    torch asks its C++ library once what CUDA can do. So the emulator's library is loaded before torch. The functions
    that a CUDA build has in ``torch._C`` are added before ``torch.cuda`` looks for them, and the class
    ``ProcessGroupNCCL`` before ``torch.distributed`` does. The Python code of torch stays as it is.

    Raises:
        RuntimeError: torch is imported already.
        BuildError: the libraries cannot be built.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: activate the emulator in a new process")
    # Inductor has no compiler for these devices: a function that torch.compile is given stays as it is.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # torch.distributed._symmetric_memory.empty would use a memory pool of symmetric memory, which is not emulated.
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    if os.environ.get("EMULATED_CUDA_TRITON") == "absent":
        # Python's way to say that there is no such package.
        sys.modules["triton"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _TorchFinder())


def _before_torch() -> None:
    ctypes.CDLL(str(built_libraries() / CORE), mode=ctypes.RTLD_GLOBAL)


def load_bindings() -> ModuleType:
    """Return the emulator's Python module; torch must have been imported with the emulator."""
    if BINDINGS_MODULE not in sys.modules:
        path = str(built_libraries() / BINDINGS)
        spec = importlib.util.spec_from_loader(
            BINDINGS_MODULE, importlib.machinery.ExtensionFileLoader(BINDINGS_MODULE, path)
        )
        assert spec is not None, "an extension module has a loader"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[BINDINGS_MODULE] = module
    return sys.modules[BINDINGS_MODULE]


def _before_torch_cuda() -> None:
    from tests.emulated_cuda.runtime import add_cuda_functions

    add_cuda_functions()


def _before_torch_distributed() -> None:
    import torch._C._distributed_c10d as c10d

    bindings = load_bindings()
    bindings.bind_nccl(bindings)
    bindings.install_symmetric_memory()
    from tests.emulated_cuda.nccl_rules import add_user_buffers

    add_user_buffers(bindings.ProcessGroupNCCL)
    c10d.ProcessGroupNCCL = bindings.ProcessGroupNCCL


def _after_torch() -> None:
    from tests.emulated_cuda.runtime import finish_import

    finish_import()


def _after_distributed() -> None:
    from torch.distributed import distributed_c10d

    from tests.emulated_cuda.nccl_rules import check_error_handling, check_in_place

    check_in_place(distributed_c10d)
    check_error_handling(distributed_c10d)


def _after_triton_interpreter() -> None:
    from tests.emulated_cuda.triton_launches import run_on_emulated_devices

    run_on_emulated_devices()


def _after_flex_attention() -> None:
    from tests.emulated_cuda.flex_attention_rules import run_flex_attention_eagerly

    run_flex_attention_eagerly()


_BEFORE: dict[str, Callable[[], None]] = {
    "torch": _before_torch,
    "torch.cuda": _before_torch_cuda,
    "torch.distributed.distributed_c10d": _before_torch_distributed,
}
_AFTER: dict[str, Callable[[], None]] = {
    "torch": _after_torch,
    "torch.distributed.distributed_c10d": _after_distributed,
    "torch.nn.attention.flex_attention": _after_flex_attention,
    "triton.runtime.interpreter": _after_triton_interpreter,
}


class _TorchFinder(MetaPathFinder):
    """Find some modules as Python does, and act before or after they are run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _BEFORE and name not in _AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(name, spec.loader)
        return spec


class _ActingLoader(Loader):
    """Load a module with the emulator's part around it."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if before := _BEFORE.get(self._name):
            before()
        self._loader.exec_module(module)
        if after := _AFTER.get(self._name):
            after()

    def __getattr__(self, name: str) -> Any:
        # linecache and pkgutil ask a loader for sources and data.
        return getattr(self._loader, name)


def is_active() -> bool:
    """Return whether this process has emulated devices."""
    return bool(os.environ.get("EMULATED_CUDA")) and BINDINGS_MODULE in sys.modules
