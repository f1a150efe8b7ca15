"""The tables of predictions on the pages are what the planner predicts."""

from __future__ import annotations

import pytest

from docs.scripts import predict_tables


def test_the_tables_of_the_pages_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_tables.main(["--check"]) == 0, capsys.readouterr().err


def test_another_prediction_and_missing_or_further_rows_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = predict_tables.LAYOUTS
    shorter = {run: dict(list(layouts.items())[:1]) for run, layouts in runs.items()}
    run, layouts = next(iter(runs.items()))
    shorter[run] = {"DP 8": layouts["TP 8"]}
    monkeypatch.setattr(predict_tables, "LAYOUTS", shorter)
    monkeypatch.setattr(predict_tables, "CHANGES", predict_tables.CHANGES[:2])
    assert predict_tables.main(["--check"]) == 1
    found = capsys.readouterr().err.splitlines()
    shown, predicted = found[0].split("; predicted: ")
    assert shown == "choosing_parallelism.md: | DP 8 | 98,824 | out of memory | |"
    assert predicted == "| DP 8 | 26,350 | 19,403 | 54,041 |"
    assert sum("the script has no such row" in line for line in found) == len(runs) + 1
    monkeypatch.setattr(predict_tables, "LAYOUTS", {run: {"DP 8": ""}})
    assert predict_tables.main(["--check"]) == 1
    assert "4 tables begin with | layout | memory, MiB | ms per step | tokens/s |, but 1 are predicted" in (
        capsys.readouterr().err
    )
