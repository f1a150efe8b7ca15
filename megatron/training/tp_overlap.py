"""How the chunks of --tp-comm-overlap travel in a run: chosen by the device, or measured on CPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from megatron.core.collectives import all_reduce
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.comm_overlap_config import WHOLE, LinearOverlap, linear_overlap
from megatron.core.tensor_parallel.layers import tensor_parallel_linear
from megatron.core.tensor_parallel.mappings import InputRegion
from megatron.core.tensor_parallel.symmetric_memory import why_no_symmetric_memory
from megatron.training.config.run_config import RunConfig
from megatron.training.process.initialize import Runtime
from megatron.training.recorded_choice import AUTO, recorded_choice

_WORDS = {
    "ring": "in chunks, round a ring",
    "whole": "whole, in no chunks",
    "symmetric-memory": "in chunks, by symmetric memory",
}
_MAX_SIZE = 512
_NUM_ROUNDS = 7
_MAX_SHARE = 0.95
"""Chunks are taken where they need at most this share of the time without: the rest is noise."""


def choose_tp_overlap(config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> RunConfig:
    """Return the configuration with what carries the chunks, on every rank the same, and say why.

    On CUDA it is symmetric memory where the tensor-parallel ranks share it, and a ring else. On a CPU nothing but the
    processes themselves moves a message: there it is measured, unless the checkpoint that the run goes on from says.
    Collective.
    """
    model = config.model
    if not model.tp_comm_overlap or model.tp_comm_overlap_impl not in (AUTO, "symmetric-memory"):
        return config
    if runtime.device.is_cuda:
        reason: str | None = "torch keeps it by names that groups have again after a restart"
        if not config.restart.inprocess_restart:
            reason = why_no_symmetric_memory(runtime.state.tp, runtime.device.has_peers())
        impl, why = ("symmetric-memory", "of its devices") if reason is None else ("ring", reason)
    elif model.tp_comm_overlap_impl != AUTO:
        impl, why = "ring", "there is no symmetric memory on CPU"
    else:
        recorded = recorded_choice(config, runtime, "tp_comm_overlap_impl")
        impl, why = (recorded, "as in the checkpoint") if recorded in ("ring", "whole") else _measured(config, runtime)
    log(f" > tensor-parallel communication beside products: {_WORDS[impl]} ({why})")
    return dataclasses.replace(config, model=dataclasses.replace(model, tp_comm_overlap_impl=impl))


def _measured(config: RunConfig, runtime: Runtime) -> tuple[str, str]:
    model, tp = config.model, runtime.state.tp
    if config.initialization.deterministic_mode:
        return "ring", "nothing is measured with --deterministic-mode"
    length = config.data.seq_length // model.context_parallel_size
    rows = max(tp.size, min(length, _MAX_SIZE) // tp.size * tp.size)
    sizes = rows, config.training.micro_batch_size, min(model.hidden_size, _MAX_SIZE)
    inner = min(model.ffn_hidden_size // tp.size, _MAX_SIZE)
    overlaps = linear_overlap(model, "fc1"), linear_overlap(model, "fc2")
    times = measure_overlap(tp, sizes, inner, overlaps, dtype_from_name(model.params_dtype), model.cpu_matmul)
    slowest = torch.tensor(times, dtype=torch.float64)
    all_reduce(slowest, runtime.state.world, "max")
    chunked, whole = slowest.tolist()
    share = chunked / whole
    return ("ring" if share <= _MAX_SHARE else "whole"), f"measured: chunks take {share:.0%} of the time without"


def measure_overlap(
    tp: Group,
    sizes: tuple[int, int, int],
    inner: int,
    overlaps: tuple[LinearOverlap, LinearOverlap],
    dtype: torch.dtype,
    library: str,
) -> tuple[float, float]:
    """Return this rank's shortest seconds of a feed-forward layer, forward and backward: with chunks, and without.

    Rounds alternate, as many on every rank. Shapes: ``sizes`` are ``s, b, h``. Collective.
    """
    length, batch, width = sizes
    # Ones: no random number is drawn that the run would draw.
    x = torch.ones(length // tp.size, batch, width, dtype=dtype, requires_grad=True)
    up = torch.ones(inner, width, dtype=dtype, requires_grad=True)
    down = torch.ones(width, inner, dtype=dtype, requires_grad=True)

    def run(overlap: Sequence[LinearOverlap]) -> float:
        before = time.perf_counter()
        hidden = tensor_parallel_linear(x, up, None, InputRegion.SEQUENCE, tp, library=library, overlap=overlap[0])
        output = tensor_parallel_linear(
            hidden, down, None, InputRegion.SPLIT, tp, library=library, overlap=overlap[1], scatters=True
        )
        torch.autograd.backward(output, x.detach())
        return time.perf_counter() - before

    rounds = [(run(overlaps), run((WHOLE, WHOLE))) for _ in range(_NUM_ROUNDS)]
    chunked, whole = zip(*rounds)
    return min(chunked), min(whole)
