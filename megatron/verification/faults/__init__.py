"""Chaos testing: inject faults into a training run repeatedly, and check that nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.verification.faults.campaign import Campaign, Plan, check_folder
    from megatron.verification.faults.injection import CORRUPTIBLE, Fault, Kind, parse_fault
    from megatron.verification.faults.launch import AttackedCommand, small_command

__getattr__ = lazy_exports(
    __name__,
    {
        "campaign": "Campaign Plan check_folder",
        "injection": "CORRUPTIBLE Fault Kind parse_fault",
        "launch": "AttackedCommand small_command",
    },
)
