"""Checks that reject an invalid configuration before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.config.checks.hybrid import flags_of_absent_layers
    from megatron.config.checks.model import SPREAD
    from megatron.config.checks.parallelism import LAYOUT_CHECKS
    from megatron.config.checks.run_checks import NO_PROFILE_FOLDER, find_problems

__getattr__ = lazy_exports(
    __name__,
    {
        "hybrid": "flags_of_absent_layers",
        "model": "SPREAD",
        "parallelism": "LAYOUT_CHECKS",
        "run_checks": "NO_PROFILE_FOLDER find_problems",
    },
)
