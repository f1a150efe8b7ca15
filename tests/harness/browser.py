"""A browser engine for the tests of pages, where an interpreter has one.

``BROWSER_PYTHON`` names an interpreter with the package PyQt6-WebEngine; without it the tests' own is asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PYTHON = os.environ.get("BROWSER_PYTHON", sys.executable)
_ENVIRONMENT = {
    "QT_QPA_PLATFORM": "offscreen",
    "QTWEBENGINE_DISABLE_SANDBOX": "1",
    "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu --no-sandbox",
}


def require_browser() -> None:
    """Skip the test where no interpreter has a browser engine."""
    command = [_PYTHON, "-c", "import PyQt6.QtWebEngineWidgets"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no browser engine: BROWSER_PYTHON names no interpreter with PyQt6-WebEngine")


def browse(script: str, *words: str, given: str = "") -> list[str]:
    """Run a script of this folder under the interpreter with the engine, and return the lines that it prints."""
    done = subprocess.run(
        [_PYTHON, str(Path(__file__).parent / script), *words],
        input=given,
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines()
