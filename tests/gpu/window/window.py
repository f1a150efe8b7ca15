"""What a part is given: the device, its sizes, the time that is left, and where findings go."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.core.device import Device
from tests.emulated_cuda.activation import is_active
from tests.gpu.timing import gpu_type
from tests.gpu.window import findings
from tests.gpu.window.findings import append_line, finite
from tests.gpu.window.plan import Part

MEASURED, EMULATED = "measured", "emulated"
_REASON_CHARACTERS = 600
_FRAMES = 4


class Unsupported(Exception):
    """This GPU type or this torch cannot do what was tried; the text says why."""


class Window:
    """Give a part its device and its time, and write what it finds."""

    def __init__(self, part: Part, path: Path, seconds: float, *, small: bool) -> None:
        self.part = part
        self.small = small
        self.is_emulated = is_active()
        self.device = Device("cuda", 0)
        self.device.make_current()
        self.place = self.device.torch_device
        self.gpu_name = torch.cuda.get_device_name(0)
        self.gpu = gpu_type(self.gpu_name)
        self.capability = torch.cuda.get_device_capability(0)
        self.memory_bytes = torch.cuda.get_device_properties(0).total_memory
        # What torch and the project brought is not looked through after each finding.
        gc.collect()
        gc.freeze()
        self._path = path
        self._end = time.monotonic() + seconds
        append_line(path, self._describe())

    def _describe(self) -> findings.Line:
        return {
            "kind": "device",
            "part": self.part.number,
            "source": self.source,
            "name": self.gpu_name,
            "figures_of": self.gpu,
            "capability": f"{self.capability[0]}.{self.capability[1]}",
            "memory_gib": round(self.memory_bytes / 2**30, 1),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }

    @property
    def source(self) -> str:
        """Return what figures of this process are: measured on a GPU, or emulated on a CPU."""
        return EMULATED if self.is_emulated else MEASURED

    def time_left(self) -> float:
        """Return the seconds that are left of the part's planned time; below 0 it should begin nothing more."""
        return self._end - time.monotonic()

    def add(self, name: str, status: str, **known: Any) -> None:
        """Write a finding."""
        line = {"kind": "finding", "part": self.part.number, "name": name, "status": status, "source": self.source}
        line |= finite(known)
        append_line(self._path, line)

    def value(self, name: str, value: float, unit: str, *, key: str | None = None, **known: Any) -> None:
        """Write a figure; ``key`` names the prediction that it is compared with."""
        self.add(name, findings.RECORDED, value=value, unit=unit, **({} if key is None else {"key": key}), **known)

    def close_to(self, name: str, difference: float, tolerance: float, what: str, **known: Any) -> None:
        """Write whether a difference is within its tolerance; NaN never is."""
        status = findings.PASSED if difference <= tolerance else findings.FAILED
        known = {"difference": difference, "tolerance": tolerance, "compared": what, **known}
        if status == findings.FAILED:
            known.setdefault("reason", f"off by {difference:.1e}, and {tolerance:.0e} is allowed")
        self.add(name, status, **known)

    @contextmanager
    def attempt(self, name: str, **known: Any) -> Iterator[None]:
        """Turn whatever is raised into a finding with this name, and give back memory."""
        try:
            yield
        except Unsupported as error:
            self.add(name, findings.UNSUPPORTED, reason=str(error), **known)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises belongs into the report
            text = f"{type(error).__name__}: {str(error).strip()[:_REASON_CHARACTERS]}"
            frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            self.add(
                name,
                findings.FAILED,
                reason=text,
                frames=[f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
                **known,
            )
            traceback.print_exc()
            # The frames hold tensors.
            error.__traceback__ = None
        finally:
            gc.collect()
            self._check_context(name)

    def _check_context(self, name: str) -> None:
        """Give back memory; a kernel that wrote anywhere leaves a process without a usable device.

        Raises:
            RuntimeError: the device cannot be used any more, so that the rest of the part would fail for no reason.
        """
        try:
            self.device.synchronize()
            self.device.empty_cache()
        except RuntimeError as error:
            raise RuntimeError(
                f"the CUDA context is lost after {name!r}, and the rest of the part did not run: {error}"
            ) from error

    def is_time_for(self, name: str, seconds: float = 0.0) -> bool:
        """Return whether there is time for another finding, and write that it is skipped if there is none."""
        if self.time_left() > seconds:
            return True
        self.add(name, findings.SKIPPED, reason="the planned time of this part was up")
        return False
