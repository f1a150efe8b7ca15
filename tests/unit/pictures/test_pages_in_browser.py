"""Pages of runs in a real browser engine, where an interpreter has one: a run's own, and the live one of a folder."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.cli.plot import main
from megatron.plotting.dashboard_server import DashboardServer, address
from tests.harness.browser import browse, require_browser
from tests.unit.pictures.test_plot import titles, write_run

SHOWN = """[
    [...document.querySelectorAll('#charts svg')].filter(each => each.getBoundingClientRect().width > 200)
        .map(each => each.getAttribute('aria-label')),
    [...document.querySelectorAll('#runs td:nth-child(2)')].map(each => each.innerText),
    document.documentElement.scrollWidth > document.documentElement.clientWidth,
    performance.getEntriesByType('resource').every(each => each.name.startsWith(location.origin)),
]"""


def answers(lines: list[str]) -> list[Any]:
    return [json.loads(line) for line in lines if line.startswith("[[")]


def wait_for(picture: Path) -> None:
    until = time.monotonic() + 60
    while not picture.exists():
        assert time.monotonic() < until, f"{picture.name} was never taken"
        time.sleep(0.05)


def test_a_browser_shows_each_chart_of_a_run_and_asks_no_network(tmp_path: Path) -> None:
    require_browser()
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    page = run / "plot.html"
    steps = [{"do": "0", "until": "true", "ask": SHOWN.replace("startsWith(location.origin)", "length == 0")}]
    ((charts, iterations, overflows, is_local),) = answers(
        browse("browser_driver.py", page.as_uri(), str(tmp_path), given=json.dumps(steps))
    )
    assert charts == titles(page.read_text())
    assert (iterations, overflows, is_local) == (["30"], False, True)


def test_a_browser_follows_a_run_on_the_dashboard(tmp_path: Path) -> None:
    require_browser()
    runs = tmp_path / "runs"
    write_run(runs / "first", iterations=12)
    follows = "document.querySelector('#runs').innerText.includes('17')"
    steps = [{"do": "0", "until": "true", "ask": SHOWN}, {"do": "0", "until": follows, "ask": SHOWN}]
    with DashboardServer(runs, "127.0.0.1", 0, "a-token-of-tests") as server, ThreadPoolExecutor() as pool:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        words = (address(server), str(tmp_path))
        browser = pool.submit(browse, "browser_driver.py", *words, given=json.dumps(steps))
        wait_for(tmp_path / "0.png")
        write_run(runs / "first", iterations=17)
        write_run(runs / "second", iterations=13)
        lines = browser.result()
        server.shutdown()
        thread.join()
    before, after = answers(lines)
    assert "Training loss" in before[0]
    assert before[1:] == [["12"], False, True]
    assert after[0] == before[0]
    # The run that was written last comes first.
    assert after[1:] == [["13", "17"], False, True]
    assert (tmp_path / "1.png").stat().st_size > 10_000
