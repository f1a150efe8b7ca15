"""What bash makes of a script: run with stubs in place of what it launches, which note their words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron.cli.adopt.shell_script import ShellScript
from megatron.cli.adopt.shell_values import readable

STUBS = ("torchrun", "deepspeed", "srun", "python", "launch")
# Writes the words it was called with as one JSON line.
STUB = """#!{python} -S
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


def started_by_bash(script: Path, parameters: list[str], variables: dict[str, str], folder: Path) -> list[list[str]]:
    """Run a script with stubs on PATH and return the words of each start."""
    log, stubs = folder / "started.jsonl", folder / "stubs"
    if not stubs.exists():
        stubs.mkdir()
        for name in STUBS:
            (stubs / name).write_text(STUB.format(python=sys.executable, log=str(log)))
            (stubs / name).chmod(0o755)
    log.write_text("")
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **variables}
    subprocess.run(
        ["bash", str(script), *parameters],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return [json.loads(line) for line in log.read_text().splitlines()]


def started_by_reading(script: Path, parameters: list[str], variables: dict[str, str]) -> list[list[str]]:
    """Follow a script without running it and return the words of each start."""
    followed = ShellScript(script, parameters, variables)
    followed.follow(script.read_text())
    return [[readable(word) for word in found.words] for found in followed.programs if found.words[0] in STUBS]
