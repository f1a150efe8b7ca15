"""The page of an explanation in a real browser engine, where an interpreter has one.

``BROWSER_PYTHON`` names an interpreter with the package PyQt6-WebEngine; without it the tests' own is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands.planning.explain import main
from megatron.planning.prediction.stage_memory import MEMORY_PARTS
from tests.unit.advice.planned_words import SMALL

SCRIPT = Path(__file__).parents[2] / "harness" / "browser_page.py"
PYTHON = os.environ.get("BROWSER_PYTHON", sys.executable)
ENVIRONMENT = {
    "QT_QPA_PLATFORM": "offscreen",
    "QTWEBENGINE_DISABLE_SANDBOX": "1",
    "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu --no-sandbox",
}


def test_a_browser_shows_every_bar_and_pass_and_asks_no_network(tmp_path: Path) -> None:
    has_browser = subprocess.run(
        [PYTHON, "-c", "import PyQt6.QtWebEngineWidgets"], capture_output=True, check=False
    ).returncode
    if has_browser != 0:
        pytest.skip("no browser engine: BROWSER_PYTHON names no interpreter with PyQt6-WebEngine")
    page = tmp_path / "page.html"
    assert main([*SMALL, "--world-size", "12", "--html", str(page)]) == 0
    shown = subprocess.run(
        [PYTHON, str(SCRIPT), str(page)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    seen = json.loads(shown.stdout.splitlines()[-1])
    assert seen["outcome"] == "ok"
    assert seen["parts"] == 2 * len(MEMORY_PARTS)
    assert max(seen["widths"]) > 0
    # Two stages, two chunks, eight micro-batches, forward and backward.
    assert seen["passes"] == 2 * 2 * 8 * 2
    assert not seen["overflow"]
    assert seen["requests"] == 0
