"""What was measured on a machine, as one JSON file and one readable file to send back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_NUM_LINES = 25


@dataclass
class Report:
    """Collect rows by section; each is JSON-ready. Files that belong to it lie beside it in ``folder``."""

    folder: Path
    machine: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, section: str, row: Row) -> None:
        """Add a row and write both files, so that a test that hangs later costs nothing that was measured."""
        self.sections.setdefault(section, []).append(row)
        self.write()

    def write(self) -> None:
        """Write ``report.json`` and ``report.md``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"machine": self.machine, **self.sections}
        (self.folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
        (self.folder / "report.md").write_text("\n".join(self._lines()) + "\n")

    def _lines(self) -> Iterator[str]:
        yield from ("# GPU tests", "", *(f"- {name}: {value}" for name, value in self.machine.items()))
        for name, rows in self.sections.items():
            yield from ("", f"## {name}", "", *_FORMATS[name](rows))


def _cells(rows: Sequence[Row]) -> Iterator[str]:
    passed = [row for row in rows if row["outcome"] == "passed"]
    yield f"{len(passed)} of {len(rows)} layouts compute what one device computes."
    for name in ("loss", "norm", "gradient", "parameter"):
        worst = max(rows, key=lambda row: row[name])
        yield f"Worst relative difference of {name}: {worst[name]:.1e} ({worst['name']})."
    for row in rows:
        if row["outcome"] != "passed":
            yield from ("", f"**{row['outcome']}** {row['name']}", *(f"    {reason}" for reason in row["reasons"]))


def _kernels(rows: Sequence[Row]) -> Iterator[str]:
    yield from _table(
        ("kernel", "result off by", "gradient off by", "allowed", "kernel ms", "twin ms", "twin / kernel"),
        (
            (
                *(
                    row["name"],
                    f"{row['difference']:.1e}",
                    f"{row['gradient_difference']:.1e}",
                    f"{row['allowed']:.0e}",
                ),
                *_times(row["kernel_ms"], row["twin_ms"]),
            )
            for row in rows
        ),
    )


def _times(kernel_ms: float | None, twin_ms: float | None) -> tuple[str, str, str]:
    if kernel_ms is None or twin_ms is None:
        return "", "", ""
    return f"{kernel_ms:.3f}", f"{twin_ms:.3f}", f"{twin_ms / kernel_ms:.2f}"


def _errors(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield from (f"**{row['name']}**", "", *(f"    {line}" for line in row["reason"].splitlines()), "")


def _offload(rows: Sequence[Row]) -> Iterator[str]:
    yield from _table(
        ("fraction offloaded", "overlapped", "pinned", "largest difference of a parameter"),
        (
            (
                *(f"{row['optimizer_offload_fraction']}", f"{row['overlap_cpu_optimizer_d2h_h2d']}"),
                *(f"{row['pin_cpu_grads']}", f"{row['distance']:.1e}"),
            )
            for row in rows
        ),
    )


def _bandwidths(rows: Sequence[Row]) -> Iterator[str]:
    yield from _table(
        ("operation", "ranks", "MiB", "ms", "GB/s a rank"),
        (
            (row["operation"], row["ranks"], f"{row['bytes'] / 2**20:g}", f"{row['ms']:.3f}", f"{row['gb_s']:.2f}")
            for row in rows
        ),
    )


def _timings(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield f"### {row['name']}, {row['ranks']} ranks"
        yield from ("", f"`{' '.join(row['flags'])}`", "", *([row["note"], ""] if row["note"] else []))
        yield from _table(
            ("", "measured", "predicted"),
            (
                ("step, ms (median)", f"{row['step_ms']:.1f}", _known(row["predicted"].get("step_ms"), ".1f")),
                ("fastest to slowest", f"{min(row['steps_ms']):.1f} to {max(row['steps_ms']):.1f}", ""),
                ("tokens per second", f"{row['tokens_per_second']:,.0f}", ""),
                ("TFLOP/s a device", f"{row['tflops']:.1f}", _known(row["predicted"].get("tflops"), ".1f")),
                ("MFU", _known(row["mfu"], ".1%"), _known(row["predicted"].get("mfu"), ".1%")),
                ("peak memory, MiB", f"{row['max_allocated_mib']:,.0f}", _known(row["predicted"].get("mib"), ",.0f")),
            ),
        )
        yield from ("", f"Last loss {row['last_loss']:.6f}. Files: {', '.join(row['files'])}.", "")
        if row.get("without_memory_history"):
            yield from (f"No memory history: {row['without_memory_history']}.", "")
        if "reason" in row["predicted"]:
            yield from (f"No prediction: {row['predicted']['reason']}.", "")


def _source_lines(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield f"### {row['name']}"
        total, predicted = row["measured_total_ms"], row["predicted_total_ms"]
        yield from ("", f"Work of one step: {total:.2f} ms measured, {_known(predicted, '.2f')} ms predicted.", "")
        lines = sorted(row["lines"], key=lambda line: -max(line["measured_ms"], line["predicted_ms"] or 0.0))
        yield from _table(
            ("line", "measured ms", "predicted ms", "measured / predicted"),
            (
                (
                    *(line["where"] or "(none)", f"{line['measured_ms']:.3f}", _known(line["predicted_ms"], ".3f")),
                    f"{line['measured_ms'] / line['predicted_ms']:.2f}" if line["predicted_ms"] else "",
                )
                for line in lines[:_NUM_LINES]
            ),
        )
        yield from ("", f"{max(0, len(lines) - _NUM_LINES)} more lines are in report.json.", "")


_FORMATS: Mapping[str, Callable[[Sequence[Row]], Iterator[str]]] = {
    "cells": _cells,
    "errors": _errors,
    "kernels": _kernels,
    "offload": _offload,
    "bandwidths": _bandwidths,
    "timings": _timings,
    "source lines": _source_lines,
}


def _known(value: float | None, form: str) -> str:
    return "not known" if value is None else format(value, form)


def _table(head: Sequence[str], rows: Iterator[Sequence[Any]] | Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
