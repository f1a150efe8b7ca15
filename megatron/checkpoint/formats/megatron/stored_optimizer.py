"""Read the optimizer state of each parameter from a rank's files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.formats.megatron.parameter_keys import flatten_keys, is_fused_key, stacked
from megatron.checkpoint.formats.megatron.rank_files import RankFile
from megatron.checkpoint.formats.megatron.stage_parameters import LocalParameter
from megatron.checkpoint.formats.megatron.torch_file_reader import LazyTensor, TorchFile
from megatron.core.errors import CheckpointError

ALIGNMENT = 64
"""Alignment of each parameter's start, in elements."""


@dataclass(frozen=True)
class FlatBuffer:
    """First element of every parameter, in the caller's order, and the number of elements of the buffer."""

    starts: tuple[int, ...]
    num_elements: int


def plan_flat_buffer(sizes: Sequence[int], bucket_size: int | None, alone: Collection[int] = ()) -> FlatBuffer:
    """Lay out parameters of ``sizes`` elements in reverse order, bucket by bucket.

    A bucket ends with the parameter that brings it to ``bucket_size`` elements (None: never). Parameters listed in
    ``alone`` (a tied embedding in a pipeline) have a bucket each. The file leaves out the padding after a bucket, so a
    parameter is aligned to 64 elements only relative to its own bucket.
    """
    starts = [0] * len(sizes)
    bucket_start = end = 0
    is_empty = True
    for index in reversed(range(len(sizes))):
        aligned = -(-end // ALIGNMENT) * ALIGNMENT
        if index in alone and not is_empty:
            # The bucket is closed at this parameter's aligned start; only in this case is the padding kept.
            bucket_start, end = bucket_start + aligned, 0
            aligned = 0
        starts[index] = bucket_start + aligned
        end = aligned + sizes[index]
        is_empty = False
        if index in alone or (bucket_size is not None and end >= bucket_size):
            bucket_start, end = bucket_start + end, 0
            is_empty = True
    return FlatBuffer(tuple(starts), bucket_start + end)


_FLOAT8_STEP, _FLOAT8_SMALLEST = 2.0**-4, 2.0**-17
"""Relative rounding error of E4M3; for tiny values relative to the largest value with the same scale."""


def is_weight_of(main: torch.Tensor, weight: torch.Tensor, in_float8: torch.Tensor | None = None) -> bool:
    """Return whether a main parameter's element rounds to a weight's element.

    With ``in_float8``, the whole main parameter, the weights may also have been gathered in FP8 (`--fp8-param-gather`).
    Such a weight has E4M3's significand of four bits, since its scale is a power of two.

    Shapes: ``main, weight``: one element each.
    """
    rounded = main.to(weight.dtype)
    if bool((rounded == weight).all()) or (bool(rounded.isnan().all()) and bool(weight.isnan().all())):
        return True
    significand = 16.0 * torch.frexp(weight.float()).mantissa
    if in_float8 is None or not torch.equal(significand, significand.round()):
        return False
    apart, size = (rounded.float() - weight.float()).abs(), rounded.float().abs()
    return bool((apart <= _FLOAT8_STEP * size).all()) or bool((apart <= _FLOAT8_SMALLEST * in_float8.abs().max()).all())


def may_be_in_float8(arguments: Mapping[str, Any]) -> bool:
    """Return whether the weights may have been gathered in FP8; Megatron-LM's arguments record it."""
    return arguments.get("fp8_param_gather") is not False


MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
FLAT_STATES = {"param": "main_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Tensors of a flat buffer and the kinds of state that they hold."""


@dataclass(frozen=True)
class StoredState:
    """One tensor of the optimizer state with its parameter, kind and location."""

    parameter: LocalParameter
    kind: str
    file: TorchFile
    tensor: LazyTensor


@dataclass(frozen=True)
class OptimizerScalars:
    """Number of optimizer steps, and the state of a dynamic loss scale, if there is one."""

    num_steps: int
    grad_scaler: Mapping[str, Any]


def has_optimizer(rank: RankFile) -> bool:
    """Return whether a rank's file has optimizer state that can be assigned to parameters.

    This is not possible for experts fused in one tensor, as in the legacy grouped GEMM.
    """
    if any(is_fused_key(key) for name in rank.file.value if str(name).startswith("model") for key in _keys(rank, name)):
        return False
    return isinstance(rank.file.value.get("optimizer"), (Mapping, list))


def _keys(rank: RankFile, name: str) -> list[str]:
    return [key for key, _ in flatten_keys(rank.file.value[name])]


def stored_states(rank: RankFile, chunks: Sequence[Sequence[LocalParameter]]) -> Iterator[StoredState]:
    """Yield a rank's optimizer state tensors; ``chunks`` are its parameters in file order.

    Raises:
        CheckpointError: the state does not match the parameters.
    """
    optimizers = rank.file.value["optimizer"]
    if not isinstance(optimizers, list):
        optimizers = [optimizers]
    elif len(optimizers) > 2:
        raise CheckpointError(
            f"{rank.file.path}: it contains {len(optimizers)} optimizers for parts of a model; only one optimizer is "
            "supported"
        )
    flat: Any = None if rank.flat_optimizer is None else rank.flat_optimizer.value
    for number, (optimizer, own) in enumerate(zip(optimizers, optimized_apart(chunks, len(optimizers) == 2))):
        if rank.is_copy and len(optimizers) == 2 and number == 0:
            continue  # parameters other than experts
        if rank.flat_optimizer is not None:
            yield from _flat_states(rank, rank.flat_optimizer, flat[number] if isinstance(flat, list) else flat, own)
        else:
            yield from _states_by_parameter(rank, optimizer, own)


def optimizer_scalars(rank: RankFile) -> OptimizerScalars:
    return scalars_of(rank.file.value, lambda value: _number(rank.file, value))


def scalars_of(shared: Mapping[str, Any], number: Callable[[Any], Any]) -> OptimizerScalars:
    """Return the step count and the loss scale in a file's values; ``number`` reads a value that may be a tensor."""
    optimizer = shared["optimizer"]
    if isinstance(optimizer, list):
        optimizer = optimizer[0]
    inner = _inner(optimizer)
    steps: list[Any] = [group["step"] for group in inner["param_groups"] if group.get("step") is not None]
    state = inner.get("state", {})
    steps += [entry["step"] for entry in state.values() if isinstance(entry, Mapping) and "step" in entry]
    if "common_step" in state:
        steps.append(state["common_step"])
    scaler = {name: number(value) for name, value in optimizer.get("grad_scaler", {}).items()}
    if "scale" in scaler:
        scaler["scale"] = float(scaler["scale"])
    num_steps = int(number(steps[0])) if steps else int(shared.get("iteration", 0))
    return OptimizerScalars(num_steps, scaler)


def optimized_apart(
    chunks: Sequence[Sequence[LocalParameter]], experts_apart: bool
) -> list[list[Sequence[LocalParameter]]]:
    """Return the trained parameters of each chunk, once per optimizer.

    With expert parallelism (``experts_apart``) the experts have a separate, second optimizer.
    """
    trained = [[parameter for parameter in chunk if parameter.is_trained] for chunk in chunks]
    if not experts_apart:
        return [list(trained)]
    return [[[p for p in chunk if p.is_expert == is_expert] for chunk in trained] for is_expert in (False, True)]


def in_optimizer_order(chunks: Sequence[Sequence[LocalParameter]]) -> list[list[LocalParameter]]:
    """Return the parameters with weight decay and those without, each over all chunks."""
    parameters = [parameter for chunk in chunks for parameter in chunk if parameter.is_trained]
    return [[p for p in parameters if p.is_decayed], [p for p in parameters if not p.is_decayed]]


def flat_bucket_size(arguments: Mapping[str, Any], pp_rank: int, chunk: int, num_elements: int) -> int | None:
    """Return the bucket size of Megatron-LM, or None if the chunk's buffer is a single bucket."""
    if not arguments.get("overlap_grad_reduce") or pp_rank > 0 or chunk > 0:
        return None
    if arguments.get("ddp_num_buckets"):
        return max(1, num_elements // int(arguments["ddp_num_buckets"]))
    if arguments.get("ddp_bucket_size"):
        return int(arguments["ddp_bucket_size"])
    replicas = int(arguments.get("data_parallel_size") or 1) * int(arguments.get("context_parallel_size") or 1)
    return max(40_000_000, 1_000_000 * replicas)


def alone_in_bucket(parameters: Sequence[LocalParameter]) -> set[int]:
    """Return the indices of parameters that have a bucket of their own: embeddings tied over two stages."""
    return {place for place, parameter in enumerate(parameters) if parameter.is_tied}


def _inner(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the wrapped torch optimizer."""
    for name in ("optimizer", "optimizer_state_dict"):
        if isinstance(optimizer.get(name), Mapping):
            inner: Mapping[str, Any] = optimizer[name]
            return inner
    return optimizer


def _number(file: TorchFile, value: Any) -> Any:
    return file.view(value).item() if isinstance(value, LazyTensor) else value


def _states_by_parameter(
    rank: RankFile, optimizer: Mapping[str, Any], chunks: Sequence[Sequence[LocalParameter]]
) -> Iterator[StoredState]:
    inner = _inner(optimizer)
    groups = [group["params"] for group in inner["param_groups"]]
    ordered = in_optimizer_order(chunks)
    if len(groups) != len(ordered) or [len(group) for group in groups] != [len(own) for own in ordered]:
        groups, ordered = [g for g in groups if g], [o for o in ordered if o]
    if [len(group) for group in groups] != [len(parameters) for parameters in ordered]:
        raise CheckpointError(
            f"{rank.file.path}: the optimizer has parameter groups of {[len(group) for group in groups]} parameters, "
            f"but the model has {[len(parameters) for parameters in ordered]} parameters with and without weight decay"
        )
    for group, parameters in zip(groups, ordered):
        for number, parameter in zip(group, parameters):
            for kind in MOMENTS:
                tensor = inner["state"].get(number, {}).get(kind)
                if isinstance(tensor, LazyTensor):
                    yield StoredState(parameter, kind, rank.file, _shaped(tensor, parameter, rank))
    main = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    if main is not None:
        main = [tensors for tensors in main if tensors] if len(main) != len(ordered) else main
        for tensors, parameters in zip(main, ordered, strict=True):
            for tensor, parameter in zip(tensors, parameters, strict=True):
                yield StoredState(parameter, "main_param", rank.file, _shaped(tensor, parameter, rank))


def _shaped(tensor: LazyTensor, parameter: LocalParameter, rank: RankFile) -> LazyTensor:
    if tensor.shape != parameter.stored_shape:
        raise CheckpointError(
            f"{rank.file.path}: the optimizer state of {parameter.key} has shape {list(tensor.shape)}, but the "
            f"parameter has shape {list(parameter.stored_shape)}"
        )
    return stacked(tensor) if parameter.is_expert else tensor


def _flat_states(
    rank: RankFile, file: TorchFile, value: Any, chunks: Sequence[Sequence[LocalParameter]]
) -> Iterator[StoredState]:
    if not isinstance(value, Mapping) or not value.get("buckets_coalesced"):
        raise CheckpointError(
            f"{file.path} has the optimizer layout that Megatron wrote before February 2024, which is not supported"
        )
    for number, parameters in enumerate(chunks):
        if not parameters:
            continue  # no experts
        if number not in value:
            raise CheckpointError(f"{file.path} does not contain buffer {number}, the buffer of model chunk {number}")
        buffers = list(value[number].values())
        if len(buffers) != 1:
            raise CheckpointError(f"{file.path}: buffer {number} has {len(buffers)} dtypes; one is expected")
        tensors = buffers[0]
        layout = _find_layout(rank, file, number, parameters, tensors)
        is_half = any(t.dtype in (torch.float16, torch.bfloat16) for t in rank.chunks[number].values())
        for name, kind in FLAT_STATES.items():
            if kind == "main_param" and not is_half:
                continue  # the weights themselves, which the model file also holds
            for parameter, start in zip(parameters, layout.starts):
                yield StoredState(parameter, kind, file, tensors[name].flat_part(start, parameter.local_shape))


def _find_layout(
    rank: RankFile, file: TorchFile, number: int, parameters: Sequence[LocalParameter], tensors: Mapping[str, Any]
) -> FlatBuffer:
    """Return the layout that matches the buffer's length and the positions of the weights in it."""
    sizes = [parameter.num_elements for parameter in parameters]
    by_arguments = flat_bucket_size(rank.arguments, rank.pp_rank, number, sum(sizes))
    alone = alone_in_bucket(parameters)
    length = tensors["param"].shape[0]
    layouts = [
        plan_flat_buffer(sizes, bucket_size, own_bucket)
        for own_bucket in (alone, set[int]())
        for bucket_size in (by_arguments, None)
    ]
    fitting = [layout for layout in layouts if layout.num_elements == length]
    for in_float8 in (False, True) if may_be_in_float8(rank.arguments) else (False,):
        for layout in fitting:
            if _puts_weights_right(rank, file, number, parameters, tensors, layout, in_float8=in_float8):
                return layout
    raise CheckpointError(
        f"{file.path}: buffer {number} has {length} elements, which does not match Megatron's layout of the "
        f"{sum(sizes)} parameter elements of {rank.file.path}"
    )


def _puts_weights_right(
    rank: RankFile,
    file: TorchFile,
    number: int,
    parameters: Sequence[LocalParameter],
    tensors: Mapping[str, Any],
    layout: FlatBuffer,
    *,
    in_float8: bool,
) -> bool:
    """Return whether the first and last element of every parameter in the buffer match the model file."""
    flat = file.view(tensors["param"])
    for parameter, start in zip(parameters, layout.starts):
        weight = rank.file.view(rank.chunks[number][parameter.key]).reshape(-1)
        of_parameter = flat[start : start + parameter.num_elements]
        for at in (0, -1):
            if not is_weight_of(of_parameter[at], weight[at], of_parameter if in_float8 else None):
                return False
    return True
