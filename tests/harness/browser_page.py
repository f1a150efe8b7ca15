"""Open a page in a browser engine (QtWebEngine, which is Chromium), and print what it shows as JSON.

python browser_page.py PAGE [PICTURE.png]

It runs under an interpreter that has PyQt6-WebEngine, which need not be that of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

QUESTION = """JSON.stringify({
    parts: document.querySelectorAll('#memory rect.part').length,
    widths: Array.from(document.querySelectorAll('#memory rect.part')).map(each => each.getBoundingClientRect().width),
    passes: document.querySelectorAll('#pipeline svg rect title').length,
    outcome: document.getElementById('outcome').innerText,
    overflow: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    requests: performance.getEntriesByType('resource').length
})"""


def main() -> None:
    """Load the page, ask it, print the answer and end."""
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    application = QApplication([sys.argv[0], "--no-sandbox"])
    view = QWebEngineView()
    view.resize(1200, 1500)

    def answer(text: str) -> None:
        print(text)
        if len(sys.argv) > 2:
            view.grab().save(sys.argv[2])
        application.quit()

    def ask(is_loaded: bool) -> None:
        assert is_loaded
        QTimer.singleShot(1000, lambda: view.page().runJavaScript(QUESTION, answer))

    view.loadFinished.connect(ask)
    view.load(QUrl.fromLocalFile(str(Path(sys.argv[1]).resolve())))
    view.show()
    QTimer.singleShot(50_000, application.quit)
    application.exec()


if __name__ == "__main__":
    main()
