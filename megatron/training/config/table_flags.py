"""What the given flags of the tables in `flag_notes` come to: lines for the user, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.training.config.flag_notes import NO_EFFECT, NOT_SUPPORTED
from megatron.training.config.notes.refusal_reasons import refusal_reason
from megatron.training.config.run_config import RunConfig

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
        problems.append(f"{' '.join([name, *words])} is not supported yet; {refused.instead or refusal_reason(name)}")
    return notes, problems


def cut_at_documents(given: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """Keep attention within documents where the flags are those that do so in Pai-Megatron-Patch.

    Its scripts are known by --patch-tokenizer-type.
    """
    if not (_is_packed_by_patch(given, config) and config.data.reset_position_ids):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, reset_attention_mask=True))


def _is_packed_by_patch(given: Mapping[str, Any], config: RunConfig) -> bool:
    is_unmasked = TABLE_PREFIX + _NO_MASK in given and "reset_attention_mask" not in given
    return is_unmasked and config.tokenizer.patch_tokenizer_type is not None


def packing_notes(given: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Say what becomes of attention between documents, where Megatron-LM and Pai-Megatron-Patch differ in it."""
    data = config.data
    if TABLE_PREFIX + _NO_MASK not in given:
        return []
    if data.reset_attention_mask and _is_packed_by_patch(given, config):
        return [
            "--reset-position-ids keeps documents apart in attention too, as Pai-Megatron-Patch does with "
            f"{_NO_MASK}: --reset-attention-mask is added"
        ]
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
