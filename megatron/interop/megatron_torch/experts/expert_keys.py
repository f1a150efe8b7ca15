"""The experts of a layer in Megatron's files, which have them by themselves, and the one tensor that stacks them here.

Megatron names them in three ways: one module after the other (``local_experts.0.linear_fc1.weight``), as
transformer-engine groups them (``linear_fc1.weight0``), and all in one tensor (``weight1``, ``weight2``), whose columns
are the output features. The first is the key of a parameter here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box, ParamSpec, Piece
from megatron.interop.megatron_torch.stored_values import LazyTensor

_SEQUENTIAL = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.weight([12])")


CHOOSING_BIAS = ".router.expert_bias"
"""How the name of the bias ends that only chooses experts: it has no gradient, no optimizer state, and float32."""


def is_expert_key(key: str) -> bool:
    """Tell whether a key is that of a parameter of one expert."""
    return _SEQUENTIAL.fullmatch(key) is not None


def expert_number(key: str) -> int | None:
    """Return the number, in its file, of the expert that a parameter belongs to; None where it is of none."""
    match = _SEQUENTIAL.fullmatch(key)
    return None if match is None else int(match[2])


def is_fused_key(key: str) -> bool:
    """Tell whether a key is that of a tensor which holds one linear layer of all experts."""
    return _FUSED.fullmatch(key) is not None


def grouped_key(key: str) -> str:
    """Return the key that a parameter has where experts are grouped; ``key`` itself where it is of no expert."""
    match = _SEQUENTIAL.fullmatch(key)
    return key if match is None else f"{match[1]}.{match[3]}.{match[4]}{match[2]}"


def expert_tensors(key: str, tensor: LazyTensor, num_experts: int | None) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the parameters of experts that a tensor holds, each with a first dim of 1; none where it is of no expert.

    ``num_experts`` is the number of experts in the file, as far as it is known.

    Raises:
        CheckpointError: the tensor does not divide into so many experts.
    """
    found = _SEQUENTIAL.fullmatch(key)
    if found is not None:
        yield key, stacked(tensor)
        return
    found = _GROUPED.fullmatch(key)
    if found is not None:
        yield f"{found[1]}.local_experts.{found[4]}.{found[2]}.{found[3]}", stacked(tensor)
        return
    found = _FUSED.fullmatch(key)
    if found is None:
        return
    # The same bytes are [experts, in, out] in both.
    width_dim = 0 if found[2] == "1" else 1
    if num_experts is None or len(tensor.shape) != 2 or tensor.num_elements % (tensor.shape[width_dim] * num_experts):
        raise CheckpointError(f"{key} {list(tensor.shape)} does not divide into {num_experts} experts")
    per_expert = tensor.num_elements // num_experts
    inputs = tensor.shape[0] if width_dim == 0 else per_expert // tensor.shape[1]
    outputs = per_expert // inputs
    for number in range(num_experts):
        values = replace(
            tensor, offset=tensor.offset + number * per_expert, shape=(1, outputs, inputs), strides=(1, 1, outputs)
        )
        yield f"{found[1]}.local_experts.{number}.linear_fc{found[2]}.weight", values


def stacked(tensor: LazyTensor) -> LazyTensor:
    """Return a tensor of one expert with a first dim of 1."""
    return replace(tensor, shape=(1, *tensor.shape), strides=(tensor.num_elements, *tensor.strides))


def expert_pieces(spec: ParamSpec) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """Yield each expert of a rank, counted from its first, with the pieces of the tensor of that expert alone."""
    first = spec.pieces[0].global_box
    for number in range(first.shape[0]):
        yield (
            number,
            tuple(
                Piece(
                    Box((box.offset[0] + number, *box.offset[1:]), (1, *box.shape[1:])),
                    (0, *piece.local_offset[1:]),
                )
                for piece in spec.pieces
                for box in (piece.global_box,)
            ),
        )
