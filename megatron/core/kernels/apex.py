"""The parts of NVIDIA's apex that are used where it is installed; nothing here is imported unless asked for."""

from __future__ import annotations

import warnings
from typing import cast

import torch


def load_fused_adam() -> type[torch.optim.Optimizer] | None:
    """Return apex's fused Adam, or None where apex is absent or broken (with one warning if broken)."""
    try:
        from apex.optimizers import FusedAdam
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        warnings.warn(f"apex is installed but unusable ({error}); torch's fused Adam is used", stacklevel=2)
        return None
    return cast("type[torch.optim.Optimizer]", FusedAdam)
