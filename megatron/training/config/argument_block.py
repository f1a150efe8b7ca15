"""The resolved configuration in Megatron's dotted form."""

from __future__ import annotations

from typing import Any

from megatron.training.config.run_config import RunConfig

_DOTS_END = 48


def format_arguments(config: RunConfig) -> str:
    """Return the block that opens every run's log: one line an argument, sorted by name.

    Dots fill each line up to column 51, where the value follows.
    """
    lines = ["------------------------ arguments ------------------------"]
    values = argument_values(config)
    for name in sorted(values, key=str.lower):
        lines.append(f"  {name} {'.' * (_DOTS_END - len(name))} {values[name]}")
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def argument_values(config: RunConfig) -> dict[str, Any]:
    """Return every argument of a run by Megatron's name, with those that follow from others."""
    values = {spec.name: list(value) if isinstance(value, tuple) else value for spec, value in config.flags()}
    values["world_size"] = config.world_size
    values["data_parallel_size"] = config.data_parallel_size
    values["params_dtype"] = config.model.params_dtype
    return values
