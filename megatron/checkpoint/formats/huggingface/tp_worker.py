"""Worker process of a tensor-parallel model started by a plain Python program.

Requests are JSON lines on standard input, sent to every rank. Rank 0 replies with one line each; the first reply
reports that all ranks are ready.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from megatron.checkpoint.formats.huggingface.parallelize import load_hugging_face_model
from megatron.core.device import select_device
from megatron.core.errors import InputError
from megatron.core.inference import (
    BeamConfig,
    Continuation,
    GenerationRequest,
    InferenceEngine,
    SamplingConfig,
    StopRule,
)
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state

WRONG_INPUT = 2


def main(argv: list[str]) -> int:
    """Serve until standard input ends; ``argv`` is folder, rendezvous file, rank, number of ranks and precision."""
    folder, meeting_place, rank, size, params_dtype = argv
    answers = _take_standard_output()
    try:
        for answer in _answers(Path(folder), meeting_place, int(rank), int(size), params_dtype or None):
            if rank == "0":
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
    except InputError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        answers.flush()
        return WRONG_INPUT
    return 0


def _take_standard_output() -> TextIO:
    """Return the original standard output, reserved for replies; all other output is redirected to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _answers(folder: Path, meeting_place: str, rank: int, size: int, params_dtype: str | None) -> Iterator[Any]:
    device = select_device(rank)
    device.make_current()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group(device.default_backend, init_method=f"file://{meeting_place}", rank=rank, world_size=size)
    state = create_parallel_state(ParallelSizes(tp=size))
    engine = InferenceEngine(load_hugging_face_model(folder, state, device, params_dtype), state)
    dist.barrier()  # the folder may be removed after the ready message
    yield {"ready": size}
    for line in sys.stdin:
        try:
            yield {"tokens": [_whole_text(each) for each in engine.generate(read_request(json.loads(line)))]}
        except InputError as error:
            yield {"error": str(error)}  # the same on every rank, before any communication
    dist.destroy_process_group()


def read_request(values: dict[str, Any]) -> GenerationRequest:
    """Parse a request from `SpawnedModel`."""
    ends = frozenset(values["end_tokens"])
    beams = None if values["beams"] is None else BeamConfig(**values["beams"])
    return GenerationRequest(
        prompts=tuple(map(tuple, values["prompts"])),
        max_new_tokens=values["max_new_tokens"],
        sampling=SamplingConfig(**values["sampling"]),
        # A continuation includes its end token; beam search reports the end token separately.
        stop=StopRule(closing_tokens=ends) if beams is None else StopRule(end_tokens=ends),
        beams=beams,
    )


def _whole_text(continuation: Continuation) -> list[int]:
    """Return the continuation of a prompt, including its end token."""
    end = continuation.hypotheses[0].end_token if continuation.hypotheses else None
    return continuation.tokens if end is None else [*continuation.tokens, end]
