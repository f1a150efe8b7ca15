"""Explain which family reads a model folder, or in what it differs from the nearest supported architecture."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.huggingface.families import FAMILIES, HOW_TO_ADD, language_part, named_family, read_as
from megatron.checkpoint.formats.huggingface.family import Family, names_in_files
from megatron.checkpoint.formats.huggingface.settings import ObservedValues, Settings, read_settings, stored_names
from megatron.core.config_base import IDENTITY, field_specs, field_value
from megatron.core.models.gpt import GPTConfig

_OF_EVERY_MODEL = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "is_decoder", "tokenizer_class"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "chunk_size_feed_forward"),
        *("gradient_checkpointing", "_attn_implementation_autoset", "pretraining_tp", "unsloth_version"),
    )
)
"""Settings that any model may have and that do not change what its layers compute."""
_MOST_LISTED = 12
_MISSING = " is missing"


@dataclass(frozen=True)
class _Reading:
    """Result of reading a folder's settings as a family: configuration, problems, and names that were looked up."""

    family: Family
    config: GPTConfig
    problems: tuple[str, ...]
    names: Collection[str]

    @property
    def accepted(self) -> list[str]:
        """Return the settings that the family has, and whose values no problem is about."""
        return [name for name in self.names if not any(_is_about(problem, name) for problem in self.problems)]


def explain_family(folder: Path) -> list[str]:
    """Return lines that say which family reads a folder's config.json and as which flags, or what keeps it from that.

    Raises:
        CheckpointError: the folder has no config.json, or it is not a JSON object.
    """
    settings = language_part(read_settings(folder))
    given = {name: value for name, value in settings.values.items() if name not in _OF_EVERY_MODEL}
    names, family = named_family(settings)
    reading = _nearest(settings, given) if family is None else _read(family, settings)
    unknown = {name: value for name, value in given.items() if name not in reading.names}
    if family is not None and not reading.problems:
        lines = [f"{settings.place}: {names} is supported (family {family.model_type})"]
        lines += _listed(f"ignored, since {names} has no such setting", _values(unknown))
        return [*lines, f"flags: {' '.join(model_flags(reading.config))}"]
    nearest = reading.family.architecture
    if family is None:
        lines = [f"{settings.place}: {names} is not supported; the most similar supported architecture is {nearest}"]
    else:
        lines = [f"{settings.place}: {names} is supported, but not with these settings"]
    same = {name: given[name] for name in reading.accepted if name in given}
    problems = [problem.removeprefix(f"{settings.place}: ") for problem in reading.problems]
    lines += _listed("same", _values(same))
    lines += [f"  differs: {problem}" for problem in problems if not problem.endswith(_MISSING)]
    lines += _listed(f"unknown to {nearest}", _values(unknown))
    lines += _listed("missing", (problem.removesuffix(_MISSING) for problem in problems if problem.endswith(_MISSING)))
    if not reading.problems:
        written = reading.family.write_settings(reading.config)
        assumed = {name: value for name, value in written.items() if name not in {*settings.values, *_OF_EVERY_MODEL}}
        lines += _listed(f"missing, {nearest} would assume", _values(assumed))
        lines += _compare_tensors(reading, stored_names(folder))
    return lines if family is not None else [*lines, f"{HOW_TO_ADD} shows how to add a family"]


def model_flags(config: GPTConfig) -> list[str]:
    """Return the flags of a model that differ from their defaults, as typed."""
    found = []
    for spec in field_specs(GPTConfig):
        value = field_value(config, spec.name)
        is_of_model = spec.options.role in (*IDENTITY, "recipe") and spec.options.cli
        if is_of_model and value is not None and (value != spec.default or spec.is_required):
            text = " ".join(map(str, value)) if isinstance(value, tuple) else shlex.quote(str(value))
            found.append(spec.typed(text))
    return found


def _read(family: Family, settings: Settings) -> _Reading:
    values = ObservedValues(settings.values)
    observed = Settings(values, settings.place, tensor_names=settings.tensor_names)
    config = read_as(family, observed)
    return _Reading(family, config, tuple(dict.fromkeys(observed.problems)), values.read)


def _nearest(settings: Settings, given: Mapping[str, Any]) -> _Reading:
    """Return the reading of the family that accepts the most settings; a similar name decides between equal ones."""
    model_type = str(settings.values.get("model_type"))

    def similarity(reading: _Reading) -> tuple[int, float]:
        num_accepted = sum(name in given for name in reading.accepted) - len(reading.problems)
        return num_accepted, difflib.SequenceMatcher(None, model_type, reading.family.model_type).ratio()

    return max((_read(family, settings) for family in FAMILIES), key=similarity)


def _is_about(problem: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", problem) is not None


def _compare_tensors(reading: _Reading, stored: Collection[str]) -> Iterator[str]:
    """Yield lines about tensors in only one of the folder and the family's model, with N for every number."""
    if not len(stored) >= max(reading.config.num_layers, reading.config.moe.num_experts or 0):
        return
    prefix = reading.family.base_prefix
    names = {link.foreign for link in reading.family.links(reading.config) if not link.is_copy}
    found = (next((each for each in names_in_files(reading.family, name) if each in stored), name) for name in names)
    theirs = {_pattern(name.removeprefix(prefix)) for name in found}
    ours = {
        _pattern(name.removeprefix(prefix)) for name in stored if not reading.family.is_buffer(name, reading.config)
    }
    yield from _listed("tensors that only the folder has", sorted(ours - theirs))
    yield from _listed(f"tensors that only {reading.family.architecture} has", sorted(theirs - ours))


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _values(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(settings.items()):
        text = json.dumps(value)
        yield f"{name} {text if len(text) <= 40 else f'{text[:40]}…'}"


def _listed(title: str, items: Iterable[str]) -> list[str]:
    found = list(items)
    if not found:
        return []
    more = f" and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return [f"  {title}: {', '.join(found[:_MOST_LISTED])}{more}"]
