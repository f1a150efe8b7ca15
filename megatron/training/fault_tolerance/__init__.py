"""Fault tolerance: hang detection, restarts, replacement of ranks, and handling of anomalous steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.training.fault_tolerance.anomaly_detector import AnomalyDetector
    from megatron.training.fault_tolerance.hang_report import (
        HANG_PREFIX,
        HangReport,
        HangReportError,
        describe_communication,
        read_hang_report,
    )
    from megatron.training.fault_tolerance.inprocess_restart import RendezvousMember, train_with_restarts
    from megatron.training.fault_tolerance.processes import (
        KEEPER_NAME,
        ProcessIdentity,
        die_with_launcher,
        find_launcher,
        identify,
        name_of,
        parent_of,
        process_start_time,
    )
    from megatron.training.fault_tolerance.run_lock import FOLDER_RECORD, LockOwner, RunLock, own_folder, read_owner
    from megatron.training.fault_tolerance.step_replay import Rewind
    from megatron.training.fault_tolerance.supervisor import REPLACE, KeptRank, keep_rank
    from megatron.training.fault_tolerance.watchdog import phase_marker, watching

__getattr__ = lazy_exports(
    __name__,
    {
        "anomaly_detector": "AnomalyDetector",
        "hang_report": "HANG_PREFIX HangReport HangReportError describe_communication read_hang_report",
        "inprocess_restart": "RendezvousMember train_with_restarts",
        "processes": (
            "KEEPER_NAME ProcessIdentity die_with_launcher find_launcher identify name_of parent_of process_start_time"
        ),
        "run_lock": "FOLDER_RECORD LockOwner RunLock own_folder read_owner",
        "step_replay": "Rewind",
        "supervisor": "KeptRank REPLACE keep_rank",
        "watchdog": "phase_marker watching",
    },
)
