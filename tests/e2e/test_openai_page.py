"""The server's page in a real browser engine, where an interpreter has one.

``BROWSER_PYTHON`` names an interpreter with the package PyQt6-WebEngine; without it the tests' own is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

from megatron.core.inference.request import GenerationRequest, StopRule
from megatron.core.inference.sampling_config import SamplingConfig
from tests.harness.openai_server import NAME, Served, served

SCRIPT = Path(__file__).parents[1] / "harness" / "browser_driver.py"
PYTHON = os.environ.get("BROWSER_PYTHON", sys.executable)
ENVIRONMENT = {
    "QT_QPA_PLATFORM": "offscreen",
    "QTWEBENGINE_DISABLE_SANDBOX": "1",
    "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu --no-sandbox",
}
MARKUP = "<b>bold</b>"
SEND = "byId('temperature').value = 0; byId('question').value = {}; byId('send').click()"
STEPS = [
    {"do": "0", "until": "model", "ask": "[document.title, byId('model').textContent, byId('error').textContent]"},
    {
        "do": SEND.format(json.dumps(MARKUP)),
        "until": "!running && conversation.length == 2",
        "ask": "[...document.querySelectorAll('.message')].map(each => [each.className, each.textContent])",
    },
    {
        "do": SEND.format("'x'.repeat(600)"),
        "until": "!running && byId('error').textContent",
        "ask": "[byId('error').textContent, conversation.length, byId('question').value.length]",
    },
    {
        "do": "byId('tab-tokens').click(); byId('prompt').value = 'abc'; byId('max-tokens').value = 5; "
        "byId('continue').click()",
        "until": "!running && document.querySelectorAll('.token').length > 3",
        "ask": "[[...document.querySelectorAll('.token')].map(each => each.textContent), byId('chat').hidden, "
        "document.querySelectorAll('b').length]",
    },
    {
        "do": "document.querySelectorAll('.token')[3].click()",
        "until": "document.querySelectorAll('#detail tr').length",
        "ask": "[document.querySelectorAll('#detail tr').length, document.querySelector('#detail td').textContent, "
        "document.documentElement.scrollWidth > document.documentElement.clientWidth]",
    },
    {
        "do": "byId('score').click()",
        "until": "!running && document.querySelectorAll('.token').length == 3",
        "ask": "performance.getEntriesByType('resource').every(each => each.name.startsWith(location.origin))",
    },
]


def likeliest(server: Served, prompt: str, count: int) -> list[str]:
    """Return the texts of the tokens that the engine takes by itself."""
    eod = server.tokenizer.eod_id
    assert eod is not None
    request = GenerationRequest(
        prompts=(tuple(server.tokenizer.tokenize(prompt)),),
        max_new_tokens=count,
        sampling=SamplingConfig(greedy=True),
        stop=StopRule(end_tokens=frozenset((eod,))),
    )
    return [server.tokenizer.detokenize([token]) for token in server.engine.generate(request)[0].tokens]


def test_a_browser_chats_and_looks_at_probabilities(tmp_path: Path) -> None:
    has_browser = subprocess.run(
        [PYTHON, "-c", "import PyQt6.QtWebEngineWidgets"], capture_output=True, check=False
    ).returncode
    if has_browser != 0:
        pytest.skip("no browser engine: BROWSER_PYTHON names no interpreter with PyQt6-WebEngine")
    with served(tmp_path / "served") as server:
        shown = subprocess.run(
            [PYTHON, str(SCRIPT), server.url, str(tmp_path)],
            input=json.dumps(STEPS),
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        lines: list[Any] = [json.loads(line) for line in shown.stdout.splitlines() if line[:1] in '["tf']
        answer = "".join(likeliest(server, f"<|user|>{MARKUP}<|assistant|>", 64))
        tokens = likeliest(server, "abc", 5)
    name, messages, refused, (shown_tokens, chat_is_hidden, num_bold), (num_rows, best, overflows), is_local = lines
    assert name == [NAME, NAME, ""]
    assert messages == [["message user", MARKUP], ["message assistant", answer]]
    assert (refused[0].startswith("a prompt of "), refused[1:]) == (True, [2, 600])
    assert (shown_tokens, chat_is_hidden, num_bold) == (["a", "b", "c", *tokens], True, 0)
    assert (num_rows, best, overflows) == (10, json.dumps(tokens[0], ensure_ascii=False), False)
    assert is_local
    assert len(list(tmp_path.glob("*.png"))) == len(STEPS)
