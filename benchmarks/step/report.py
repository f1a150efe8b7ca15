"""Summarize measured steps, and set the summaries out as a table."""

from __future__ import annotations

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


def summarize(tokens_per_step: int, runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize a contestant's runs, each a list of what its processes measured.

    Rates and parts are rank 0's; processor time and memory are summed over the processes.
    """
    leaders = [step for run in runs for step in run[0]["steps"]]
    processor = [
        sum(process["steps"][index]["processor_s"] for process in run)
        for run in runs
        for index in range(len(run[0]["steps"]))
    ]
    return {
        "tokens_per_second": spread([tokens_per_step / step["wall_s"] for step in leaders]),
        "step_s": spread([step["wall_s"] for step in leaders]),
        "processor_s": spread(processor),
        "parts_s": {part: spread([step[f"{part}_s"] for step in leaders]) for part in _PARTS},
        "peak_memory_mib": statistics.median(sum(process["peak_memory_mib"] for process in run) for run in runs),
        "final_loss": runs[-1][0]["losses"][-1],
        "versions": runs[-1][0]["versions"],
    }


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
    load = result["load_average"]
    lines = [
        f"# Training step, {result['date']}",
        "",
        f"{size}; tied embeddings, AdamW, no dropout. {result['rounds']} alternating rounds in fresh processes, each "
        f"{result['measured_steps']} steps after {result['warmup_steps']} of warm-up. Medians, quartiles in brackets; "
        "processor time is user + system over all processes (waiting threads spin, which counts).",
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ". "
        f"Load average before the runs: {load['min']:.1f} to {load['max']:.1f}.",
        "",
        "| | tokens/s | processor s | forward s | backward s | reduction s | optimizer s | peak MiB | final loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in result["contestants"]:
        rate, processor, parts = entry["tokens_per_second"], entry["processor_s"], entry["parts_s"]
        name = f"{entry['name']} ({entry['versions']['threads']} threads a process)"
        cells = [
            f"{name} | {rate['median']:.0f} [{rate['lower_quartile']:.0f}–{rate['upper_quartile']:.0f}]",
            f"{processor['median']:.2f} [{processor['lower_quartile']:.2f}–{processor['upper_quartile']:.2f}]",
            *(f"{parts[part]['median']:.3f}" for part in _PARTS),
            f"{entry['peak_memory_mib']:.0f}",
            f"{entry['final_loss']:.6f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "The reference lets the padded rows of the vocabulary take part in the softmax, this project does not: at the "
        "first steps its loss is higher by nearly ln(padded/real vocabulary).",
    ]
    return "\n".join(lines) + "\n"
