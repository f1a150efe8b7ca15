"""The report of a GPU window in Markdown, from its findings and the predictions. This module imports no torch."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.window import findings
from tests.gpu.window.findings import Line, of_kind, read_lines
from tests.gpu.window.plan import PARTS, Part

_SHOWN = ("kind", "part", "name", "status", "source", "reason", "frames", "key")
_MAX_REASON = 220

TERMS = """\
Sources of figures:

- **measured**: on a GPU, in this window.
- **emulated**: by the CUDA emulator of the tests, which computes with CPU kernels. It shows that the code runs and
  what it computes, and no speed.
- **predicted**: computed before the window from published figures of the GPU, by a roofline model and by dry runs.
- **simulated**: a dry run's step on tensors without values. Its times and memory are predictions.

Statuses of findings:

- **passed**, **failed**: a result was compared with a reference, within a tolerance. An exception also counts as
  failed.
- **recorded**: a figure or a fact that has no pass mark.
- **unsupported**: this GPU type, this torch or the emulator cannot do it. The reason is given.
- **skipped**: the planned time of the part was up.

A part is **completed**, **crashed**, **timed out**, **unavailable** (it found no GPU) or **not run**. Each part is a
process with a time limit, so that no part disturbs another one.

`findings.jsonl` has all findings with all their values. `failed_parts.log` has the output of parts that crashed or
timed out."""

_LAYOUT_NOTE = (
    "The name of a layout has the model, the kind of samples, the degrees of tensor (tp), pipeline (pp), context (cp), "
    "data (dp) and expert (ep, etp) parallelism, and further options. The difference is the one of the gradients."
)
NOTES: Mapping[str, str] = {
    "gemms": (
        "`qkv` and `proj` are the linear layers of attention, `fc1` and `fc2` those of the MLP, and `output` that of "
        "the vocabulary. Weight gradients with `fp32 sums` are added to a float32 tensor."
    ),
    "programs": (
        "A difference is the norm of what a result or a gradient is off by, relative to the norm of the reference."
    ),
    "attention": (
        "`s` is the sequence length, `b` the batch size and `d` the head size. `heads 32/8` are 32 query heads and 8 "
        "key-value heads. `as chosen` is the kernel that the project chooses; the parentheses name it."
    ),
    "small_model": "Peak memory is the most that torch's allocator had allocated.",
    "features": "Differences of losses and gradient norms are relative, and the largest of all steps.",
    "headline": "Peak memory is the most that torch's allocator had allocated.",
    "layouts": _LAYOUT_NOTE,
    "shared_gpu": _LAYOUT_NOTE,
}
"""What a reader needs to know for the tables of a part, by its module."""


def write_report(path: Path, predictions: Path, target: Path) -> None:
    """Write the report of a file of findings."""
    lines, torn = read_lines(path)
    known = json.loads(predictions.read_text()) if predictions.is_file() else {}
    target.write_text("\n".join(_report(lines, torn, known)) + "\n")


def _report(lines: list[Line], torn: int, known: Mapping[str, Any]) -> Iterator[str]:
    window: Line = next(of_kind(lines, "window"), {})
    device: Line = next(of_kind(lines, "device"), {})
    found = list(of_kind(lines, "finding"))
    ended = {line["part"]: line for line in of_kind(lines, "part")}
    sizes = "small" if window.get("small") else "full"
    predicted: Mapping[str, float] = known.get(sizes, {}).get(device.get("figures_of"), {})
    yield from ("# GPU window", "", "## Summary", "")
    yield from _summary(window, device, found, ended)
    if torn:
        yield f"- {torn} lines of the findings are incomplete and left out."
    if device and not predicted:
        yield (
            f"- No predictions for {device.get('figures_of') or device['name']} at {sizes} sizes: "
            "`python tools/gpu_window.py --predict` makes them on a CPU, `--report` joins them."
        )
    yield from ("", "| part | shows | status | seconds | passed | failed | recorded | unsupported | skipped |")
    yield "|" + "---|" * 9
    for part in _parts(window):
        of_part = Counter(line["status"] for line in found if line["part"] == part.number)
        end = ended.get(part.number, {"status": findings.NOT_RUN, "seconds": 0.0})
        counts = (findings.PASSED, findings.FAILED, findings.RECORDED, findings.UNSUPPORTED, findings.SKIPPED)
        cells = [f"{part.number}. {part.title}", part.shows, end["status"], f"{end['seconds']:.0f}"]
        yield _row([*cells, *(str(of_part[status]) for status in counts)])
    yield from _failures(found, ended)
    yield from _in_brief(_parts(window), found, predicted)
    yield from ("", "## Terms", "", TERMS)
    for part in _parts(window):
        if ended.get(part.number, {}).get("status") == findings.UNAVAILABLE:
            # The summary has the reason.
            continue
        yield from ("", f"## {part.number}. {part.title}", "")
        of_part_lines = [line for line in found if line["part"] == part.number]
        yield from _part(part, of_part_lines, ended.get(part.number), predicted)


def _parts(window: Line) -> list[Part]:
    numbers = window.get("parts") or [part.number for part in PARTS]
    return [part for part in PARTS if part.number in numbers]


def _summary(window: Line, device: Line, found: Sequence[Line], ended: Mapping[int, Line]) -> Iterator[str]:
    if not device:
        reasons = {line["reason"] for line in ended.values() if line["status"] == findings.UNAVAILABLE}
        yield f"- **Unavailable: no GPU was used.** {'; '.join(sorted(reasons)) or 'No part started.'}"
    elif device["source"] == "emulated":
        yield (
            f"- **Emulated {device['name']}: nothing here was measured on a GPU.** Results show that the code runs and "
            "computes what the CPU computes. Times are those of the emulator, and say nothing about a GPU."
        )
    else:
        yield f"- **Measured on {device['name']}**, compute capability {device['capability']}."
    if device:
        yield (
            f"- torch {device['torch']}, CUDA {device['cuda']}, {device['memory_gib']} GiB of device memory, "
            f"Python {window.get('python')}, {window.get('system')}."
        )
    took = sum(line["seconds"] for line in ended.values())
    yield f"- {window.get('date')}, commit {window.get('commit')}; took {took:.0f} s of {window.get('seconds'):.0f} s."
    if window.get("small"):
        yield "- Small sizes: models keep their names, and have two layers and a hidden size of 32."
    counts = Counter(line["status"] for line in found)
    if found:
        yield "- Findings: " + ", ".join(f"{counts[status]} {status}" for status in findings.STATUSES if counts[status])
    lost = [f"part {number} {line['status']}" for number, line in ended.items() if _is_lost(line)]
    if lost:
        yield f"- **{', '.join(lost)}**: see failed_parts.log."


def _is_lost(line: Line) -> bool:
    return line["status"] in (findings.CRASHED, findings.TIMED_OUT)


def _failures(found: Sequence[Line], ended: Mapping[int, Line]) -> Iterator[str]:
    failed = [line for line in found if line["status"] == findings.FAILED]
    lost = {number: line for number, line in ended.items() if _is_lost(line)}
    yield from ("", "### Failures", "")
    if not failed and not lost:
        yield "Nothing failed." if found else "Nothing was compared."
    for number, line in lost.items():
        ended_so = _ended_in_words(line["status"])
        yield f"- part {number} {ended_so} after {line['seconds']:.0f} s: {_short(line['reason'])}"
    for line in failed:
        yield f"- part {line['part']}, {line['name']}: {_short(line.get('reason', 'no reason was given'))}"


def _in_brief(parts: Sequence[Part], found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    lines = [
        f"- {part.number}. {part.title}: {sentence}"
        for part in parts
        for sentence in SENTENCES.get(part.module, _no_sentences)(
            [line for line in found if line["part"] == part.number], predicted
        )
    ]
    if lines:
        yield from ("", "### Results in brief", "", *lines)


def _part(part: Part, found: Sequence[Line], end: Line | None, predicted: Mapping[str, float]) -> Iterator[str]:
    if end is None:
        yield "This part did not run."
        return
    took = f"{end['seconds']:.0f} s of at most {end['limit_s']:.0f} s"
    yield f"It shows {part.shows}. It {_ended_in_words(end['status'])} ({took}){_because(end.get('reason', ''))}."
    if found and part.module in NOTES:
        yield from ("", NOTES[part.module])
    values = [line for line in found if "value" in line]
    if values:
        yield from ("", *_table_of_values(values, predicted))
    compared = [line for line in found if "tolerance" in line]
    if compared:
        head = ["comparison", "status", "difference", "tolerance", "compared with"]
        yield from ("", _row(head), "|" + "---|" * 5)
        for line in compared:
            difference = _number(line["difference"])
            cells = [line["name"], f"**{line['status']}**" if line["status"] == findings.FAILED else line["status"]]
            yield _row([*cells, difference, _number(line["tolerance"]), line["compared"]])
    rest = [line for line in found if "value" not in line and "tolerance" not in line]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for line in rest:
        if line["status"] in (findings.UNSUPPORTED, findings.SKIPPED):
            by_reason.setdefault((line["status"], line.get("reason", "")), []).append(line["name"])
    # The failed ones are listed above.
    facts = [line for line in rest if line["status"] in (findings.RECORDED, findings.PASSED)]
    if facts or by_reason:
        yield ""
    for line in facts:
        yield f"- {line['name']}: {_fact(line)}"
    for (status, reason), names in by_reason.items():
        yield f"- {status}: {_listed(names)}{_because(reason)}"


def _ended_in_words(status: str) -> str:
    words = {
        findings.COMPLETED: "completed",
        findings.TIMED_OUT: "timed out",
        findings.CRASHED: "crashed",
        findings.UNAVAILABLE: "found no GPU",
        findings.NOT_RUN: "did not run",
    }
    return words[status]


def _because(reason: str) -> str:
    return f": {_short(reason)}" if reason else ""


def _listed(names: Sequence[str], count: int = 6) -> str:
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")


def _table_of_values(values: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    """Yield the table of a part's figures; emulated ones have no ratio, which would look like a measurement."""
    is_measured = values[0]["source"] == "measured"
    head = ["figure", values[0]["source"], "predicted" if is_measured else "predicted for a GPU", "unit"]
    yield _row([*head, "measured / predicted", "details"] if is_measured else head)
    yield "|" + "---|" * (6 if is_measured else 4)
    for line in values:
        value, expected = line["value"], predicted.get(line.get("key", ""))
        cells = [line["name"], _number(value), "" if expected is None else _number(expected), line["unit"]]
        if is_measured:
            cells.append(f"{value / expected:.2f}" if expected and isinstance(value, (int, float)) else "")
            known = {key: each for key, each in line.items() if key not in (*_SHOWN, "value", "unit")}
            cells.append(", ".join(f"{key} {_number(each)}" for key, each in known.items()))
        yield _row(cells)


def _fact(line: Line) -> str:
    known = [_text(v) if key == "note" else f"{key} {_text(v)}" for key, v in line.items() if key not in _SHOWN]
    reason = [_short(line["reason"])] if line.get("reason") else []
    status = [] if line["status"] == findings.RECORDED else [line["status"]]
    return "; ".join([*status, *reason, *known])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"`{key}` {_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value) or "none"
    return _number(value)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} …"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _no_sentences(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    return iter(())


def _value_of(found: Sequence[Line], name: str) -> float | None:
    """Return a measured figure; the emulator's are none."""
    for line in found:
        if line["name"] == name and line["source"] == "measured" and isinstance(line.get("value"), (int, float)):
            return float(line["value"])
    return None


def _ratios(found: Sequence[Line], predicted: Mapping[str, float], words: str) -> list[float]:
    return [
        line["value"] / predicted[line["key"]]
        for line in found
        if words in line["name"] and line["source"] == "measured" and predicted.get(line.get("key", ""))
        if isinstance(line.get("value"), (int, float))
    ]


def _ratio_sentences(found: Sequence[Line], predicted: Mapping[str, float], kinds: Mapping[str, str]) -> Iterator[str]:
    for words, what in kinds.items():
        ratios = _ratios(found, predicted, words)
        if ratios:
            yield (
                f"{what} take {statistics.median(ratios):.2f} times the predicted time in the median of "
                f"{len(ratios)} shapes ({min(ratios):.2f} to {max(ratios):.2f})."
            )


def _of_environment(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    missing = [line["name"] for line in found if line["status"] == findings.FAILED]
    if missing:
        yield f"These paths do not work, and training takes slower ones: {', '.join(missing)}."
    elif found:
        yield "Every path that this GPU type supports works."


def _of_constants(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    launch = _value_of(found, "host time of an operator's launch")
    if launch is not None:
        yield f"The host launches an operator in {launch:.1f} µs: kernels that are shorter leave the GPU waiting."
    rates = [line["value"] for line in found if line.get("key") == "large matmul" and line["source"] == "measured"]
    if len(rates) == 2:
        yield f"A large matmul starts at {rates[0]:.0f} TFLOP/s and runs at {rates[1]:.0f} TFLOP/s seconds later."


def _of_gemms(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    kinds = {
        "forward, bf16": "Forward GEMMs in bf16",
        "input gradient, bf16": "GEMMs of input gradients in bf16",
        "fp32 sums": "GEMMs of weight gradients with fp32 sums",
        "FP8": "FP8 GEMMs",
        "grouped": "Grouped GEMMs of experts",
    }
    yield from _ratio_sentences(found, predicted, kinds)


def _of_attention(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    yield from _ratio_sentences(
        found, predicted, {", forward": "Forward passes of attention", ", backward": "Backward passes of attention"}
    )


def _of_programs(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    slower = [
        line["name"]
        for line in found
        if line["source"] == "measured" and line.get("kernel_ms", 0.0) > line.get("twin_ms", 0.0) > 0.0
    ]
    if slower:
        yield f"These kernels are slower than the same computation in single torch operators: {', '.join(slower)}."


def _of_small_model(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    for count in ("2 micro-batches", "1 micro-batch"):
        plain = _value_of(found, f"GPT-2 345M, {count}")
        graphed = _value_of(found, f"GPT-2 345M, {count}, CUDA graphs")
        if plain is not None and graphed is not None:
            saved = 100.0 * (1.0 - graphed / plain)
            limits = "the host limits the step" if saved > 3.0 else "the host does not limit the step"
            yield f"With {count} CUDA graphs save {saved:.1f} % ({plain:.1f} to {graphed:.1f} ms): {limits}."


def _of_headline(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    times = {line["name"]: line["value"] for line in found if line.get("unit") == "ms per step"}
    measured = {name for name in times if _value_of(found, name) is not None}
    for name in sorted(measured):
        base = next((other for other in measured if other.endswith("bf16") and other.startswith(name[:8])), None)
        if "FP8" in name and base is not None:
            yield f"{name} takes {times[name] / times[base]:.2f} times the time of bf16."


def _of_profiled(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    for line in found:
        if line.get("unit") == "%" and line["source"] == "measured":
            yield f"{line['name']}: {line['value']:.0f} %. The rest is time in which the GPU waits for the host."


def _of_results(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
    compared = [line for line in found if "tolerance" in line]
    good = sum(line["status"] == findings.PASSED for line in compared)
    if compared:
        yield f"{good} of {len(compared)} comparisons are within their tolerance."


def _both(*each: Any) -> Any:
    def sentences(found: Sequence[Line], predicted: Mapping[str, float]) -> Iterator[str]:
        for one in each:
            yield from one(found, predicted)

    return sentences


SENTENCES: Mapping[str, Any] = {
    "environment": _of_environment,
    "constants": _of_constants,
    "gemms": _of_gemms,
    "programs": _both(_of_results, _of_programs),
    "attention": _of_attention,
    "small_model": _both(_of_results, _of_small_model),
    "features": _of_results,
    "headline": _of_headline,
    "profiled": _of_profiled,
    "layouts": _of_results,
    "shared_gpu": _of_results,
}
