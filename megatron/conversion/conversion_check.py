"""Hold the result of a conversion against what was converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megatron.conversion.progress import ByteProgress
from megatron.core.dist_checkpointing.state_dict import MODEL_PREFIX
from megatron.core.errors import InputError, MegatronError
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.comparison import compare_sources
from megatron.interop.source_view import SourceView
from megatron.interop.streamed_logits import sample_tokens, source_config, streamed_logits

MOST_NAMED = 8
LOGITS_TOLERANCE = 1e-5
STATE = ("progress", "optimizer", "scheduler")


class ConversionMismatchError(MegatronError):
    """Report a result that is not what was converted: it was not published."""


def check_result(
    expected: CheckpointSource,
    result: CheckpointSource,
    *,
    keeps_state: bool,
    compares_logits: bool,
    log: Callable[[str], None],
) -> None:
    """Read every tensor of both again and compare the bits; with ``compares_logits`` also run both models.

    ``keeps_state`` says that progress, optimizer and schedule must be the same, too: a format of models has none.

    Raises:
        ConversionMismatchError: they differ; the message names the tensors.
        CheckpointError: the result cannot be read.
    """
    progress = ByteProgress("checking", sum(info.num_bytes for info in expected.tensors.values()), log)
    original = SourceView(expected, expected.common, on_read=progress.add)
    problems = [str(found) for found in compare_sources(original, result) if not found.is_equal]
    progress.finish()
    if keeps_state:
        problems += [
            f"{key}: {expected.common[key]} became {result.common[key]}"
            for key in STATE
            if expected.common[key] != result.common[key]
        ]
    if problems:
        raise mismatch(problems)
    log(f"  checked: all {len(original.tensors)} tensors are equal, bit by bit")
    if compares_logits:
        _compare_logits(expected, result, log)


def _compare_logits(expected: CheckpointSource, result: CheckpointSource, log: Callable[[str], None]) -> None:
    """Hold the logits that the result's own configuration and weights give against those of what was converted."""
    tokens = sample_tokens(source_config(expected))
    ours, theirs = streamed_logits(expected, tokens), streamed_logits(result, tokens)
    compare_logits(theirs, ours, "the checkpoint that was converted", LOGITS_TOLERANCE, log)


def compare_logits(
    logits: torch.Tensor, expected: torch.Tensor, origin: str, tolerance: float, log: Callable[[str], None]
) -> None:
    """Print how far logits are from the expected ones.

    Raises:
        ConversionMismatchError: that is too far, relative to the largest.
    """
    if logits.shape != expected.shape:
        raise mismatch([f"logits have the shape {list(logits.shape)}, those of {origin} {list(expected.shape)}"])
    difference = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= tolerance:
        raise mismatch([f"logits differ from those of {origin} by {difference:.1e}, relative to the largest"])
    num_tokens = expected.shape[0] * expected.shape[1]
    log(f"  checked: logits of {num_tokens} tokens are within {difference:.1e} of those of {origin}")


def mismatch(problems: list[str]) -> ConversionMismatchError:
    """Return the error that keeps a result from being published."""
    more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
    return ConversionMismatchError(
        f"the result is not what was converted and was not published: {'; '.join(problems[:MOST_NAMED])}{more}"
    )


def parameters_of(source: CheckpointSource) -> int:
    """Return how many parameters the model has; a tied weight counts once."""
    return sum(info.num_elements for name, info in source.tensors.items() if name.startswith(MODEL_PREFIX))


@torch.no_grad()
def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits that the transformers package computes in float32; nothing is downloaded, no code is loaded.

    Shapes: ``tokens: [b, s] -> [b, s, v]`` float32.

    Raises:
        InputError: the package is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except (ImportError, OSError) as error:
        raise InputError(
            f"--test-logits needs the transformers package ({error}); install it, or leave the flag out"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    model.train(False)
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits
