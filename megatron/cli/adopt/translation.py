"""Translate another trainer's flags to this project's: keep, rename or omit each flag, and report the effect."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence

from megatron.cli.adopt.shell_values import is_unresolved, plain_name, readable, unknown_mark, without_placeholder
from megatron.config import (
    NO_EFFECT,
    NOT_SUPPORTED,
    ForeignFlag,
    all_flags,
    command_line_fields,
    foreign_flag,
    with_current_flags,
)
from megatron.core.config_base import FieldSpec

TOKENIZER_FOLDER = "TOKENIZER_FOLDER"
_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class Finding:
    """Outcome of one flag; ``kind`` is renamed, no effect, not supported, no counterpart, or unresolved."""

    flag: str
    kind: str
    text: str
    needs_decision: bool = False


@dataclasses.dataclass(frozen=True)
class FlagGroup:
    """Flag with its values; ``name`` is empty for words that do not belong to a flag.

    A flag with ``is_companion`` was added by the translation of another flag. It is omitted if the command also gives
    this flag itself.
    """

    name: str
    values: tuple[str, ...] = ()
    is_companion: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Return the flag and its values as words of the command line."""
        return (self.name, *self.values) if self.name else self.values


@dataclasses.dataclass(frozen=True)
class Translation:
    """Flags of this project, outcomes of the other trainer's flags, and new placeholders (name to reason)."""

    groups: tuple[FlagGroup, ...]
    findings: tuple[Finding, ...]
    placeholders: Mapping[str, str]


def translate(words: Sequence[str]) -> Translation:
    """Translate the arguments of a pretraining script.

    Unknown words that are not the value of a flag are omitted and reported, since they may contain any flags.
    """
    findings: list[Finding] = []
    groups: list[FlagGroup] = []
    placeholders: dict[str, str] = {}
    for typed in flag_groups(words):
        group = _with_marks(typed, placeholders)
        if not group.name and is_unresolved(group.values[0]):
            text = "is not the value of a flag and was omitted; replace it with the flags that it represents"
            findings.append(Finding(readable(group.values[0]), "unresolved", text, needs_decision=True))
            continue
        groups += _translate(group, findings)
    placeholders |= _add_tokenizer(groups, findings)
    given = {group.name for group in groups if not group.is_companion}
    kept = {group.name: group for group in groups if group.is_companion and group.name not in given}
    groups = [group for group in groups if not group.is_companion or kept.get(group.name) is group]
    return Translation(tuple(groups), tuple(findings), placeholders)


def _with_marks(group: FlagGroup, placeholders: dict[str, str]) -> FlagGroup:
    """Replace the placeholders in a flag's values with marks, and record each of them."""

    def note(name: str, reason: str) -> str:
        name = plain_name(name)
        placeholders.setdefault(name, reason)
        return unknown_mark(name)

    return dataclasses.replace(
        group, values=tuple(without_placeholder(value, group.name, note) for value in group.values)
    )


def flag_groups(words: Sequence[str]) -> Iterator[FlagGroup]:
    """Group words into flags with their values, including ``--flag=value``; rename deprecated flags."""
    words, _ = with_current_flags(words)
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not _is_flag(word):
            yield FlagGroup("", (word,))
            continue
        name, has_value, value = word.partition("=")
        values = [value] if has_value else []
        arity = _arity(name)
        most = len(words) if isinstance(arity, str) else arity
        while place < len(words) and len(values) < most and not _is_flag(words[place]):
            values.append(words[place])
            place += 1
        yield FlagGroup(name, tuple(values))


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


@functools.cache
def _fields() -> Mapping[str, FieldSpec]:
    return {flag: spec for _, spec in command_line_fields() for flag in spec.flags}


def _arity(name: str) -> int | str:
    if name in _fields():
        spec = _fields()[name]
        return 0 if spec.is_bool else spec.options.nargs or 1
    if name in NO_EFFECT:
        return NO_EFFECT[name].arity
    if name in NOT_SUPPORTED:
        return NOT_SUPPORTED[name].arity
    known = foreign_flag(name)
    return known.arity if known else "+"


def _translate(group: FlagGroup, findings: list[Finding], depth: int = 0) -> list[FlagGroup]:
    """Translate one flag to flags of this project, and record its outcome in ``findings``."""
    name, values = group.name, group.values
    typed = readable(" ".join(group.words))
    spec = _fields().get(name)
    known = foreign_flag(name, values)
    is_of_value = known is not None and " " in known.flag
    if spec is not None or not name:
        choices = spec.options.choices if spec else None
        is_refused = choices is not None and any(value not in choices for value in values)
        is_bare = spec is not None and not spec.is_bool and not values
        if known is None or not ((is_of_value and is_refused) or is_bare):
            return [_plain_values(group)]
    if known is not None and (is_of_value or not known.flag.endswith("*")) and depth < _DEPTH:
        return _replace(group, known, findings, depth)
    if name in NO_EFFECT:
        note = NO_EFFECT[name]
        if note.accepted and not all(value in note.accepted for value in values):
            text = f"possible: {', '.join(note.accepted)}; omit the flag to get this behavior"
            findings.append(Finding(typed, "not supported", text, needs_decision=True))
        else:
            findings.append(Finding(typed, "no effect", note.reason))
        return []
    refused = NOT_SUPPORTED.get(name)
    if refused is not None and refused.default is not None and values == (refused.default,):
        findings.append(Finding(typed, "no effect", "this is the only behavior"))
    elif known is not None:
        return _replace(group, known, findings, depth)
    elif refused is not None:
        text = refused.instead or "omit it; this feature is not available"
        findings.append(Finding(typed, "not supported", text, needs_decision=True))
    else:
        nearest = difflib.get_close_matches(name.replace("_", "-"), all_flags(), n=1, cutoff=0.8)
        hint = f"the nearest flag here is {nearest[0]}" if nearest else "there is no similar flag here"
        findings.append(Finding(typed, "no counterpart", f"{hint}; it is omitted", needs_decision=True))
    return []


def _replace(group: FlagGroup, known: ForeignFlag, findings: list[Finding], depth: int) -> list[FlagGroup]:
    """Replace a flag with the flags that the table gives for it."""
    typed = readable(" ".join(group.words))
    if not known.becomes:
        kind = "no counterpart" if known.needs_decision else "no effect"
        findings.append(Finding(typed, kind, f"{known.change} ({known.trainer})", known.needs_decision))
        return []
    words = [value for word in known.becomes.split() for value in (group.values if word == "{}" else (word,))]
    text = f"{readable(' '.join(words))}; changes: {known.change} ({known.trainer})"
    findings.append(Finding(typed, "renamed", text, known.needs_decision))
    result = []
    for number, new in enumerate(flag_groups(words)):
        companion = dataclasses.replace(new, is_companion=number > 0 or group.is_companion)
        result += _translate(companion, findings, depth + 1)
    return result


def _plain_values(group: FlagGroup) -> FlagGroup:
    """Remove nested quotes from --split, as in the published script with `"'99,1,0'"`."""
    if group.name != "--split":
        return group
    return dataclasses.replace(group, values=tuple(value.strip("'\"") for value in group.values))


def _add_tokenizer(groups: list[FlagGroup], findings: list[Finding]) -> dict[str, str]:
    """Add a placeholder for the tokenizer of a Pai-Megatron-Patch command without a ``--load`` folder."""
    names = {group.name for group in groups}
    if "--patch-tokenizer-type" not in names or names & {"--tokenizer-type", "--load"}:
        return {}
    folder = unknown_mark(TOKENIZER_FOLDER)
    groups.append(FlagGroup("--tokenizer-type", ("HuggingFaceTokenizer",)))
    groups.append(FlagGroup("--tokenizer-model", (folder,)))
    text = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {readable(folder)}; changes: nothing where that "
    findings.append(Finding("--patch-tokenizer-type", "renamed", f"{text}folder has tokenizer.json"))
    return {TOKENIZER_FOLDER: "a folder with the model's tokenizer.json: the script does not set it"}
