"""Calls that are not removed, and calls whose removal nothing reports, each with its reason."""

from __future__ import annotations

TIMING = "timing"
HOST = "host"
RECORDED = "recorded"

APART: dict[str, tuple[str, str]] = {
    # Methods of the same names that have nothing to do with a device.
    "megatron/adoption/": (HOST, "reads programs of other projects"),
    "megatron/commands/training/rank_launcher.py:": (HOST, "processes of a launcher"),
    "megatron/conversion/target_layout.py:": (HOST, "a description of sizes"),
    "megatron/core/datasets/samples/read_ahead.py:": (HOST, "threads that read samples"),
    "megatron/corpus/": (HOST, "processes that prepare data"),
    "megatron/interop/": (HOST, "processes, and descriptions of sizes"),
    "megatron/pictures/": (HOST, "a server of records"),
    "megatron/serving/job_queue.py:": (HOST, "threads of a server"),
    "megatron/training/checkpointing/local_copies/": (HOST, "descriptions of files and sizes"),
    "megatron/training/checkpointing/rng.py:": (HOST, "a description of sizes"),
    "megatron/training/checkpointing/save.py:": (HOST, "a description of sizes"),
    "megatron/training/checkpointing/saver.py:CheckpointSaver.wait_for_thread:": (HOST, "the thread that writes"),
    "megatron/training/process/": (HOST, "threads and processes"),
    "megatron/training/reporting/live_line.py:": (HOST, "the thread that draws"),
    "megatron/verification/faults/": (HOST, "processes into which faults are injected"),
    "megatron/verification/worker_pool.py:": (HOST, "processes that run jobs"),
    "megatron/dry_run/": (RECORDED, "a dry run notes waits; there is no device"),
    "megatron/verification/collective_recorder.py:": (RECORDED, "a recorded step sends nothing; there is no device"),
    # Times and marks, which no value depends on.
    "megatron/core/device.py:Device.time_calls:": (TIMING, "the time of some calls"),
    "megatron/core/device.py:_mark_current_stream:": (TIMING, "how far the device has come, for the hang watchdog"),
    "megatron/core/timers.py:": (TIMING, "timers of the training loop"),
    "megatron/doctor/bandwidth.py:": (TIMING, "bandwidths; the values are not read"),
    "megatron/training/reporting/profiling.py:": (TIMING, "the end of a profile"),
    "megatron/training/reporting/schedule_recorder.py:": (TIMING, "the times of a pipeline's passes"),
    "megatron/training/reporting/stragglers.py:": (TIMING, "the times of an iteration's parts"),
}
"""By the start of a call's name: its kind, and what it waits for."""

NOT_REPORTED: dict[str, str] = {}
"""By the name of a call whose removal no scenario reports: why it stays."""


def apart(key: str) -> tuple[str, str] | None:
    """Return the kind and the reason of a call that is not removed, or None for one that is."""
    return next((reason for start, reason in APART.items() if key.startswith(start)), None)
