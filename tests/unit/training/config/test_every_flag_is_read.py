"""A flag that parses must do something: the program reads every field."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.config.run_config import command_line_fields

ROOT = Path(__file__).parents[4]
ENTRY_SCRIPT = ROOT / "pretrain_gpt.py"
DECLARE_OR_CHECK_ONLY = (
    "training/config/checks/",
    "config/megatron_flags.py",
    "config/printed_config.py",
)


def test_every_accepted_field_is_read_somewhere() -> None:
    sources = [path for path in (ROOT / "megatron").rglob("*.py") if not _only_declares(path)]
    program = "\n".join(path.read_text(encoding="utf-8") for path in (*sources, ENTRY_SCRIPT))
    unread = [
        spec.flags[0]
        for part, spec in command_line_fields()
        if not re.search(rf"\.{spec.name}\b", program) and f"asdict(config.{part})" not in program
    ]
    assert unread == [], "build what these flags ask for, or move them to config/megatron_flags.py"


def _only_declares(path: Path) -> bool:
    relative = path.relative_to(ROOT / "megatron").as_posix()
    return relative.startswith(DECLARE_OR_CHECK_ONLY)
