"""A command line of training as words: what a flag has, and the words with other flags."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.arguments import without_flags

LAYOUT_FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--sequence-parallel",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--pipeline-schedule",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--moe-token-dispatcher-type",
)
VIRTUAL_FLAGS = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
RECOMPUTE_FLAGS = (
    "--recompute-granularity",
    "--recompute-activations",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--moe-layer-recompute",
    "--distribute-saved-activations",
)
SHARDING_FLAGS = (
    "--use-distributed-optimizer",
    "--data-parallel-sharding-strategy",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)
PRECISION_FLAGS = (
    "--bf16",
    "--fp16",
    "--fp8-format",
    "--fp8-recipe",
    "--fp8-hybrid",
    "--fp8-e4m3",
    "--fp8-param-gather",
)


def replaced(words: Sequence[str], flag: str, *values: str) -> tuple[str, ...]:
    """Return the words with one flag at other values."""
    return (*without_flags(words, (flag,)), flag, *values)


def has_flag(words: Sequence[str], *flags: str) -> bool:
    """Return whether any of the flags is given, with its value behind it or behind an equals sign."""
    return not {word.partition("=")[0] for word in words}.isdisjoint(flags)


def whole_value(words: Sequence[str], flag: str, default: int) -> int:
    """Return a flag's last whole number, or the default where it has none."""
    found = default
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == flag:
            text = value or (words[index + 1] if index + 1 < len(words) else "")
            found = int(text) if text.isdecimal() else default
    return found


def as_typed(words: Sequence[str]) -> list[str]:
    """Return each flag with its values as one text."""
    flags: list[str] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags
