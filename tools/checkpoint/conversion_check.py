"""Hold the result of a conversion against what was converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.state_dict import MODEL_PREFIX, OPTIMIZER_PREFIX
from megatron.core.errors import MegatronError
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.comparison import compare_sources
from megatron.interop.open_checkpoint import open_checkpoint
from megatron.interop.source_view import SourceView
from megatron.interop.streamed_logits import sample_tokens, source_config, streamed_logits
from tools.checkpoint.progress import ByteProgress

MOST_NAMED = 8
LOGITS_TOLERANCE = 1e-5
_STATE = ("progress", "optimizer", "scheduler")


class ConversionMismatchError(MegatronError):
    """Report a result that is not what was converted: it was not published."""


def check_result(expected: CheckpointSource, folder: Path, compares_logits: bool, log: Callable[[str], None]) -> None:
    """Read every tensor of both again and compare the bits; with ``compares_logits`` also run both models.

    What a format cannot hold (the optimizer's state, in Hugging Face's) is not asked of it.

    Raises:
        ConversionMismatchError: they differ; the message names the tensors.
        CheckpointError: the result cannot be read.
    """
    result = open_checkpoint(folder)
    try:
        keeps_optimizer = result.common["optimizer"] is not None
        total = sum(
            info.num_bytes
            for name, info in expected.tensors.items()
            if keeps_optimizer or not name.startswith(OPTIMIZER_PREFIX)
        )
        progress = ByteProgress("checking", total, log)
        original = SourceView(expected, expected.common, keeps_optimizer=keeps_optimizer, on_read=progress.add)
        problems = [str(found) for found in compare_sources(original, result) if not found.is_equal]
        progress.finish()
        if keeps_optimizer:
            problems += [
                f"{key}: {expected.common[key]} became {result.common[key]}"
                for key in _STATE
                if expected.common[key] != result.common[key]
            ]
        if compares_logits and not problems:
            problems += compare_logits(expected, result, log)
        if problems:
            raise _mismatch(problems)
        log(f"  checked: all {len(original.tensors)} tensors are equal, bit by bit")
    finally:
        result.close()


def compare_logits(expected: CheckpointSource, result: CheckpointSource, log: Callable[[str], None]) -> list[str]:
    """Return what is wrong with the logits that the result's own configuration and weights give, nothing if all is."""
    tokens = sample_tokens(source_config(expected))
    ours, theirs = streamed_logits(expected, tokens), streamed_logits(result, tokens)
    return describe_logits(theirs, ours, "the model that was converted", LOGITS_TOLERANCE, log)


def describe_logits(
    logits: torch.Tensor, expected: torch.Tensor, origin: str, tolerance: float, log: Callable[[str], None]
) -> list[str]:
    """Print how far logits are from the expected ones; return the problem if that is too far."""
    if logits.shape != expected.shape:
        return [f"logits have the shape {list(logits.shape)}, those of {origin} {list(expected.shape)}"]
    difference = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= tolerance:
        return [f"logits differ from those of {origin} by {difference:.1e}, relative to the largest"]
    log(f"  checked: logits of {expected.shape[0] * expected.shape[1]} tokens within {difference:.1e} of {origin}")
    return []


def _mismatch(problems: list[str]) -> ConversionMismatchError:
    more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
    return ConversionMismatchError(
        f"the result is not what was converted and was not published: {'; '.join(problems[:MOST_NAMED])}{more}"
    )


def parameters_of(source: CheckpointSource) -> int:
    """Return how many parameters the model has; a tied weight counts once."""
    return sum(info.num_elements for name, info in source.tensors.items() if name.startswith(MODEL_PREFIX))
