"""The launcher of ``megatron train``: which rank's end it reports, and its exit status."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.harness.training_run import run_command

LAUNCH = """
import sys
from pathlib import Path
from megatron.cli.rank_launcher import Place, launch
sys.exit(launch(Path(sys.argv[1]), [], Place(nproc=2)))
"""
# Rank 1 is killed after the watchdog has left the reason of the hang for rank 0, if there is one.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
written = Path(__file__).with_name("written")
if os.environ["RANK"] == "1":
    while not written.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
reason = {reason!r}
if reason:
    message = {{"message": reason, "extraInfo": {{"py_callstack": reason, "timestamp": "1"}}}}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({{"message": message}}, file)
written.touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("reason", "status", "said"),
    [
        ("HANG: rank 0 on here (pid 1) is stopped", 1, "HANG: rank 0 on here (pid 1) is stopped"),
        ("", 128 + signal.SIGKILL, "was ended by SIGKILL; the system does this if memory runs out (see dmesg)"),
    ],
)
def test_a_rank_killed_after_a_hang_is_no_rank_out_of_memory(
    reason: str, status: int, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(reason=reason))
    done = run_command([sys.executable, "-c", LAUNCH, script])
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1].endswith(said)
