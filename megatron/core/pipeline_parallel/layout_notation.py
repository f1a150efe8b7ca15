"""The notation of --pipeline-model-parallel-layout: ``E`` embedding, ``t`` layer, ``L`` loss, ``|`` between stages."""

from __future__ import annotations

import re

from megatron.core.errors import ConfigurationError

_TOKENS = re.compile(r"\s+|,|(?P<item>[EtL|()])|\*\s*(?P<count>\d+)|(?P<wrong>.)", re.DOTALL)
_FLAG = "--pipeline-model-parallel-layout"
_MAX_EXPANDED_LENGTH = 100_000


def parse_layout(text: str, num_layers: int) -> tuple[str, ...]:
    """Return the stages that a layout names, each as a string of ``E``, ``t`` and ``L``.

    ``x*3`` repeats a letter or a bar, ``(tt|)*4`` a group, which may hold groups; commas and spaces mean nothing. A
    stage may be empty. ``Et|(tt|)*2L`` has four stages, the last one with the loss alone.

    Raises:
        ConfigurationError: it cannot be read, or does not hold the embedding first, ``num_layers`` layers, and the
            loss last.
    """
    expanded = _expand(text)
    stages = tuple(expanded.split("|"))
    problems = []
    if expanded.count("E") != 1 or not expanded.startswith("E"):
        problems.append(f"{_FLAG} {text!r} must hold the embedding E once, at its very beginning")
    if expanded.count("L") != 1 or not expanded.endswith("L"):
        problems.append(f"{_FLAG} {text!r} must hold the loss L once, at its very end")
    if expanded.count("t") != num_layers:
        problems.append(f"{_FLAG} {text!r} has {expanded.count('t')} layers and --num-layers is {num_layers}")
    if problems:
        raise ConfigurationError(problems)
    return stages


def _expand(text: str) -> str:
    """Write every repetition out."""
    # One list of items for each open parenthesis; a repetition acts on the last item.
    open_groups: list[list[str]] = [[]]
    length = 0
    for match in _TOKENS.finditer(text):
        item, count = match["item"], match["count"]
        items = open_groups[-1]
        if match["wrong"] is not None:
            raise ConfigurationError(
                f"{_FLAG} {text!r} has {match['wrong']!r} at character {match.start() + 1}; write E (embedding), "
                "t (layer), L (loss), | (next stage), (…) and *number"
            )
        if item == "(":
            open_groups.append([])
        elif item == ")":
            if len(open_groups) == 1:
                raise ConfigurationError(f"{_FLAG} {text!r} closes a parenthesis that it does not open")
            open_groups.pop()
            open_groups[-1].append("".join(items))
        elif item is not None:
            items.append(item)
        elif count is not None:
            if not items:
                raise ConfigurationError(f"{_FLAG} {text!r} repeats nothing at character {match.start() + 1}")
            length = len(items[-1]) * int(count)
            if length > _MAX_EXPANDED_LENGTH:
                raise ConfigurationError(f"{_FLAG} {text!r} repeats to {length} items; no model has so many layers")
            items[-1] *= int(count)
    if len(open_groups) > 1:
        raise ConfigurationError(f"{_FLAG} {text!r} does not close every parenthesis")
    return "".join(open_groups[0])
