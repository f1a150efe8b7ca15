"""Autotuning at start-up: choose the CPU threads, the CPU GEMM backend and the chunks of --tp-comm-overlap."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron.checkpoint import candidate_folders, is_release
from megatron.config import RunConfig, recorded_config
from megatron.core.available_cores import count_cores, measure_idle_cores, threads_per_process
from megatron.core.collectives import all_reduce, any_rank, broadcast_object
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.main_grad import MainGrad, attach_main_grad
from megatron.core.object_store import as_path
from megatron.core.ops import (
    Float8Recipe,
    gradient_library,
    grouped_product,
    has_library,
    has_scaled_products,
    linear,
)
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import (
    WHOLE,
    InputRegion,
    LinearOverlap,
    linear_overlap,
    tensor_parallel_linear,
    unchunked_gemms,
    why_no_symmetric_memory,
)
from megatron.core.transformer import DecoderConfig
from megatron.training.initialize import LaunchEnvironment, Runtime, omp_num_threads

AUTO = "auto"


def recorded_choice(config: RunConfig, runtime: Runtime, field: str) -> str | None:
    """Return a model's field in the checkpoint that the run resumes from, as rank 0 reads it; collective.

    It is ``auto`` if the checkpoint does not record the field, and None if the run does not resume.
    """
    world = runtime.state.world
    record = _recorded(config) if world.is_first else None
    agreed: str | None = broadcast_object(
        None if record is None else str(_part(record, "model").get(field, AUTO)), world
    )
    return agreed


def _recorded(config: RunConfig) -> Mapping[str, Any] | None:
    """Read the configuration in the checkpoint that the run resumes from; None if the run does not resume."""
    if config.checkpoint.load is None or config.checkpoint.finetune:
        return None
    try:
        folders = candidate_folders(as_path(config.checkpoint.load), config.checkpoint.ckpt_step)
        return None if not folders or is_release(folders[0]) else recorded_config(folders[0])
    except (InputError, LookupError, TypeError, ValueError):
        return {}  # loading the checkpoint reports what is wrong with it


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def choose_num_threads(
    config: RunConfig, runtime: Runtime, launch: LaunchEnvironment, log: Callable[[str], None]
) -> RunConfig:
    """Set the number of CPU threads of this process, the same on every rank, and log why; collective.

    ``--num-threads`` comes first. On a CPU it is followed by ``OMP_NUM_THREADS``, by the number in the checkpoint that
    the run resumes from on as many processes, since the number changes how operations round, and by the share of each
    process in the idle cores of its node. On CUDA each of several processes has one thread, as under torchrun.
    """
    number = config.initialization.num_threads
    if number is not None:
        torch.set_num_threads(number)
        why = "--num-threads"
    elif runtime.device.is_cuda:
        if launch.local_world_size > 1 and not omp_num_threads():
            torch.set_num_threads(1)
        return config
    elif omp_num_threads():
        number, why = torch.get_num_threads(), "OMP_NUM_THREADS"
    else:
        number, why = _free_threads(config, runtime, launch.local_world_size)
        torch.set_num_threads(number)
    log(f" > CPU threads per process: {number} ({why})")
    return dataclasses.replace(config, initialization=dataclasses.replace(config.initialization, used_threads=number))


def _free_threads(config: RunConfig, runtime: Runtime, num_processes: int) -> tuple[int, str]:
    """Return the threads of each of a node's processes, and the reason; --deterministic-mode ignores the load."""
    world = runtime.state.world
    recorded = broadcast_object(_recorded_threads(config) if world.is_first else None, world)
    cores, most = count_cores(), torch.get_num_threads()
    idle = None if config.initialization.deterministic_mode else measure_idle_cores()
    limits = [threads_per_process(most, cores, idle, num_processes), max(1, cores // num_processes)]
    agreed = torch.tensor(limits)
    all_reduce(agreed, world, "min")
    number, limit = agreed.tolist()
    load = f"{cores} cores" + ("" if idle is None else f", {max(cores - idle, 0.0):.1f} of them busy")
    if num_processes > 1:
        load += f", {num_processes} processes"
    if recorded is None or recorded > limit:
        return number, load
    if recorded == number:
        return number, f"as in the checkpoint; {load}"
    return recorded, f"as in the checkpoint; {load}: --num-threads {number} may be faster, and rounds differently"


def _recorded_threads(config: RunConfig) -> int | None:
    """Return the number of threads in the checkpoint that the run resumes from, if it had as many processes."""
    record = _recorded(config) or {}
    number = _part(record, "initialization").get("used_threads")
    return number if record.get("world_size") == config.world_size and type(number) is int and number > 0 else None


_LIBRARIES = ("onednn", "mkl")
_MIXED = "mixed"
_MAX_SIZE = 512
"""Larger GEMMs have nearly the same speed ratio, and too few of them fit into the time for a stable minimum."""
_MIN_OPERATIONS = 1 << 25
"""For smaller GEMMs the difference is noise, so the default is kept."""
_MIN_ROUNDS, _BUDGET_S = 3, 0.25
_MAX_SHARE = 0.95
"""A backend replaces the default only if it needs at most this fraction of the default's time."""


def choose_library(config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> RunConfig:
    """Choose the CPU GEMM backend, the same on every rank; collective.

    The command line comes first, then the checkpoint that the run resumes from (the default, if it records none), then
    the fastest backend in a measurement.

    Raises:
        ConfigurationError: torch lacks the backend of the command line on some node's processor. Every rank raises it.
    """
    model, world = config.model, runtime.state.world
    if runtime.device.is_cuda:
        return config
    dtype = dtype_from_name(model.params_dtype)

    def is_missing(library: str) -> bool:
        return any_rank(library != AUTO and not has_library(library, dtype), world)

    if model.cpu_gemm_backend != AUTO:
        if is_missing(model.cpu_gemm_backend):
            raise ConfigurationError(
                f"--cpu-gemm-backend {model.cpu_gemm_backend}: torch does not have this library for "
                f"{model.params_dtype} on this CPU; use --cpu-gemm-backend auto"
            )
        return config
    library, origin = recorded_choice(config, runtime, "cpu_gemm_backend"), "as in the checkpoint"
    if library is not None and is_missing(library):
        log(
            f"WARNING: the checkpoint's run computed GEMMs with {library}, which torch does not have for "
            f"{model.params_dtype} on this CPU; results will differ in the last bits"
        )
        library = AUTO
    if library is None:
        library, origin = broadcast_object(_quicker(config, dtype), world), "measured"
        library = AUTO if is_missing(library) else library
    if library == AUTO:
        return config
    log(f" > GEMMs on CPU: {library} ({origin})")
    return dataclasses.replace(config, model=dataclasses.replace(model, cpu_gemm_backend=library))


def _quicker(config: RunConfig, dtype: torch.dtype) -> str:
    """Return the backend with the fastest GEMMs of a layer's attention and feed-forward, or auto if the default is.

    In a model with experts, the GEMMs are an expert's, with the rows that each expert gets under a balanced load.
    """
    model = config.model
    rows = config.data.seq_length * config.training.micro_batch_size // model.context_parallel_size
    width, inner, groups = model.hidden_size, model.ffn_hidden_size // model.tensor_model_parallel_size, None
    num_operations = 2 * rows * width * inner
    if model.moe.num_experts is not None:
        sizes = model.parallel_sizes
        width, inner = model.expert_input_size, model.moe.moe_ffn_hidden_size // sizes.expert_tp
        choices = rows * model.moe.moe_router_topk * sizes.ep * sizes.expert_tp // sizes.tp
        num_operations = 2 * choices * width * inner // sizes.ep
        rows = max(choices // model.moe.num_experts, 1)
        groups = min(model.moe.num_experts // sizes.ep, max(_MAX_SIZE // rows, 1))
    is_small = num_operations < _MIN_OPERATIONS
    if is_small or config.initialization.deterministic_mode or not all(has_library(n, dtype) for n in _LIBRARIES):
        return AUTO
    layers = [(width, inner), (inner, width)]
    if groups is None and not model.mla.multi_latent_attention:
        shards = model.tensor_model_parallel_size
        for own in model.attention_shapes:
            heads = own.query_projection_size + own.gate_projection_size + own.kv_projection_size
            layers += [(width, (heads + own.value_projection_size) // shards), (own.context_size // shards, width)]
    capped = [(min(fan_in, _MAX_SIZE), min(fan_out, _MAX_SIZE)) for fan_in, fan_out in layers]
    times = measure_libraries(min(rows, _MAX_SIZE), capped, dtype, groups)
    default, other = _LIBRARIES if dtype is torch.float32 else _LIBRARIES[::-1]
    quicker = min((other, _MIXED), key=lambda choice: _shortest(times[choice]))
    return quicker if is_quicker(times[quicker], times[default]) else AUTO


def is_quicker(rounds: Sequence[Sequence[float]], default_rounds: Sequence[Sequence[float]]) -> bool:
    """Return whether a backend is faster than the default by more than noise.

    The minimum over all rounds counts for each GEMM, because other load on the node only makes times longer.
    """
    return _shortest(rounds) <= _MAX_SHARE * _shortest(default_rounds)


def _shortest(rounds: Sequence[Sequence[float]]) -> float:
    return math.fsum(min(times) for times in zip(*rounds))


def measure_libraries(
    rows: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype, groups: int | None = None
) -> dict[str, list[list[float]]]:
    """Measure the seconds of each GEMM of linear layers, forward and backward, by backend and round.

    ``sizes`` are the numbers of input and output features of each linear layer. With ``groups`` there are that many
    experts, each with ``rows`` rows. Backends alternate, so that other load affects them equally. The mixed choice is
    computed from both and not measured again.
    """
    make = _products_of if groups is None else partial(_grouped_products_of, groups)
    products: list[Callable[[str], object]] = []
    for fan_in, fan_out in sizes:
        products += make(rows, fan_in, fan_out, dtype)
    times: dict[str, list[list[float]]] = {library: [] for library in _LIBRARIES}
    start = time.perf_counter()
    while len(times[_LIBRARIES[0]]) < _MIN_ROUNDS or time.perf_counter() - start < _BUDGET_S:
        for measured in times.values():
            measured.append([])
        for product in products:
            for library, measured in times.items():
                before = time.perf_counter()
                product(library)
                measured[-1].append(time.perf_counter() - before)
    of_choice = [gradient_library(_MIXED) if number % 3 == 2 else _LIBRARIES[0] for number in range(len(products))]
    mixed = [
        [times[library][number][place] for place, library in enumerate(of_choice)]
        for number in range(len(times[_LIBRARIES[0]]))
    ]
    return {**times, _MIXED: mixed}


def _products_of(rows: int, fan_in: int, fan_out: int, dtype: torch.dtype) -> list[Callable[[str], object]]:
    """Create the three GEMMs of a linear layer: output, input gradient and accumulated weight gradient."""
    # Ones, because random numbers would advance the run's random streams.
    x, grad = torch.ones(rows, fan_in, dtype=dtype), torch.ones(rows, fan_out, dtype=dtype)
    weight = torch.ones(fan_out, fan_in, dtype=dtype)
    main_grad = MainGrad(torch.empty_like(weight, dtype=arithmetic_dtype(dtype)))

    def accumulate(library: str) -> None:
        main_grad.reset()
        main_grad.add_matmul(grad.t(), x, library)

    return [
        lambda library: linear(x, weight, library=library),
        lambda library: linear(grad, weight.t(), library=library),
        accumulate,
    ]


def _grouped_products_of(
    groups: int, rows: int, fan_in: int, fan_out: int, dtype: torch.dtype
) -> list[Callable[[str], object]]:
    """Create the three grouped GEMMs of the experts' linear layers."""
    x, grad = torch.ones(groups * rows, fan_in, dtype=dtype), torch.ones(groups * rows, fan_out, dtype=dtype)
    weight, counts = torch.ones(groups, fan_out, fan_in, dtype=dtype), [rows] * groups
    main_grad = MainGrad(torch.empty_like(weight, dtype=arithmetic_dtype(dtype)))

    def accumulate(library: str) -> None:
        main_grad.reset()
        main_grad.add_grouped_matmul(grad, x, counts, library)

    return [
        lambda library: grouped_product(x, weight, counts, library),
        lambda library: grouped_product(grad, weight.transpose(1, 2), counts, library),
        accumulate,
    ]


_WORDS = {
    "ring": "in chunks, in a ring",
    "whole": "not in chunks",
    "symmetric-memory": "in chunks, with symmetric memory",
}
_MAX_OVERLAP_SIZE = 512
_NUM_ROUNDS = 7
_MAX_OVERLAP_SHARE = 0.95
"""Overlapped chunks are used only if they need at most this fraction of the time without them, to exclude noise."""


def choose_tp_overlap(config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> RunConfig:
    """Choose the implementation of the tensor-parallel overlap, the same on every rank, and log why; collective.

    On CUDA it is symmetric memory if the tensor-parallel ranks share it, and otherwise a ring. On a CPU, where the
    processes themselves move the messages, it is measured, unless the checkpoint that the run resumes from records it.
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
    whole = None if impl == "whole" else _unchunked_gemms(model, impl)
    but = "" if whole is None else f"; {whole} are not split into chunks"
    log(f" > tensor-parallel communication overlapped with GEMMs: {_WORDS[impl]} ({why}){but}")
    return dataclasses.replace(config, model=dataclasses.replace(model, tp_comm_overlap_impl=impl))


def _unchunked_gemms(model: DecoderConfig, impl: str) -> str | None:
    """Return the quantized GEMMs that this device does not split into chunks, or None."""
    if impl == "symmetric-memory" and model.fp8.fp8_format is not None:
        recipe = Float8Recipe.of(model.fp8)
        # Without GEMMs of quantized operands nothing is multiplied in symmetric memory.
        if not has_scaled_products(recipe.blocks, recipe.weight_blocks, "cuda"):
            impl = "ring"
    return unchunked_gemms(model.fp8, impl)


def _measured(config: RunConfig, runtime: Runtime) -> tuple[str, str]:
    model, tp = config.model, runtime.state.tp
    if config.initialization.deterministic_mode:
        return "ring", "nothing is measured with --deterministic-mode"
    length = config.data.seq_length // model.context_parallel_size
    rows = max(tp.size, min(length, _MAX_OVERLAP_SIZE) // tp.size * tp.size)
    sizes = rows, config.training.micro_batch_size, min(model.hidden_size, _MAX_OVERLAP_SIZE)
    inner = min(model.ffn_hidden_size // tp.size, _MAX_OVERLAP_SIZE)
    overlaps = linear_overlap(model, "fc1"), linear_overlap(model, "fc2")
    times = measure_overlap(tp, sizes, inner, overlaps, dtype_from_name(model.params_dtype), model.cpu_gemm_backend)
    slowest = torch.tensor(times, dtype=torch.float64)
    all_reduce(slowest, runtime.state.world, "max")
    chunked, whole = slowest.tolist()
    share = chunked / whole
    chosen = "ring" if share <= _MAX_OVERLAP_SHARE else "whole"
    return chosen, f"measured: chunks take {share:.0%} of the time without chunks"


def measure_overlap(
    tp: Group,
    sizes: tuple[int, int, int],
    inner: int,
    overlaps: tuple[LinearOverlap, LinearOverlap],
    dtype: torch.dtype,
    library: str,
) -> tuple[float, float]:
    """Measure two feed-forward layers, forward and backward, with and without overlapped chunks; collective.

    Without chunks, a weight gradient of one layer overlaps with a gather of the other. The result is this rank's
    minimum of seconds for each. Rounds alternate, with the same number on every rank. Shapes: ``sizes`` are ``s, b,
    h``.
    """
    length, batch, width = sizes
    # Ones, because random numbers would advance the run's random streams.
    x = torch.ones(length // tp.size, batch, width, dtype=dtype, requires_grad=True)
    layers = []
    for _ in range(2):
        # Each sum is 1, so that no value overflows.
        up = torch.nn.Parameter(torch.full((inner, width), 1.0 / width, dtype=dtype))
        down = torch.nn.Parameter(torch.full((width, inner), 1.0 / (inner * tp.size), dtype=dtype))
        layers.append((up, down))
        for weight in layers[-1]:
            attach_main_grad(weight, MainGrad(torch.zeros_like(weight)))

    def run(overlap: Sequence[LinearOverlap]) -> float:
        before = time.perf_counter()
        output = x
        for up, down in layers:
            hidden = tensor_parallel_linear(
                output, up, None, InputRegion.SEQUENCE, tp, library=library, overlap=overlap[0]
            )
            output = tensor_parallel_linear(
                *(hidden, down, None, InputRegion.SPLIT, tp),
                library=library,
                overlap=overlap[1],
                scatters=True,
                delays_weight_grad=not overlap[1].backward,
            )
        torch.autograd.backward(output, x.detach())
        return time.perf_counter() - before

    rounds = [(run(overlaps), run((WHOLE, WHOLE))) for _ in range(_NUM_ROUNDS)]
    chunked, whole = zip(*rounds)
    return min(chunked), min(whole)
