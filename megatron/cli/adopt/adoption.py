"""Translate a file of another trainer to commands of this project, and report the outcome of each flag."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.cli.adopt.adopted_command import AdoptedCommand, Check, adopt_launch, is_training, launch_of
from megatron.cli.adopt.shell_syntax import require_parser
from megatron.cli.adopt.shell_values import readable
from megatron.cli.adopt.trainer_settings import read_settings
from megatron.core.errors import ConfigurationError

_SETTINGS = (".toml", ".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True)
class Adoption:
    """Commands translated from one file, and notes about the file."""

    commands: tuple[AdoptedCommand, ...]
    notes: tuple[str, ...]


def adopt_file(
    path: Path, parameters: Sequence[str], variables: Mapping[str, str], checks: Mapping[str, Check]
) -> Adoption:
    """Translate a launch script or a configuration file, depending on its suffix.

    ``parameters`` are the script's positional parameters. ``variables`` are values for its variables. ``checks`` maps
    each script of this project to the check of its commands.

    Raises:
        ConfigurationError: the file cannot be read or does not launch a known script.
    """
    text = _text_of(path)
    if path.suffix in _SETTINGS:
        if parameters:
            raise ConfigurationError(f"{path} has no positional parameters; omit -- {' '.join(parameters)}")
        settings = read_settings(path, text, variables)
        command = adopt_launch(settings.launch, f"{path} ({settings.trainer})", settings.placeholders, checks)
        command = dataclasses.replace(command, findings=(*settings.findings, *command.findings))
        return Adoption((command,), ())
    return _adopt_script(path, text, parameters, variables, checks)


def _text_of(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not text: pass a launch script or a settings file") from None
    if "\0" in text:
        raise ConfigurationError(f"{path} is not text: pass a launch script or a settings file")
    return text.replace("\r\n", "\n")


def _adopt_script(
    path: Path, text: str, parameters: Sequence[str], variables: Mapping[str, str], checks: Mapping[str, Check]
) -> Adoption:
    require_parser()
    # This module can be imported only if the parser is installed.
    from megatron.cli.adopt.shell_script import ShellScript

    script = ShellScript(path, parameters, dict(variables))
    script.follow(text)
    commands: dict[str, AdoptedCommand] = {}
    notes, others = list(script.notes), []
    notes += [
        f"--set {name}={value} has no effect: the parts of the script that were followed never read {name}"
        for name, value in variables.items()
        if name not in script.state.asked_for
    ]
    for program in script.programs:
        launch = launch_of(program.words)
        if launch is None:
            others.append(readable(program.words[0]))
            trainer = next((word for word in program.words[1:] if is_training(word)), None)
            if trainer is not None:
                starter = readable(program.words[0])
                notes.append(
                    f"line {program.line} starts {readable(trainer)} with {starter}, whose flags are not translated: "
                    "replace it with torchrun --nproc_per_node N"
                )
        elif launch.target is None:
            others.append(readable(launch.script))
            notes.append(f"line {program.line} launches {readable(launch.script)}, which has no counterpart here")
        else:
            origin = f"{path}, line {program.line}"
            command = adopt_launch(launch, origin, script.state.unknowns, checks)
            commands.setdefault(command.text, command)
    if not commands:
        found = f"it starts {', '.join(dict.fromkeys(others))}" if others else "it starts nothing"
        hint = "" if parameters else "; if it needs positional parameters, pass them after --"
        raise ConfigurationError(
            f"{path} launches no supported script (pretrain_*.py, preprocess_data.py, …): {found}{hint}"
        )
    return Adoption(tuple(commands.values()), tuple(notes))


_KINDS = {
    "renamed": "Renamed",
    "no effect": "Omitted, without effect on results",
    "not supported": "Not supported",
    "no counterpart": "Without a counterpart",
    "unresolved": "Unresolved",
}


def report_lines(commands: Sequence[AdoptedCommand], notes: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the text report."""
    for command in commands:
        yield f"# {command.origin}"
        yield command.text
        yield ""
        for kind, title in _KINDS.items():
            rows = [(finding.flag, finding.text) for finding in command.findings if finding.kind == kind]
            yield from _table(title, rows)
        yield from _table("Files that are missing on this host", [(problem, "") for problem in command.absent])
        yield from _table("To fill in", [(f"<{name}>", reason) for name, reason in command.placeholders.items()])
        ranks = f"{command.world_size} rank{'s' if command.world_size > 1 else ''}"
        if not command.is_world_size_known:
            ranks += ", the minimum for the layout: the number of ranks is not known"
        if command.refused:
            yield from _table(
                f"Rejected by {command.head[-1]} ({ranks})", [(problem, "") for problem in command.refused]
            )
        elif command.would_run:
            yield f"{command.head[-1]} accepts this command ({ranks})."
        else:
            yield f"{command.head[-1]} rejects nothing else ({ranks}). Decide the points listed above."
        yield ""
    for note in notes:
        yield f"Note: {note}"


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield f"{title}:"
        width = min(max(len(first) for first, _ in rows), 44)
        yield from (f"  {first:<{width}}  {second}".rstrip() for first, second in rows)
        yield ""


def report_data(commands: Sequence[AdoptedCommand], notes: Sequence[str]) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "would_run": all(command.would_run for command in commands),
        "commands": [
            {
                "origin": command.origin,
                "command": command.text,
                "words": [readable(word) for word in command.head]
                + [readable(word) for group in command.groups for word in group.words],
                "world_size": command.world_size if command.is_world_size_known else None,
                "would_run": command.would_run,
                "flags": [
                    {
                        "flag": finding.flag,
                        "kind": finding.kind,
                        "text": finding.text,
                        "needs_decision": finding.needs_decision,
                    }
                    for finding in command.findings
                ],
                "placeholders": dict(command.placeholders),
                "refused": list(command.refused),
                "absent": list(command.absent),
            }
            for command in commands
        ],
        "notes": list(notes),
    }


def report_json(commands: Sequence[AdoptedCommand], notes: Sequence[str]) -> str:
    return json.dumps(report_data(commands, notes), indent=2, ensure_ascii=False) + "\n"
