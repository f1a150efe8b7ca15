"""How an adopted command is told: the command, then a table of what became of each flag; or the same as data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.adoption.adopted_command import AdoptedCommand
from megatron.adoption.shell.state import readable

_KINDS = {
    "renamed": "Renamed",
    "no effect": "Left out, without effect on what is computed",
    "not supported": "Not supported",
    "no counterpart": "Without a counterpart",
    "unresolved": "Unresolved",
}


def report_lines(commands: Sequence[AdoptedCommand], notes: Sequence[str]) -> Iterator[str]:
    """Yield the lines that a user reads."""
    for command in commands:
        yield f"# {command.origin}"
        yield command.text
        yield ""
        for kind, title in _KINDS.items():
            rows = [(finding.flag, finding.text) for finding in command.findings if finding.kind == kind]
            yield from _table(title, rows)
        yield from _table("Files that are not on this machine", [(problem, "") for problem in command.absent])
        yield from _table("To fill in", [(f"<{name}>", reason) for name, reason in command.placeholders.items()])
        ranks = f"{command.world_size} rank{'s' if command.world_size > 1 else ''}"
        if not command.is_world_size_known:
            ranks += ", the fewest that the layout takes: how many there are is not known"
        if command.refused:
            yield from _table(
                f"Refused by {command.head[-1]} ({ranks})", [(problem, "") for problem in command.refused]
            )
        elif command.would_run:
            yield f"{command.head[-1]} takes this command ({ranks})."
        else:
            yield f"{command.head[-1]} refuses nothing else ({ranks}); what is listed above is yours to decide."
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
    """Return the same as data for JSON."""
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
    """Return the data as text."""
    return json.dumps(report_data(commands, notes), indent=2, ensure_ascii=False) + "\n"
