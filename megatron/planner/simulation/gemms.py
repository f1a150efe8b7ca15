"""The GEMMs among torch's operators: their sizes, which give their FLOPs, and operators whose FLOPs are unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_OPERANDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), ("self", "mat2")),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
    "dot": ("self", "tensor"),
    "vdot": ("self", "other"),
    "linear": ("input", "weight"),
}
"""The names of both operands in the operators' schemas."""
_BY_BYTES = ("aten", "prim", "prims", "c10d", "profiler")
"""Namespaces whose operators only move bytes, unless their name says otherwise."""
_COMPUTES = re.compile(r"mm(_|$)|matmul|linear(_|$)|attention|conv(olution|_|\d)|einsum|tensordot|(^|_)(lstm|gru)(_|$)")
"""Names of operators that do more than they read and write."""


@dataclass(frozen=True)
class Gemm:
    """Hold the sizes of ``batch`` products ``[rows, inner] @ [inner, columns]`` that are one launch.

    The groups of a grouped GEMM count as equally large, so that one size may be a fraction.
    """

    batch: int
    rows: float
    inner: float
    columns: float

    @property
    def flops(self) -> float:
        """Return the operations, of which a multiply-add has two."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


def gemm_of(func: Any, values: Mapping[str, Any]) -> Gemm | None:
    """Return the sizes of an operator's GEMM, None where it is none; ``values`` are its arguments by name.

    Rows that lie behind the last group of a grouped GEMM are not multiplied. Where its ends have no values, its groups
    hold all rows.
    """
    namespace, name = func._schema.name.split("::")
    name = name if name in _OPERANDS else name.removesuffix("_")
    if namespace != "aten" or name not in _OPERANDS:
        return None
    left, right = (values[operand] for operand in _OPERANDS[name])
    if "grouped" in name:
        return _grouped(left, right, values.get("offs"))
    if name == "linear":
        return Gemm(1, math.prod(left.shape[:-1]), left.shape[-1], math.prod(right.shape[:-1]))
    # A vector is one row on the left, and one column on the right.
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    return Gemm(math.prod(left.shape[:-2]), rows, left.shape[-1], columns)


def _grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> Gemm:
    """Return the sizes of a grouped GEMM: the groups divide the rows, the columns, or the dim that is summed over."""
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if ends is None:
        return Gemm(left.shape[0], rows, inner, columns)
    groups = len(ends)

    def mean(size: int) -> float:
        return (size if isinstance(ends, FakeTensor) or not groups else int(ends[-1])) / max(groups, 1)

    if left.dim() == right.dim():
        # The gradient of a weight: each group sums over its own tokens.
        return Gemm(groups, rows, mean(inner), columns)
    return Gemm(groups, mean(rows), inner, columns) if left.dim() == 2 else Gemm(groups, rows, inner, mean(columns))


def is_uncounted(func: Any) -> bool:
    """Return whether an operator whose FLOPs are not known may do more than read and write its tensors."""
    namespace, name = func._schema.name.split("::")
    return namespace not in _BY_BYTES or _COMPUTES.search(name) is not None
