"""The linear layers of a Hugging Face model that low-rank adapters can sit on, and which of our rows each has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.lora_targets import LINEAR_LAYERS
from megatron.interop.adapters.stored_adapter import RowRange
from megatron.interop.huggingface.family import Family

_DIMS = 2
"""Those of a linear layer's weight."""
PEFT_PREFIX = "base_model.model."
"""What stands before the names of a model's layers in peft's files."""


@dataclass(frozen=True)
class ForeignModule:
    """Name a linear layer of theirs; ``rows`` pair rows of our weight with rows of the layer's output.

    ``expert`` is the layer's number among those of experts that our weight stacks, None where it stacks none.
    """

    name: str
    weight: str
    rows: tuple[RowRange, ...]
    expert: int | None = None

    def tensor(self, letter: str) -> str:
        """Return the name of ``A`` or ``B`` in peft's files."""
        return f"{PEFT_PREFIX}{self.name}.lora_{letter}.weight"

    @property
    def num_rows(self) -> int:
        """Return the number of the layer's outputs."""
        return sum(rows.count for rows in self.rows)


def foreign_modules(family: Family, config: GPTConfig) -> list[ForeignModule]:
    """Return every linear layer of the transformer layers, in the order of their model.

    Experts that a model has in one tensor are no linear layers, and are left out.
    """
    found: dict[tuple[str, str, int | None], list[RowRange]] = {}
    for link in family.links(config):
        native = link.native.removesuffix(".weight")
        is_linear = native != link.native and native.rpartition(".")[2] in LINEAR_LAYERS
        if is_linear and len(link.foreign_box.shape) == _DIMS:
            start = link.foreign_box.offset[1 if link.is_transposed else 0]
            rows = RowRange(link.native_box.offset[-2], start, link.native_box.shape[-2])
            expert = link.native_box.offset[0] if len(link.native_box.shape) > _DIMS else None
            found.setdefault((link.foreign.removesuffix(".weight"), link.native, expert), []).append(rows)
    return [ForeignModule(name, weight, tuple(rows), expert) for (name, weight, expert), rows in found.items()]


def paired_rows(first: Iterable[RowRange], second: Iterable[RowRange]) -> list[RowRange]:
    """Return the rows that both have of one tensor, the first of each pair, as pairs of their seconds."""
    pairs = []
    seconds = list(second)
    for rows in first:
        for others in seconds:
            start = max(rows.first, others.first)
            end = min(rows.first + rows.count, others.first + others.count)
            if start < end:
                pairs.append(
                    RowRange(rows.second + start - rows.first, others.second + start - others.first, end - start)
                )
    return pairs
