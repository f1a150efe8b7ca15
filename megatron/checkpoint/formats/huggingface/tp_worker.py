"""Worker process of a tensor-parallel model started by a plain Python program.

Requests are JSON lines on standard input, sent to every rank. Every rank replies with one JSON line and the
``num_bytes`` bytes that it names. The first reply reports that the rank is ready. Lines with a ``phase`` before it say
what the rank does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megatron.checkpoint.formats.huggingface.parallelize import load_hugging_face_model
from megatron.checkpoint.formats.huggingface.worker_pool import memory_of
from megatron.core.device import select_device
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.inference import (
    BeamConfig,
    CachedForward,
    Continuation,
    GenerationRequest,
    InferenceEngine,
    SamplingConfig,
    StopRule,
)
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state

WRONG_INPUT = 2
_FAILED = 1
_LOOK_EVERY_S = 0.5


def main(text: str) -> int:
    """Serve until standard input ends, or the program that started this process.

    ``text`` is a JSON object with the model's folder, the rendezvous URL, rank, number of ranks, precision and the
    process id of the program.
    """
    job = json.loads(text)
    output = _take_standard_output()
    # At the end of the program standard input ends, but a rank may wait in a collective, and other processes of the
    # program may hold the pipe.
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    try:
        worker = TensorParallelWorker(job, lambda phase: _reply(output, {"phase": phase}))
        _reply(output, {"phase": "to compute"})
        _reply(output, {})
        for line in sys.stdin:
            try:
                values, payload = worker.answer(json.loads(line))
            except InputError as error:  # the same on every rank, before any communication
                values, payload = {"error": str(error)}, b""
            _reply(output, values, payload)
    except InputError as error:
        _reply(output, {"rejection": str(error)})
        return WRONG_INPUT
    except Exception as error:  # noqa: BLE001 - the program reports it
        if not isinstance(error, torch.OutOfMemoryError):
            traceback.print_exc()
        said = str(error).strip().split("\n")[0]
        _reply(output, {"failure": f"{type(error).__name__}: {said}"})
        return _FAILED
    dist.destroy_process_group()
    return 0


def _take_standard_output() -> BinaryIO:
    """Return the original standard output, reserved for replies; all other output is redirected to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def _reply(output: BinaryIO, values: Mapping[str, Any], payload: bytes = b"") -> None:
    output.write(json.dumps({**values, "num_bytes": len(payload)}).encode() + b"\n" + payload)
    output.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(_FAILED)


def _open_store(job: Mapping[str, Any]) -> Any:
    """Return the store in which the ranks meet. Ranks that reach the store of another program do not disturb it.

    Raises:
        ConfigurationError: another program uses the port.
    """
    url = urlsplit(job["meeting"])
    store: Any
    if url.scheme == "file":
        store = dist.FileStore(job["meeting"].removeprefix("file://"), job["size"])  # type: ignore[attr-defined]
    else:
        assert url.hostname is not None
        assert url.port is not None
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                url.hostname, url.port, job["size"], is_master=job["rank"] == 0, wait_for_workers=False
            )
        except dist.DistNetworkError as error:
            raise ConfigurationError(
                f"master_port={url.port}: the processes cannot meet at {url.hostname}:{url.port} "
                f"({str(error).splitlines()[0]}); use a free port, or omit it"
            ) from error
    return dist.PrefixStore(job["run"], store)  # type: ignore[attr-defined]


class TensorParallelWorker:
    """This rank's shard of a model, and its answers to requests.

    ``begin`` is called with the name of each phase of the start.

    Raises:
        InputError: the shard cannot be loaded.
    """

    def __init__(self, job: Mapping[str, Any], begin: Callable[[str], None]) -> None:
        rank, size = job["rank"], job["size"]
        self.rank = rank
        self.device = select_device(rank)
        self.device.make_current()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        begin(f"to meet the others at {job['meeting']}")
        dist.init_process_group(
            self.device.default_backend,
            store=_open_store(job),
            rank=rank,
            world_size=size,
            device_id=self.device.torch_device if self.device.is_cuda else None,
        )
        state = create_parallel_state(ParallelSizes(tp=size))
        begin("to load its shard")
        model = load_hugging_face_model(job["folder"], state, self.device, job["dtype"])
        self.engine = InferenceEngine(model, state)
        self.forward = CachedForward(model)
        begin("to wait until the others have loaded theirs")
        dist.barrier()  # the folder may be removed after the first reply

    def answer(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the values and the bytes of the reply to a request.

        Raises:
            InputError: the request is invalid.
        """
        match request["kind"]:
            case "generate":
                return {"tokens": [_whole_text(each) for each in self.engine.generate(read_request(request))]}, b""
            case "logits":
                return self._logits(request)
        return memory_of(self.device, self.rank, request["detailed"]), b""

    def _logits(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the shape and dtype of the logits ``[b, s, v]``, and on rank 0 their bytes."""
        tokens, mask, positions = (torch.tensor(request[name]) for name in ("tokens", "mask", "positions"))
        logits = self.forward.logits(
            tokens, mask, positions, num_last=request["num_last"], keeps_cache=request["keeps_cache"]
        )
        values = {"shape": list(logits.shape), "dtype": str(logits.dtype).removeprefix("torch.")}
        if self.rank > 0:
            return values, b""
        return values, logits.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def read_request(values: Mapping[str, Any]) -> GenerationRequest:
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
