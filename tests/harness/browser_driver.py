"""Open an address in a browser engine (QtWebEngine, which is Chromium), run scripts one after the other, print answers.

python browser_driver.py URL PICTURES < STEPS

STEPS is a JSON list of {"do": script, "until": script, "ask": script}: ``do`` runs once, then ``until`` is asked again
until it is true, then ``ask`` gives a line of output. After each step a picture is taken into the folder PICTURES. It
runs under an interpreter that has PyQt6-WebEngine, which need not be that of the tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROUND_MS = 50
_MOST_MS = 90_000


def main() -> None:
    """Load the page, take the steps and end."""
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    steps = json.load(sys.stdin)
    application = QApplication([sys.argv[0], "--no-sandbox"])
    view = QWebEngineView()
    view.resize(900, 1000)
    number = 0

    def ask(script: str, take: Callable[[Any], None]) -> None:
        page = view.page()
        assert page is not None
        page.runJavaScript(script, take)

    def begin() -> None:
        if number == len(steps):
            application.quit()
        else:
            ask(f"{steps[number]['do']}; true", lambda _: poll(False))

    def poll(is_done: Any) -> None:
        if is_done:
            ask(f"JSON.stringify({steps[number]['ask']})", finish)
        else:
            QTimer.singleShot(_ROUND_MS, lambda: ask(f"Boolean({steps[number]['until']})", poll))

    def finish(answer: str) -> None:
        nonlocal number
        print(answer, flush=True)
        view.grab().save(str(Path(sys.argv[2]) / f"{number}.png"))
        number += 1
        begin()

    view.loadFinished.connect(lambda is_loaded: begin())
    view.load(QUrl(sys.argv[1]))
    view.show()
    QTimer.singleShot(_MOST_MS, application.quit)
    application.exec()


if __name__ == "__main__":
    main()
