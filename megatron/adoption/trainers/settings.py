"""Settings of other trainers as flags of this project: the table, and what is made with it.

`settings.tsv` has one line for each key, or for all keys of a beginning. Values that are ``neutral`` need nothing
said; a key that a trainer's own file takes is not looked up.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.adoption.launch import PRETRAIN, Launch
from megatron.adoption.shell.state import unknown_mark
from megatron.adoption.translation import Finding

_TABLE = Path(__file__).with_name("settings.tsv")
DATA_PREFIX = "DATA_PREFIX"


@dataclasses.dataclass(frozen=True)
class _Setting:
    key: str
    becomes: str
    needs_decision: bool
    neutral: tuple[Any, ...]
    change: str


@dataclasses.dataclass(frozen=True)
class AdoptedSettings:
    """Hold the launch that stands for a settings file, what became of its keys, and its placeholders."""

    trainer: str
    launch: Launch
    findings: tuple[Finding, ...]
    placeholders: Mapping[str, str]


@functools.cache
def _table(trainer: str) -> Mapping[str, _Setting]:
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        key: _Setting(key, becomes, decide == "yes", tuple(json.loads(neutral or "[]")), change)
        for owner, key, becomes, decide, neutral, change in rows
        if owner == trainer
    }


def flattened(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key; a list of plain values is one value."""
    if isinstance(settings, Mapping) and settings:
        for name, value in settings.items():
            yield from flattened(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(settings, list) and settings and all(isinstance(item, Mapping) for item in settings):
        for number, item in enumerate(settings):
            yield from flattened(item, f"{prefix}.{number}")
    else:
        yield prefix, settings


def _word(value: Any) -> str:
    """Return a value as it is typed; 500000.0 becomes 500000, as a flag may want an integer."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class SettingsReader:
    """Turn a trainer's settings into flags: by hand what several keys say together, the rest by the table."""

    def __init__(self, trainer: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self.values = {**defaults, **dict(flattened(settings))}
        self.words: list[str] = []
        self.findings: list[Finding] = []
        self.placeholders: dict[str, str] = {}

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value and leave nothing of it to the table."""
        value = self.values.pop(key, None)
        return default if value is None else value

    def take_number(self, key: str, default: int) -> int:
        """Return a value that is an integer, or the default where it is something else."""
        value = self.take(key, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def add(self, *words: Any) -> None:
        """Add words to the command."""
        self.words += [str(word) for word in words]

    def add_placeholder(self, flag: str, name: str, reason: str) -> None:
        """Add a flag whose value its user must fill in."""
        self.placeholders[name] = reason
        self.add(flag, unknown_mark(name))

    def note(self, key: str, kind: str, text: str, needs_decision: bool = False) -> None:
        """Say what became of a key."""
        self.findings.append(Finding(key, kind, text, needs_decision))

    def finish(self, ranks: int | None) -> AdoptedSettings:
        """Translate all keys that were not taken, and return the launch on so many ranks."""
        for key, value in self.values.items():
            self._translate(key, value)
        if ranks is None:
            self.placeholders["RANKS_OF_NODE"] = "the file does not say on how many ranks it is run"
        nproc = unknown_mark("RANKS_OF_NODE") if ranks is None else str(ranks)
        launch = Launch((), "torchrun", ("--nproc_per_node", nproc), PRETRAIN, tuple(self.words), ranks)
        return AdoptedSettings(self.trainer, launch, tuple(self.findings), self.placeholders)

    def _translate(self, key: str, value: Any) -> None:
        setting = self._setting(key)
        typed = f"{key} = {json.dumps(value, default=str)}"
        if setting is None:
            if value not in (None, False, [], {}):
                self.note(typed, "no counterpart", f"nothing here is set by it; it is left out ({self.trainer})", True)
            return
        if any(value == neutral and type(value) is type(neutral) for neutral in setting.neutral) or value is None:
            return
        if not setting.becomes:
            kind = "no counterpart" if setting.needs_decision else "no effect"
            self.note(typed, kind, f"{setting.change} ({self.trainer})", setting.needs_decision)
        elif value is not False:
            items = [_word(item) for item in (value if isinstance(value, list) else [value])]
            words = [item for word in setting.becomes.split() for item in (items if word == "{}" else (word,))]
            self.add(*words)
            self.note(
                typed, "renamed", f"{' '.join(words)}; changes: {setting.change or 'nothing'}", setting.needs_decision
            )

    def _setting(self, key: str) -> _Setting | None:
        table = _table(self.trainer)
        if key in table:
            return table[key]
        return next((table[name] for name in table if name.endswith("*") and key.startswith(name[:-1])), None)
