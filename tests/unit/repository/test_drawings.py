"""The pictures of the documents: they are what their script draws, and every one is shown on a page."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from types import ModuleType

import pytest
import torch

from megatron.core.parallel_config import ParallelSizes
from tests.unit.repository.source_tree import REPOSITORY, relative, tracked_files

SCRIPTS = REPOSITORY / "docs" / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"drawings_of_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawings() -> ModuleType:
    return load("draw_parallelism")


def test_the_pictures_are_what_the_code_divides(
    drawings: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.random.fork_rng(devices=[]):
        assert drawings.main(["--check"]) == 0, "run python docs/scripts/draw_parallelism.py"
        # Another order of the axes is another picture.
        monkeypatch.setattr(ParallelSizes, "grid", property(lambda sizes: {"tp": 2, "cp": 2, "dp": 2, "pp": 2}))
        assert drawings.main(["--check"]) == 1
    assert "rank_grid.svg" in capsys.readouterr().err


def test_the_plot_of_the_planner_shows_the_results_and_each_compared_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("draw_planner")
    assert script.main(["--check"]) == 0, "run python docs/scripts/draw_planner.py"
    memory, time = list(script.points("GiB")), list(script.points("s"))
    assert (len(memory), len(time)) == (19, 16)
    assert all(abs(point.predicted / point.measured - 1) < 0.04 for point in (*memory, *time))
    monkeypatch.setitem(script.COLORS, "GPT-2-345M", "#000000")
    assert script.main(["--check"]) == 1
    assert "planner.svg" in capsys.readouterr().err


def test_every_picture_is_shown_and_is_small_and_well_formed() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in tracked_files("*.md")}
    links = [(page.parent, link) for page, text in pages.items() for link in re.findall(r"!\[[^]]+\]\((\S+)\)", text)]
    shown = {(folder / link).resolve() for folder, link in links}
    pictures = tracked_files("docs/images/*")
    assert len(pictures) >= 9
    for picture in pictures:
        assert picture in shown, f"{relative(picture)} is on no page"
        assert picture.stat().st_size < 200_000, relative(picture)
        if picture.suffix == ".svg":
            ElementTree.fromstring(picture.read_text(encoding="utf-8"))
