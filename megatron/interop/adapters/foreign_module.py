"""The linear layers of a Hugging Face model that low-rank adapters can sit on, and which of our rows each has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.adapters.adapter_targets import LINEAR_LAYERS
from megatron.interop.adapters.stored_adapter import RowRange
from megatron.interop.huggingface.family import Family

PEFT_PREFIX = "base_model.model."
"""What stands before the names of a model's layers in peft's files."""


@dataclass(frozen=True)
class ForeignModule:
    """Name a linear layer of theirs; ``rows`` pair rows of our weight with rows of the layer's output."""

    name: str
    weight: str
    rows: tuple[RowRange, ...]

    def tensor(self, letter: str) -> str:
        """Return the name of ``A`` or ``B`` in peft's files."""
        return f"{PEFT_PREFIX}{self.name}.lora_{letter}.weight"

    @property
    def num_rows(self) -> int:
        """Return the number of the layer's outputs."""
        return sum(rows.count for rows in self.rows)


def foreign_modules(family: Family, config: GPTConfig) -> list[ForeignModule]:
    """Return every linear layer of the transformer layers, in the order of their model."""
    found: dict[tuple[str, str], list[RowRange]] = {}
    for link in family.links(config):
        native = link.native.removesuffix(".weight")
        if native != link.native and native.rpartition(".")[2] in LINEAR_LAYERS:
            start = link.foreign_box.offset[1 if link.is_transposed else 0]
            rows = RowRange(link.native_box.offset[0], start, link.native_box.shape[0])
            found.setdefault((link.foreign.removesuffix(".weight"), link.native), []).append(rows)
    return [ForeignModule(name, weight, tuple(rows)) for (name, weight), rows in found.items()]


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
