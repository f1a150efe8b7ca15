"""Which fp8 recipes are predicted slower than bf16: one table, for a run's first lines, plans and docs/fp8.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.training.config.run_config import RunConfig

BF16 = "bf16"
PREDICTED_MS: Mapping[str, Mapping[str, float]] = {
    "H100": {BF16: 260, "delayed": 216, "tensorwise": 234, "rowwise": 458, "blockwise": 490},
    "B200": {BF16: 120, "delayed": 100, "tensorwise": 110, "rowwise": 210, "blockwise": 223, "mxfp8": 230},
}
"""Milliseconds of a step by GPU type and recipe: 4 layers of Llama 3.1 8B, TP 1 and DP 8 on 8 GPUs, two micro-batches
of 8,192 tokens, by the dry run (tests/unit/dry_run/test_float8.py predicts them again)."""


def float8_speed_line(recipe: str) -> str | None:
    """Return a line that says that a recipe is predicted slower than bf16, None if it is not."""
    slower = [
        f"{times[recipe]:g} ms per step instead of {times[BF16]:g} on 8 {gpu}"
        for gpu, times in PREDICTED_MS.items()
        if times.get(recipe, 0.0) > times[BF16]
    ]
    if not slower:
        return None
    return (
        f"--fp8-recipe {recipe} is predicted slower than bf16: {', '.join(slower)} (4 layers of Llama 3.1 8B, TP 1, "
        "DP 8; predicted by tools/gpu_dry_run.py, not measured); delayed and tensorwise are predicted faster than bf16"
    )


def float8_notes(config: RunConfig) -> Iterator[str]:
    """Yield the line of the recipe that a run takes."""
    line = None if config.model.fp8_format is None else float8_speed_line(config.model.fp8_recipe)
    if line is not None:
        yield line
