"""Run a training script in a process that corrupts its own values when it gets a signal.

``spoiled_script.py SCRIPT ARGUMENTS…`` runs ``SCRIPT ARGUMENTS…``. `WEIGHT_SIGNAL` sets the first element of a
parameter to NaN before a module uses it, and `GRADIENT_SIGNAL` sets the gradient of a module's output to NaN. Other
modules import the signal numbers, so torch is imported only when a `Spoiler` is created.
"""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WEIGHT_SIGNAL = signal.SIGRTMIN + 8
GRADIENT_SIGNAL = signal.SIGRTMIN + 9


class Spoiler:
    """Corruption of the next suitable module that computes with gradients, once per signal."""

    def __init__(self) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._due: int | None = None
        for number in (WEIGHT_SIGNAL, GRADIENT_SIGNAL):
            signal.signal(number, self._note)
        register_module_forward_pre_hook(self._spoil_weight)
        register_module_forward_hook(self._spoil_gradient)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._due = number

    def _spoil_weight(self, module: torch.nn.Module, inputs: object) -> None:
        if self._due != WEIGHT_SIGNAL or not module.training:
            return
        import torch

        if not torch.is_grad_enabled():
            return
        parameter = next((item for item in module.parameters(recurse=False) if item.requires_grad), None)
        if parameter is not None:
            self._due = None
            with torch.no_grad():
                parameter.view(-1)[0] = float("nan")

    def _spoil_gradient(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        # Some layers accumulate parameter gradients into the main gradients themselves, so only gradients of outputs
        # work here.
        if self._due != GRADIENT_SIGNAL:
            return
        import torch

        if isinstance(output, torch.Tensor) and output.requires_grad:
            self._due = None
            output.register_hook(_not_a_number)  # type: ignore[no-untyped-call]


def _not_a_number(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.new_full(gradient.shape, float("nan"))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    spoiler = Spoiler()
    runpy.run_path(sys.argv[0], run_name="__main__")
