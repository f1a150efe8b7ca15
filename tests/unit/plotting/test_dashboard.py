"""The dashboard over HTTP and the pages of runs in a browser: who may see them, and what they show."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from megatron.cli.dashboard import main
from megatron.cli.plot import main as plot_main
from megatron.core.dist_checkpointing.index import CheckpointIndex, StoredFile, write_index
from megatron.core.flight_recorder import Communication
from megatron.core.pipeline_parallel.schedule_actions import build_schedule
from megatron.core.pipeline_parallel.simulator import simulate
from megatron.core.pipeline_parallel.timeline import write_timeline
from megatron.plotting import run_folder
from megatron.plotting.dashboard_server import DashboardServer, address, colors_of
from megatron.training.fault_tolerance.hang_report import Culprit, Diagnosis, HangReport, read_hang_report
from megatron.training.fault_tolerance.processes import ProcessName
from megatron.training.fault_tolerance.rank_state import RankState
from tests.harness.browser import browse, require_browser
from tests.unit.plotting.test_plot import titles, write_run

TOKEN = "a-token-of-tests"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DashboardServer]:
    """Serve a folder with one run."""
    write_run(tmp_path / "runs" / "first", iterations=12)
    with DashboardServer(tmp_path / "runs", "127.0.0.1", 0, TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: DashboardServer, path: str, token: str = TOKEN) -> tuple[int, str]:
    """Return the status and the text of a page."""
    url = f"http://127.0.0.1:{server.server_address[1]}/{path}{'&' if '?' in path else '?'}token={quote(token)}"
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("token", ["", "a-token-of-test", "ü"])
def test_nothing_is_shown_without_the_token(server: DashboardServer, token: str) -> None:
    for path in ("", "body", "step?run=first&step=1"):
        status, text = get(server, path, token)
        assert status == 403
        assert "<h1>No access</h1>" in text
        assert not titles(text)


def test_the_page_compares_runs_and_follows_them(server: DashboardServer) -> None:
    status, text = get(server, "")
    assert status == 200
    assert "Training loss" in titles(text)
    assert get(server, "body")[1].count('<td data-name="iteration">12</td>') == 1
    write_run(server.folder / "first", iterations=17)
    write_run(server.folder / "deep" / "second", iterations=13)
    both = get(server, "body")[1]
    assert '<td data-name="iteration">17</td>' in both
    assert both.count("deep/second</td>") == 1
    one = get(server, "body?run=first")[1]
    assert "deep/second</td>" not in one
    # The list has every run, with a box.
    assert '<input type="checkbox" id="run:first" value="first" checked>' in one
    assert '<input type="checkbox" id="run:deep/second" value="deep/second">' in one
    assert "No run is selected" in get(server, "body?run=")[1]
    assert address(server).endswith(f"/?token={TOKEN}")


def test_the_list_has_the_status_of_each_run(server: DashboardServer) -> None:
    record = server.folder / "first" / "run_record"
    record.mkdir()
    (record / "starts.jsonl").write_text('{"train_iters": 12}\n')
    for iteration, error, state, told in (
        (12, None, "finished", "iteration 12 of 12"),
        (11, None, "stopped", "on request, before the last iteration"),
        (11, "<b> is full", "crashed", "&lt;b&gt; is full"),
    ):
        (record / "end.json").write_text(json.dumps({"iteration": iteration, "error": error}))
        text = get(server, "body")[1]
        assert f'<span class="status {state}">{state}</span>' in text
        assert told in text


def test_smoothing_and_scales_are_in_the_address(server: DashboardServer) -> None:
    text = get(server, "?smoothing=0.25&log=lm_loss")[1]
    assert 'value="0.25"><output id="weight" for="smoothing">0.25</output>' in text
    assert text.count('aria-pressed="true"') == 1
    assert 'id="log:lm_loss" value="lm_loss" aria-pressed="true"' in text
    assert 'class="line average"' in text
    assert 'class="line average"' not in get(server, "?smoothing=0")[1]
    for wrong in ("1", "-0.1", "nan", "much", ""):
        status, text = get(server, f"body?smoothing={wrong}")
        assert status == 400
        assert f"smoothing is {escape(repr(wrong))}; use a number from 0 to 0.99" in text


def test_the_run_that_was_started_last_comes_first(server: DashboardServer) -> None:
    """The order and the colors do not change with each line that a run writes."""
    for number, name in enumerate(("old", "new")):
        run = write_run(server.folder / name, iterations=3)
        (run / "run_record").mkdir()
        (run / "run_record" / "config.toml").touch()
        os.utime(run / "run_record" / "config.toml", (1e9 + number, 1e9 + number))
    os.utime(server.folder / "new" / "metrics.jsonl", (1, 1))
    assert list(run_folder.find_runs(server.folder)) == ["first", "new", "old"]


def test_a_run_keeps_its_color_when_others_are_selected() -> None:
    runs = [f"run {number}" for number in reversed(range(12))]
    assert colors_of(runs, runs[:3]) == {"run 11": 3, "run 10": 2, "run 9": 1}
    assert colors_of(runs, ["run 10"]) == {"run 10": 2}
    assert colors_of(["run 12", *runs], ["run 10"]) == {"run 10": 2}
    # Run 2 was started earlier, and has the color that run 10 would have.
    assert colors_of(runs, ["run 10", "run 2"]) == {"run 10": 0, "run 2": 2}
    assert len(set(colors_of(runs, runs[:8]).values())) == 8


def test_a_folder_without_runs_says_so(tmp_path: Path, server: DashboardServer) -> None:
    server.folder = tmp_path / "none"
    assert "has written a metrics.jsonl yet" in get(server, "body")[1]


def test_a_run_that_cannot_be_drawn_yet_hides_no_other(server: DashboardServer) -> None:
    begun = server.folder / "begun"
    begun.mkdir()
    (begun / "metrics.jsonl").touch()
    text = get(server, "body")[1]
    assert "Training loss" in titles(text)
    assert text.count('<p class="bad">') == 1
    assert str(begun) in text
    (server.folder / "first" / "metrics.jsonl").write_text("")
    assert get(server, "body")[1].count('<p class="bad">') == 2


def test_checkpoints_hangs_and_recorded_schedules_are_shown(server: DashboardServer) -> None:
    run = server.folder / "first"
    for iteration in (5, 10):
        (run / f"iter_{iteration:07d}").mkdir()
    (run / "iter_0000005" / "known_to_train.json").write_text("{}")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    (run / "hang-20261122-140005.json").write_text("{}")
    write_timeline(run / "schedule.json", simulate(build_schedule("1f1b", 2, 4), 1))
    (run / "old-schedule.json").write_text(json.dumps({"events": []}))
    text = get(server, "body")[1]
    assert f"{checkpoint_row('iter_0000010', 'loaded by default')}<td" in text
    assert f"{checkpoint_row('iter_0000005', 'validated')}<td" in text
    assert "hang-20261122-140005.json" in text
    assert "is not a hang report; pass a hang-*.json" in text
    assert text.count("Recorded schedule of first") == text.count("Planned schedule of first") == 1


def checkpoint_row(name: str, state: str = "") -> str:
    """Return the first cells of the row of an empty checkpoint."""
    cells = f'<td data-name="checkpoint">{name}</td><td data-name="MiB">0.0</td>'
    return f'{cells}<td class="text" data-name="state">{state}</td>'


def write_checkpoint(folder: Path) -> None:
    """Write an index of two shards, and the shards."""
    folder.mkdir()
    sizes = {"shard_00000.safetensors": 30, "shard_00001.safetensors": 20}
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    files = {name: StoredFile(size, 8, "00000000") for name, size in sizes.items()}
    write_index(folder, CheckpointIndex({}, files, {"progress": {}}))


WHOLE = (
    '<td class="text" data-name="health">complete: the index matches its checksum, '
    "2 shards have the recorded sizes</td>"
)


def test_each_checkpoint_has_its_health(server: DashboardServer) -> None:
    run = server.folder / "first"
    for iteration in range(1, 7):
        write_checkpoint(run / f"iter_{iteration:07d}")
    (run / "iter_0000002" / "shard_00000.safetensors").write_bytes(bytes(29))
    (run / "iter_0000003" / "shard_00001.safetensors").unlink()
    (run / "iter_0000004" / "index.json").unlink()
    index = run / "iter_0000005" / "index.json"
    index.write_text(index.read_text().replace("shard_00001", "shard_00007"))
    (run / "iter_0000006" / "index.json").write_text("{")
    (run / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    text = get(server, "body")[1]
    assert f"{checkpoint_row('iter_0000001')}{WHOLE}" in text
    assert text.count(WHOLE) == 1
    for words in (
        "shard_00000.safetensors has 29 of 30 bytes",
        "shard_00001.safetensors is missing",
        "no index.json: incomplete or damaged",
        "index.json was changed after it was written",
        f"{run / 'iter_0000006' / 'index.json'}: not readable as JSON",
    ):
        assert f'<td class="text" data-name="health"><span class="bad">{words}' in text
    assert (
        '<td class="text" data-name="health">Megatron&#x27;s torch format, which has no checksums: not checked</td>'
        in text
    )
    # What was damaged is looked at again.
    write_checkpoint(run / "iter_0000008")
    (run / "iter_0000002" / "shard_00000.safetensors").write_bytes(bytes(30))
    assert get(server, "body")[1].count(WHOLE) == 3


def test_the_last_report_of_a_hang_is_told(server: DashboardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = server.folder / "first"
    blocked = Communication("tp ranks 0,1", 7, "all_reduce", 64, (4, 4), "a/<b>.py:12", 30.0, None)
    process = ProcessName("node", "machine", 41, 5)
    states = {
        0: RankState(0, process, phase="forward", iteration=3, blocked=blocked, entered={blocked.channel: 7}),
        1: RankState(1, process, phase="forward", iteration=3, entered={blocked.channel: 6}),
    }
    diagnosis = Diagnosis({0: blocked}, {0: (1,)}, (Culprit(1, blocked, (0,), False),))
    report = HangReport(
        20.0, states, {0: 30.0, 1: 30.0}, {0: "alive", 1: "stopped"}, {}, diagnosis, "2026-11-22 14:00:05"
    )
    (run / "hang-20261121-000000.json").write_text("{}")
    written = report.write(run)
    assert written is not None
    text = get(server, "body")[1]
    told = text.partition('<pre class="wide">')[2].partition("</pre>")[0].splitlines()
    assert told[:2] == ["2026-11-22 14:00:05", "HANG: there was no progress for 30.0 s; 3 iterations are done"]
    assert len(told) == 5
    (culprit,) = report.culprit_lines()
    assert "has not entered all_reduce #7 of tp ranks 0,1, 64 bytes (a/<b>.py:12)" in culprit
    assert f'<p class="sample">{escape(culprit)}</p>' in text
    assert text.count('<pre class="wide">') == 1
    assert text.count("A hang was reported") == 2
    times_read: list[Path] = []
    monkeypatch.setattr(
        run_folder, "read_hang_report", lambda path: (times_read.append(path), read_hang_report(path))[1]
    )
    assert told == get(server, "body")[1].partition('<pre class="wide">')[2].partition("</pre>")[0].splitlines()
    assert not times_read
    damaged = json.loads(written.read_text(encoding="utf-8"))
    damaged["culprits"][0]["rank"] = 9
    written.write_text(json.dumps(damaged), encoding="utf-8")
    text = get(server, "body")[1]
    assert f"{written.name} is damaged" in text
    assert times_read == [written]
    assert '<table id="runs">' in text


def test_a_step_of_no_run_is_not_looked_for(server: DashboardServer) -> None:
    assert "no such run or step" in get(server, "step?run=../other&step=1")[1]
    assert "no such run or step" in get(server, "step?run=first&step=-1")[1]
    assert get(server, "other")[0] == 404


@pytest.mark.parametrize("words", ["none", ". --port 70000", ". --token short", ". --host 203.0.113.7"])
def test_what_cannot_be_served_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert capsys.readouterr().err.count("\n") == 1


SHOWN = """[
    [...document.querySelectorAll('.charts svg')].filter(each => each.getBoundingClientRect().width > 200)
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
    assert plot_main([str(run)]) == 0
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


STATE = """[[
    location.search.replace(/.*?&/, ''),
    document.querySelectorAll('.average').length,
    [...document.querySelectorAll('[aria-pressed=true]')].map(each => each.value),
    [...document.querySelectorAll('#runs td:first-child')].map(each => each.innerText),
    document.querySelector('#readout').innerText,
]]"""
CONTROLS = [
    {
        "do": "byId('smoothing').value = 0; byId('smoothing').dispatchEvent(new Event('input', {bubbles: true}))",
        "until": "!document.querySelector('.average')",
        "ask": STATE,
    },
    {"do": "byId('log:lm_loss').click()", "until": "document.querySelector('[aria-pressed=true]')", "ask": STATE},
    {"do": "byId('run:first').click()", "until": "document.querySelectorAll('#runs td').length == 6", "ask": STATE},
    {
        # In the middle of the axes: the runs have 12 iterations.
        "do": "svg = document.querySelector('svg.chart'); box = svg.getBoundingClientRect(); "
        "svg.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.left + box.width * 0.54, "
        "clientY: box.top + 20}))",
        "until": "!document.querySelector('#readout').hidden",
        "ask": STATE,
    },
    {"do": "byId('run:second').click()", "until": "!document.querySelector('#runs')", "ask": STATE},
]


def test_the_controls_of_the_dashboard_in_a_browser(tmp_path: Path) -> None:
    require_browser()
    runs = tmp_path / "runs"
    for name in ("first", "second"):
        write_run(runs / name, iterations=12)
    steps = [{"do": "byId = id => document.getElementById(id)", "until": "true", "ask": STATE}, *CONTROLS]
    with DashboardServer(runs, "127.0.0.1", 0, TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        lines = browse("browser_driver.py", address(server), str(tmp_path), given=json.dumps(steps))
        server.shutdown()
        thread.join()
    begun, plain, logarithmic, one, pointed, none = (state for (state,) in answers(lines))
    assert (begun[1] > 4, begun[2], sorted(begun[3]), begun[4]) == (True, [], ["first", "second"], "")
    assert plain[:2] == ["smoothing=0", 0]
    assert logarithmic[:3] == ["smoothing=0&log=lm_loss", 0, ["lm_loss"]]
    assert one[0] == "smoothing=0&log=lm_loss&run=second"
    assert one[3] == ["second"]
    assert pointed[4].split() == ["iteration", "6", "second", "4.7"]
    assert none[0] == "smoothing=0&log=lm_loss&run="
