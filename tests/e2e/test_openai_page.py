"""The server's page in a real browser engine, where an interpreter has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

from megatron.core.inference.inference_request import GenerationRequest, StopRule
from megatron.core.inference.sampling_config import SamplingConfig
from tests.harness.browser import browse, require_browser
from tests.harness.openai_server import NAME, Served, served

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
    require_browser()
    with served(tmp_path / "served") as server:
        shown = browse("browser_driver.py", server.url, str(tmp_path), given=json.dumps(STEPS))
        lines: list[Any] = [json.loads(line) for line in shown if line[:1] in '["tf']
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
