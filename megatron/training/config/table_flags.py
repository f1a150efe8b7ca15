"""What the given flags of the tables in `flag_notes` come to: lines for the user, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.training.config.data_config import DataConfig
from megatron.training.config.flag_notes import NO_EFFECT, NOT_SUPPORTED

TABLE_PREFIX = "flag:"
"""Begins the name under which the parser keeps the words of a flag that is no field."""

_NO_MASK = "--no-create-attention-mask-in-dataloader"


def table_flags(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the notes and the problems that the given flags of the two tables make."""
    notes, problems = [], []
    for name, note in NO_EFFECT.items():
        words: list[str] | None = given.get(TABLE_PREFIX + name)
        if words is None or (words and all(_is_among(word, note.quiet) for word in words)):
            continue
        typed = " ".join([name, *words])
        if note.accepted and not all(_is_among(word, note.accepted) for word in words):
            problems.append(f"{typed} is not supported yet; possible: {', '.join(note.accepted)}")
        elif note.excluded is not None and note.excluded in given:
            problems.append(f"{typed} and --{note.excluded.replace('_', '-')} exclude each other; keep one")
        else:
            notes.append(f"{typed} has no effect: {note.reason}")
    for name, refused in NOT_SUPPORTED.items():
        words = given.get(TABLE_PREFIX + name)
        if words is None:
            continue
        if len(words) == 1 and refused.default is not None and _is_among(words[0], (refused.default,)):
            continue
        instead = f"; {refused.instead}" if refused.instead else ""
        problems.append(f"{' '.join([name, *words])} is not supported yet{instead}")
    return notes, problems


def packing_notes(given: Mapping[str, Any], data: DataConfig) -> list[str]:
    """Say what becomes of attention between documents, where Megatron-LM and Pai-Megatron-Patch differ in it."""
    if TABLE_PREFIX + _NO_MASK not in given:
        return []
    if data.reset_attention_mask:
        return [f"--reset-attention-mask keeps documents apart; in Megatron-LM it would not, with {_NO_MASK}"]
    if data.reset_position_ids:
        return [
            "--reset-position-ids begins positions anew at each document, but attention goes across documents, as in "
            "Megatron-LM; add --reset-attention-mask to keep them apart, as Pai-Megatron-Patch does"
        ]
    return []


def _is_among(word: str, values: Sequence[str]) -> bool:
    """Tell whether a word is one of the values, as text or as the same number."""
    return word in values or _number(word) in [_number(value) for value in values if _number(value) is not None]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
