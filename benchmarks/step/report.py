"""Summarize measured steps, and set the summaries out as a table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

_PARTS = ("forward", "backward", "reduction", "optimizer")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and extremes."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": quartiles[1],
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
        "min": min(values),
        "max": max(values),
    }


def steps_of(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, float]]:
    """Return every measured step of a contestant's runs, each a list of what its processes measured.

    Times are rank 0's; processor time is summed over the processes. ``others`` is the share of the machine's
    processors that other work took meanwhile.
    """
    steps = []
    for run in runs:
        for index, leader in enumerate(run[0]["steps"]):
            processor_s = sum(process["steps"][index]["processor_s"] for process in run)
            others_s = max(leader["machine_busy_s"] - processor_s, 0.0)
            others = others_s / leader["wall_s"] / (os.cpu_count() or 1)
            steps.append({**leader, "processor_s": processor_s, "others": others})
    return steps


def summarize(tokens_per_step: int, runs: Sequence[Sequence[dict[str, Any]]], max_others: float) -> dict[str, Any]:
    """Summarize a contestant's runs over the steps during which other work took at most ``max_others``."""
    measured = steps_of(runs)
    steps = [step for step in measured if step["others"] <= max_others]
    summary: dict[str, Any] = {
        "num_measured_steps": len(measured),
        "num_counted_steps": len(steps),
        "peak_memory_mib": statistics.median(sum(process["peak_memory_mib"] for process in run) for run in runs),
        "final_loss": next(iter(runs[-1][0]["losses"][-1:]), None),
        "versions": runs[-1][0]["versions"],
    }
    if steps:
        summary["tokens_per_second"] = spread([tokens_per_step / step["wall_s"] for step in steps])
        summary["others"] = spread([step["others"] for step in steps])
        for name in ("wall", "processor", *_PARTS):
            summary[f"{name}_s"] = spread([step.get(f"{name}_s", 0.0) for step in steps])
    return summary


def markdown(result: dict[str, Any]) -> str:
    """Return a result file's text."""
    workload = result["contestants"][0]["workload"]
    size = ", ".join(
        f"{name.replace('_', ' ')} {workload[name]}"
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "seq_length",
            "micro_batch_size",
            "vocab_size",
            "padded_vocab_size",
        )
    )
    experts = max(entry["workload"]["num_experts"] for entry in result["contestants"])
    if experts:
        width, topk = workload["ffn_hidden_size"], workload["router_topk"]
        size += f", {experts} experts, top {topk} of width {width // topk}, beside a dense feed-forward of {width}"
    load = result["load_average"]
    lines = [
        f"# Training step, {result['date']}",
        "",
        f"{size}; tied embeddings, AdamW, no dropout. {result['rounds']} rounds of fresh processes, which run in turns "
        f"of {result['turn_s']:g} s, each {result['measured_steps']} steps after {result['warmup_steps']} of warm-up. "
        "Medians, quartiles in brackets; processor time is user + system over all processes (threads that wait spin, "
        "which counts).",
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ". "
        f"Load average before the runs: {load['min']:.1f} to {load['max']:.1f}. Steps count during which other work "
        f"took at most {result['max_others']:.0%} of the machine's processors, for every contestant alike.",
        "",
        "| | steps counted | tokens/s | processor s | forward s | backward s | reduction s | optimizer s | peak MiB "
        "| final loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in result["contestants"]:
        lines.append(f"| {' | '.join(_cells(entry))} |")
    lines += [
        "",
        "The reference lets the padded rows of the vocabulary take part in the softmax, this project does not: at the "
        "first steps its loss is higher by nearly ln(padded/real vocabulary).",
    ]
    return "\n".join(lines) + "\n"


def _cells(entry: dict[str, Any]) -> list[str]:
    cells = [
        f"{entry['name']} ({entry['versions']['threads']} threads a process)",
        f"{entry['num_counted_steps']} of {entry['num_measured_steps']}",
    ]
    if entry["num_counted_steps"]:
        cells += [_with_quartiles(entry["tokens_per_second"], 0), _with_quartiles(entry["processor_s"], 2)]
        cells += [f"{entry[f'{part}_s']['median']:.3f}" for part in _PARTS]
    else:
        cells += ["–"] * (2 + len(_PARTS))
    loss = entry["final_loss"]
    return [*cells, f"{entry['peak_memory_mib']:.0f}", "–" if loss is None else f"{loss:.6f}"]


def _with_quartiles(values: dict[str, float], digits: int) -> str:
    median, lower, upper = (f"{values[name]:.{digits}f}" for name in ("median", "lower_quartile", "upper_quartile"))
    return f"{median} [{lower}–{upper}]"
