"""The page of an explanation in a real browser engine, where an interpreter has one."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.cli.explain import main
from megatron.planner.memory import MEMORY_PARTS
from tests.harness.browser import browse, require_browser
from tests.unit.advice.planned_words import SMALL


def test_a_browser_shows_every_bar_and_pass_and_asks_no_network(tmp_path: Path) -> None:
    require_browser()
    page = tmp_path / "page.html"
    assert main([*SMALL, "--world-size", "12", "--html", str(page)]) == 0
    seen = json.loads(browse("browser_page.py", str(page))[-1])
    assert seen["outcome"] == "ok"
    assert seen["parts"] == 2 * len(MEMORY_PARTS)
    assert max(seen["widths"]) > 0
    # Two stages, two chunks, eight micro-batches, forward and backward.
    assert seen["passes"] == 2 * 2 * 8 * 2
    assert not seen["overflow"]
    assert seen["requests"] == 0
