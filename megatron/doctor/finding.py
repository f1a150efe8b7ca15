"""One line of what was looked at: how it is, and what to do where it is not well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "wrong", "skipped"]
"""``wrong`` is what a run fails by or computes wrongly with; a ``warning`` costs speed or is a risk."""


@dataclass(frozen=True)
class Finding:
    """Hold what was found about one subject, and what to do about it."""

    status: Status
    subject: str
    text: str
    remedy: str = ""

    def describe(self) -> str:
        """Return one line."""
        return f"{self.status:8}{self.subject}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def judge(subject: str, problem: bool, text: str, remedy: str, status: Status = "warning") -> Finding:
    """Return a finding that is ``status``, with the remedy, where there is a problem, and ok otherwise."""
    return Finding(status, subject, text, remedy) if problem else Finding("ok", subject, text)


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings, and how many are of each status, as JSON-ready values."""
    counts = {
        status: sum(each.status == status for each in findings) for status in ("wrong", "warning", "ok", "skipped")
    }
    return {"counts": counts, "findings": [asdict(finding) for finding in findings]}
