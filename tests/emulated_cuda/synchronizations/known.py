"""Calls that are not removed, and calls whose removal nothing reports, each with its reason."""

from __future__ import annotations

TIMING = "timing"
HOST = "host"
RECORDED = "recorded"

APART: dict[str, tuple[str, str]] = {
    # Methods of the same names that have nothing to do with a device.
    "megatron/cli/rank_launcher.py:": (HOST, "processes of a launcher"),
    "megatron/checkpoint/conversion.py:retarget": (HOST, "a description of sizes"),
    "megatron/checkpoint/checkpoint_source.py:untrained_common": (HOST, "a description of sizes"),
    "megatron/core/datasets/micro_batch_reader.py:ReadAhead": (HOST, "threads that read samples"),
    "megatron/data/": (HOST, "processes that prepare data"),
    "megatron/checkpoint/formats/": (HOST, "processes, and descriptions of sizes"),
    "megatron/core/console.py:waiting": (HOST, "the thread that draws"),
    "megatron/core/shared_memory.py:": (HOST, "other ranks; the tensors are in host memory"),
    "megatron/plotting/": (HOST, "a server of records"),
    "megatron/serving/job_queue.py:": (HOST, "threads of a server"),
    "megatron/checkpoint/local_copies.py:": (HOST, "descriptions of files and sizes"),
    "megatron/checkpoint/load.py:choose_streams": (HOST, "a description of sizes"),
    "megatron/checkpoint/save.py:_plain_content": (HOST, "a description of sizes"),
    "megatron/training/checkpointing.py:CheckpointSaver.wait_for_thread:": (HOST, "the thread that writes"),
    "megatron/training/fault_tolerance/inprocess_restart.py:": (HOST, "threads and processes"),
    "megatron/training/fault_tolerance/run_lock.py:": (HOST, "the owner of a folder"),
    "megatron/training/fault_tolerance/watchdog.py:": (HOST, "threads and processes"),
    "megatron/training/callbacks/live_line.py:": (HOST, "the thread that draws"),
    "megatron/verification/faults/": (HOST, "processes into which faults are injected"),
    "megatron/verification/worker_pool.py:": (HOST, "processes that run jobs"),
    "megatron/planner/simulation/": (RECORDED, "a dry run notes waits; there is no device"),
    "megatron/verification/collective_recorder.py:": (RECORDED, "a recorded step sends nothing; there is no device"),
    # Times and marks, which no value depends on.
    "megatron/core/device.py:Device.time_calls:": (TIMING, "the time of some calls"),
    "megatron/core/device.py:_mark_current_stream:": (TIMING, "how far the device has come, for the hang watchdog"),
    "megatron/core/timers.py:": (TIMING, "timers of the training loop"),
    "megatron/cli/doctor/benchmarks.py:time_work": (TIMING, "rates; the values are not read"),
    "megatron/cli/doctor/benchmarks.py:measure_collective": (TIMING, "bandwidths; the values are not read"),
    "megatron/training/callbacks/profiling.py:": (TIMING, "the end of a profile, and the times of a pipeline's passes"),
    "megatron/training/callbacks/stragglers.py:": (TIMING, "the times of an iteration's parts"),
}
"""By the start of a call's name: its kind, and what it waits for."""

_SEND = (
    "with NCCL, wait() makes the current stream wait for the send, and no later work needs that: the sender only reads "
    "a sent tensor, and ProcessGroupNCCL keeps its memory from reuse until the send is done, because callers of isend "
    "need not wait. With gloo the wait is needed, and it bounds the memory of the messages that are in flight"
)

_COMPATIBLE = (
    "no scenario calls the functions with megatron-core's names. With NCCL the wait lets the caller's stream read what "
    "was received"
)
_HELD = (
    "no scenario keeps a model in the caller's process. The weights are read on the current stream, after the last "
    "step's parameters were gathered on another one"
)

NOT_REPORTED: dict[str, str] = {
    "megatron/core/inference/prompt_batch.py:BeamBatch.steps: self.staged.finish()": _SEND,
    "megatron/core/inference/running_batch.py:RunningBatch.step: self.staged.finish()": _SEND,
    "megatron/core/inference/prompt_batch.py:PromptBatch._stop_if_cancelled: self.staged.finish()": _SEND,
    "megatron/core/inference/prompt_batch.py:SampledBatch.run: self.staged.finish()": _SEND,
    "megatron/core/inference/prompt_batch.py:ScoredBatch.run: self.staged.finish()": _SEND,
    "megatron/core/inference/staged_model.py:StagedModel.finish: self._out.finish()": _SEND,
    "megatron/core/optimizer/cpu_offloading.py:HostOffload.finish: self._values.reach(number)": (
        "without --overlap-cpu-optimizer-d2h-h2d it keeps copies from overlapping with updates. Values do not need it: "
        "`_send` waits for the slot's last copy before the host writes to the slot, and `finish` lets the current "
        "stream wait for the last copy, which follows the others on their stream"
    ),
    "megatron/core/pipeline_parallel/executor.py:_Run.run: self.gradients_out.finish()": _SEND,
    "megatron/core/pipeline_parallel/p2p_communication.py:_connect: (link.send(element) if rank == link.sender else "
    "link.receive(element)).wait()": (
        "no work reads the element, and NCCL runs the operations of a communicator in order, so that later messages "
        "follow it. With gloo the wait is needed: the first message could find no connection"
    ),
    "megatron/core/pipeline_parallel/p2p_communication.py:P2PCommunicator._exchange: work.wait()": _COMPATIBLE,
    "megatron/core/pipeline_parallel/p2p_communication.py:P2PCommunicator._exchange_shapes: work.wait()": _COMPATIBLE,
    "megatron/python_api/gpt.py:GPT._open_engine: chunk.finish_param_gather()": _HELD,
    "megatron/python_api/gpt.py:GPT.named_parameters: wrapped.finish_param_gather()": _HELD,
    "megatron/python_api/model_state.py:_tensors: chunk.finish_param_gather()": _HELD,
}
"""By the name of a call whose removal no scenario reports: why it stays."""


def apart(key: str) -> tuple[str, str] | None:
    """Return the kind and the reason of a call that is not removed, or None for one that is."""
    return next((reason for start, reason in APART.items() if key.startswith(start)), None)
