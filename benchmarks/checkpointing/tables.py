"""Set the figures of the checkpoint benchmark out as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

_TITLES = {
    "dd": "`dd bs=16M conv=fsync` of as many zeros",
    "ours": "ours, checksums included",
    "torch.save": "`torch.save`, then fsync",
    "distributed": "`torch.distributed.checkpoint`",
}


def markdown(result: dict[str, Any]) -> str:
    """Return a result file's text."""
    files = result["save_and_load"]
    lines = [
        f"# Checkpoints, {result['date']}",
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ". Load average "
        f"{result['load_average_before']:.1f} before, {result['load_average_after']:.1f} after. One thread a process, "
        f"{result['rounds']} alternating rounds; medians, quartiles in brackets.",
        "",
        f"## Saving {files['num_bytes'] / 1e9:.2f} GB of weights and optimizer state",
        "",
        "Every save ends when all bytes are on the disk.",
        "",
        "| | GB/s | s | of dd |",
        "|---|---|---|---|",
    ]
    speeds = {
        name: [files["file_bytes"][name] / seconds / 1e9 for seconds in times]
        for name, times in files["save_s"].items()
    }
    reference = statistics.median(speeds["dd"])
    for name, times in files["save_s"].items():
        share = statistics.median(speeds[name]) / reference
        lines.append(f"| {_TITLES[name]} | {_spread(speeds[name])} | {_spread(times)} | {share:.0%} |")
    lines += ["", "## Loading them again, nothing of it in memory", "", "| | GB/s | s |", "|---|---|---|"]
    for name, times in files["load_s"].items():
        lines.append(f"| {name} | {_spread([files['num_bytes'] / t / 1e9 for t in times])} | {_spread(times)} |")
    lines += ["", *_beside_training(result["beside_training"]), ""]
    lines += [
        "## Memory over saves in a row",
        "",
        "| | saves | before MiB | after the first | after the last | growth |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for title, name in (("at once", "memory"), ("`--async-save`", "memory_async")):
        before, after = result[name]["before_mib"], result[name]["after_mib"]
        memory = " | ".join(f"{figure:.0f}" for figure in (before, after[0], after[-1]))
        lines.append(f"| {title} | {len(after)} | {memory} | {after[-1] / after[0] - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def _beside_training(figures: dict[str, Any]) -> list[str]:
    plain = statistics.median(figures["plain_step_s"])
    blocks = [statistics.fmean(block) / plain - 1 for block in figures["beside_step_s"]]
    staging = [block[0] / plain - 1 for block in figures["beside_step_s"]]
    writing = [block[1] / plain - 1 for block in figures["beside_step_s"]]
    lengths = [len(block) for block in figures["beside_step_s"]]
    return [
        f"## Training beside a save of {figures['num_bytes'] / 1e9:.2f} GB",
        "",
        "Training on one thread. Steps beside an asynchronous save: from the one that ends with the staged copy to the "
        "one that ends with the publication, with all that saving takes of the training thread.",
        "",
        "| | |",
        "|---|---|",
        f"| step without a save | {_spread(figures['plain_step_s'])} s |",
        f"| longer: the step that ends with the staged copy | {_percent(staging)} |",
        f"| longer: the step after it, beside which most is written | {_percent(writing)} |",
        f"| longer: all steps up to the publication, on average | {_percent(blocks)} |",
        f"| steps that a save lasts | {statistics.median(lengths):g} |",
        f"| staged copy | {_spread(figures['staging_s'])} s |",
        f"| the same save, synchronous | {_spread(figures['synchronous_save_s'])} s |",
    ]


def _percent(shares: Sequence[float]) -> str:
    return f"{_spread([100 * share for share in shares], 1)} %"


def _spread(values: Sequence[float], digits: int = 3) -> str:
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return f"{quartiles[1]:.{digits}f} [{quartiles[0]:.{digits}f}–{quartiles[2]:.{digits}f}]"
